"""ResNet-50's training peaks with four ways of checkpointing, and in half precision: what was published of a T4.

Prints a JSON object, megabytes (10^6) by way. The network is that of "Deep Residual Learning for Image Recognition" with
the stride on the 3x3 convolution, which is the one that everybody trains.
"""

import json

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 32
EXPANSION = 4


def convolution(inputs, outputs, size, stride=1):
    """A convolution without bias and the normalization behind it."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = width * EXPANSION
        self.path = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Sequential(*convolution(inputs, outputs, 1, stride)) if changes else None
        self.last = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.path(x)
        y += x if self.shortcut is None else self.shortcut(x)
        return self.last(y)


class ResNet50(nn.Module):
    def __init__(self, way, classes):
        super().__init__()
        self.way = way
        self.stem = nn.Sequential(*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.stages, inputs = nn.ModuleList(), 64
        for blocks, width, stride in [(3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)]:
            stage = nn.Sequential()
            for index in range(blocks):
                stage.append(Bottleneck(inputs, width, stride if index == 0 else 1))
                inputs = width * EXPANSION
            self.stages.append(stage)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        x = self.stem(x)
        for index, stage in enumerate(self.stages):
            if self.way == "per stage":
                x = checkpoint(stage, x, use_reentrant=False)
            elif self.way == "per block" or (self.way == "aggressive" and index >= 2):
                for block in stage:
                    x = checkpoint(block, x, use_reentrant=False)
            else:
                x = stage(x)
        return self.head(x.mean((2, 3)))


def single(way):
    """The peak of steps in single precision without an optimizer, after two steps to warm up."""
    model = ResNet50(way, 1000).cuda()
    images = torch.randn(BATCH, 3, 224, 224, device="cuda")
    labels = torch.zeros(BATCH, dtype=torch.long, device="cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated() / 1e6


def half():
    """The peak of a step with autocast, AdamW, ten classes and checkpoints in the last two stages."""
    model = ResNet50("aggressive", 10).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(4):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        images, labels = torch.randn(BATCH, 3, 224, 224).cuda(), torch.zeros(BATCH, dtype=torch.long).cuda()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.cuda.max_memory_allocated() / 1e6


peaks = {way: single(way) for way in ("none", "aggressive", "per stage", "per block")}
torch.cuda.empty_cache()
peaks["half"] = half()
print(json.dumps(peaks))
