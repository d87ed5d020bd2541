"""The driver's own pool in place of PyTorch's: PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync."""

import torch
import torch.nn as nn

assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):
    net(torch.randn(128 * (step + 1), 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    x = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
x.record_stream(torch.cuda.current_stream())
del x
torch.cuda.synchronize()
before = torch.cuda.memory_allocated()
held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() - before == 64 << 20
total = torch.cuda.get_device_properties(0).total_memory
try:
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("refused more than the card has")
del held
torch.cuda.empty_cache()
print("allocated", torch.cuda.memory_allocated(), "peak", torch.cuda.max_memory_allocated())
