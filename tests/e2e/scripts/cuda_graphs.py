"""CUDA graphs: a whole training step captured and replayed, two graphs in one pool, graphed callables."""

import torch
import torch.nn as nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16)).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x = torch.randn(64, 256, device="cuda")


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
optimizer.zero_grad(set_to_none=True)
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(3):
    x.copy_(torch.randn(64, 256))
    graph.replay()

second = torch.cuda.CUDAGraph()
with torch.cuda.graph(second, pool=graph.pool()):
    helper = torch.cuda.Stream()
    helper.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(helper):
        y = x * 2
    torch.cuda.current_stream().wait_stream(helper)
    y.record_stream(helper)
    z = y + 1
    del y
second.replay()

mixed = torch.cuda.make_graphed_callables(nn.Linear(256, 256).cuda(), (x.clone().requires_grad_(),))
mixed(x).sum().backward()
outside = torch.randn(1_000_000, device="cuda")
graph.reset()
torch.cuda.empty_cache()
print("captured and replayed")
