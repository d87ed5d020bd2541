"""Fully sharded training (FSDP2) of two ranks under torchrun, with mixed precision."""

import os

import torch
import torch.distributed as dist
from models import GPT, lm_loss, token_batch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
net = GPT(vocab=1000, context=64, layers=3, width=128, heads=4).cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in net.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(net, mp_policy=policy)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    ids, targets = token_batch(1000, 4, 64)
    lm_loss(net(ids), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
print(f"rank {rank} of {dist.get_world_size()} allocated {torch.cuda.memory_allocated(rank)}")
dist.destroy_process_group()
