"""A GPT-like transformer trained for a few steps with AdamW and a growing batch."""

import torch
from models import GPT, lm_loss, token_batch

torch.manual_seed(0)
net = GPT(vocab=5000, context=128, layers=4, width=256, heads=8).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    ids, targets = token_batch(5000, 4 + 2 * step, 128)
    loss = lm_loss(net(ids), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
net.eval()
with torch.no_grad():
    for length in (16, 17, 64, 128):
        logits = net(ids[:1, :length])[:, -1]
print("trained", step + 1, "steps of", sum(p.numel() for p in net.parameters()), "parameters")
