"""Backward passes that run in autograd's own threads: plain, with Python inside, and several at once."""

import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Cube(torch.autograd.Function):
    """A Python backward: its allocations happen in autograd's thread, under a Python frame."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        scratch = torch.empty_like(x)
        return 3 * x * x * grad + scratch.zero_()


net = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
x = torch.randn(512, 256, device="cuda", requires_grad=True)
for _ in range(3):
    Cube.apply(net(x)).sum().backward()

# Gradients of gradients.
y = torch.randn(64, 64, device="cuda", requires_grad=True)
(first,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
first.square().sum().backward()

hooked = []
y.register_hook(lambda grad: hooked.append(grad.clone()))
F.relu(y).sum().backward()


def train(seed):
    """One of several threads that call backward at the same time."""
    model = nn.Linear(128, 128).cuda()
    for step in range(20):
        model(torch.randn(32, 128, device="cuda")).sum().backward()
        model.zero_grad(set_to_none=bool(step % 2))


threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ran backward in", len(threads) + 1, "threads of callers")
