"""The small networks that several corpus programs train.

They are written for memory behaviour, not for results: real layers, sizes that fit any card, and no
dependence on the values of tensors, because on the virtual GPU every computed value reads as zero.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    """Causal self-attention over one fused projection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT-like decoder: learned positions, tied output projection, no dropout."""

    def __init__(self, vocab=1000, context=64, layers=2, width=128, heads=4):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @staticmethod
    def parameter_count(vocab, context, layers, width):
        """On paper: embeddings, 12·width² + 13·width a block, the last norm; the head is tied."""
        block = 12 * width * width + 13 * width
        return vocab * width + context * width + layers * block + 2 * width


class ConvNet(nn.Module):
    """A small residual network for 32×32 images."""

    class Residual(nn.Module):
        def __init__(self, channels_in, channels_out, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(channels_out)
            self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(channels_out)
            self.skip = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

        def forward(self, x):
            y = F.relu(self.norm1(self.conv1(x)))
            return F.relu(self.norm2(self.conv2(y)) + self.skip(x))

    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.stages = nn.Sequential(
            self.Residual(32, 32, 1), self.Residual(32, 64, 2), self.Residual(64, 128, 2)
        )
        self.head = nn.Linear(128, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def token_batch(vocab, batch, length):
    """Random token ids and targets, made on the host so that they are valid on any device."""
    ids = torch.randint(0, vocab, (batch, length + 1))
    return ids[:, :-1].cuda(), ids[:, 1:].cuda()


def lm_loss(logits, targets):
    """Cross entropy over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
