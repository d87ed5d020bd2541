"""Data-parallel training: torchrun --nproc-per-node 2 examples/ddp.py. Each
rank writes a snapshot of its own."""

import os
import time

import memtrace
import torch
import torch.distributed as dist
from model import Transformer, batch
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = DistributedDataParallel(Transformer().cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters())
memtrace.watch(model, optimizer)

for number in range(2):
    memtrace.step(number)
    with memtrace.peak() as peak:
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {rank} step {number}: {peak}")
dist.destroy_process_group()
time.sleep(0.5)  # before CPython 3.12 a thread of autograd's that is still busy as Python ends may abort the process
