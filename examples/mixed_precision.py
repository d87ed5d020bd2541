"""Mixed precision: the copies that autocast makes of the weights are the forward pass's."""

import memtrace
import torch
from model import Transformer, batch

model = Transformer().cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
memtrace.watch(model, optimizer)

for number in range(2):
    memtrace.step(number)
    with memtrace.peak() as peak:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(f"step {number}: {peak}")
