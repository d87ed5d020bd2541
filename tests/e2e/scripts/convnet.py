"""A residual convolution network: training, channels-last, transposed and 3-D convolutions."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from models import ConvNet

torch.manual_seed(0)
for memory_format in (torch.contiguous_format, torch.channels_last):
    net = ConvNet().cuda().to(memory_format=memory_format)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        images = torch.randn(64, 3, 32, 32).cuda().to(memory_format=memory_format)
        labels = torch.randint(0, 10, (64,)).cuda()
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
up = nn.ConvTranspose2d(8, 8, 3).cuda()
up(torch.randn(2, 8, 16, 16, device="cuda")).sum().backward()
volume = nn.Conv3d(3, 8, 3).cuda()
volume(torch.randn(2, 3, 8, 16, 16, device="cuda")).sum().backward()
line = nn.Conv1d(3, 8, 3).cuda()
line(torch.randn(2, 3, 64, device="cuda")).sum().backward()
pooled = F.max_pool2d(images.float(), 2)
resized = F.interpolate(pooled, scale_factor=2, mode="bilinear")
print("trained two networks,", step + 1, "steps each")
