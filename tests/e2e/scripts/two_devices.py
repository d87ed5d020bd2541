"""Two devices: a model on each, copies between them, a network split over both."""

import torch
import torch.nn as nn

torch.manual_seed(0)
first, second = torch.device("cuda:0"), torch.device("cuda:1")
a = torch.randn(1_000_000, device=first)
b = a.to(second, non_blocking=True)
c = (b * 2).to(first)
with torch.cuda.device(second):
    default = torch.zeros(4096, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        scratch = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
    scratch.record_stream(torch.cuda.current_stream())
    del scratch


class Split(nn.Module):
    """Half of the layers on each device; backward runs in one autograd thread a device."""

    def __init__(self):
        super().__init__()
        self.low = nn.Sequential(nn.Linear(512, 1024), nn.ReLU()).to(first)
        self.high = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)).to(second)

    def forward(self, x):
        return self.high(self.low(x.to(first)).to(second))


net = Split()
optimizer = torch.optim.Adam(net.parameters())
for step in range(3):
    net(torch.randn(128, 512)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
del a, c
torch.cuda.empty_cache()
print("allocated on", torch.cuda.memory_allocated(0) > 0, torch.cuda.memory_allocated(1) > 0)
