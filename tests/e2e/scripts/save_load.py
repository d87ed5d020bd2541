"""A checkpoint is written, read back on the device and on the host, and training goes on."""

import io

import torch
import torch.nn as nn

torch.manual_seed(0)


def model():
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()


def step(net, optimizer):
    net(torch.randn(64, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


net = model()
optimizer = torch.optim.AdamW(net.parameters())
step(net, optimizer)
file = io.BytesIO()
torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)

for where in ("cuda", "cpu"):
    file.seek(0)
    state = torch.load(file, map_location=where)
    fresh = model()
    fresh.load_state_dict(state["net"])
    restarted = torch.optim.AdamW(fresh.parameters())
    restarted.load_state_dict(state["optimizer"])
    step(fresh, restarted)
small = torch.arange(100).cuda()
file = io.BytesIO()
torch.save(small, file)
file.seek(0)
assert torch.equal(torch.load(file).cpu(), torch.arange(100))
print("saved", len(file.getvalue()), "bytes")
