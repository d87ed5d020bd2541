"""One GPU: which module and phase holds what, and the peak of a step."""

import memtrace
import torch
from model import Transformer, batch

model = Transformer().cuda()
optimizer = torch.optim.AdamW(model.parameters())
memtrace.watch(model, optimizer)

for number in range(3):
    memtrace.step(number)
    with memtrace.peak() as peak:
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"step {number}: {peak}")
