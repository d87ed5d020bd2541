"""Fully sharded training: torchrun --nproc-per-node 2 examples/fsdp2.py. Each
rank holds half of the parameters."""

import os
import time

import memtrace
import torch
import torch.distributed as dist
from model import Transformer, batch
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = Transformer().cuda()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
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
