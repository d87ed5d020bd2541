"""Activation checkpointing, re-entrant and not, and activations kept on the host."""

import torch
from models import GPT, lm_loss, token_batch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.manual_seed(0)
net = GPT(vocab=1000, context=128, layers=4, width=256, heads=8).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def forward(ids, reentrant):
    x = net.tokens(ids) + net.positions.weight[: ids.shape[1]]
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return net.head(net.norm(x))


for reentrant in (False, True):
    ids, targets = token_batch(1000, 8, 128)
    optimizer.zero_grad()
    lm_loss(forward(ids, reentrant), targets).backward()
    optimizer.step()

with torch.autograd.graph.save_on_cpu(pin_memory=True):
    loss = lm_loss(net(ids), targets)
optimizer.zero_grad()
loss.backward()

layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
x = torch.randn(128, 512, device="cuda", requires_grad=True)
checkpoint_sequential(layers, 4, x, use_reentrant=False).sum().backward()
print("trained with three ways to keep activations")
