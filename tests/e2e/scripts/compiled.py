"""torch.compile: inductor writes Triton kernels, Triton really compiles them, training runs on them."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
        self.norm = nn.LayerNorm(128)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


net = torch.compile(Net().cuda())
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    net(torch.randn(64, 128, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.compile
def pointwise(a, b):
    return torch.sin(a) * b + torch.cos(b).sum(0)


kept = pointwise(torch.randn(100, 300, device="cuda"), torch.randn(100, 300, device="cuda"))
assert kept.shape == (100, 300)
print("compiled and trained", step + 1, "steps")
