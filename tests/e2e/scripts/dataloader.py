"""A DataLoader with forked workers and a pinning thread feeds a training loop."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.full((3, 32, 32), float(index)), index % 10


torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).cuda()
net(torch.zeros(1, 3, 32, 32, device="cuda"))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
batches = 0
for epoch in range(2):
    for images, labels in DataLoader(Images(), batch_size=20, num_workers=2, pin_memory=True):
        assert images.is_pinned()
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batches += 1
print("trained", batches, "batches")
