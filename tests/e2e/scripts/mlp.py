"""A multilayer perceptron trained with SGD and momentum, gradients set to None and set to zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
net = net.cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for step in range(6):
    x = torch.randn(256, 784).cuda()
    target = torch.randint(0, 10, (256,)).cuda()
    loss = F.cross_entropy(net(x), target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
with torch.no_grad():
    prediction = net(torch.randn(1000, 784, device="cuda")).argmax(1)
print("trained", step + 1, "steps")
