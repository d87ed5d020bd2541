"""Data-parallel training of two ranks under torchrun (each on its own device) over NCCL."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 16))
net = DistributedDataParallel(net.cuda(), device_ids=[rank], bucket_cap_mb=1)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    net(torch.randn(32, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = torch.ones(1024, device="cuda")
dist.all_reduce(total)
gathered = [torch.empty_like(total) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, total)
dist.barrier()
torch.cuda.synchronize()
print(f"rank {rank} of {dist.get_world_size()} allocated {torch.cuda.memory_allocated(rank)}")
dist.destroy_process_group()
