"""torch.compile: hooks vanish inside a compiled region, so all of it is labelled
`forward`, and its gradients `backward`."""

import memtrace
import torch
from torch import nn

net = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)).cuda()
model = torch.compile(net, fullgraph=True)  # a hook that breaks the graph would be an error
optimizer = torch.optim.AdamW(model.parameters())
memtrace.watch(model, optimizer)

for number in range(3):
    memtrace.step(number)
    with memtrace.peak() as peak:
        model(torch.randn(64, 128, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {number}: {peak}")
