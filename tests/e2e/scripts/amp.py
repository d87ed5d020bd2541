"""Mixed precision: float16 with a gradient scaler, then bfloat16, over convolutions and linears."""

import torch
import torch.nn.functional as F
from models import GPT, ConvNet, lm_loss, token_batch

torch.manual_seed(0)
net = ConvNet().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    images, labels = torch.randn(32, 3, 32, 32).cuda(), torch.randint(0, 10, (32,)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(images), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

gpt = GPT(vocab=2000, context=64, layers=2, width=128, heads=4).cuda()
optimizer = torch.optim.AdamW(gpt.parameters())
for step in range(3):
    ids, targets = token_batch(2000, 8, 64)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = lm_loss(gpt(ids), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained in float16 and bfloat16")
