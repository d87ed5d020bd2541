"""The demo: a small transformer, written out, trained for three steps in mixed precision.

Token and position embeddings, causal attention, MLP, layer norms, AdamW. It knows nothing of
memtrace; run it under `memtrace run` to see what it takes, or as it is.
"""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS, BATCH, STEPS = 16_384, 256, 512, 8, 6, 16, 3


class Block(nn.Module):
    """Attention and MLP, each on the normalised input, each added to it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attention(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main():
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {torch.cuda.get_device_name()}")
    for step in range(STEPS):
        batch = torch.randint(VOCAB, (BATCH, CONTEXT + 1)).to(device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"step {step + 1} of {STEPS}: peak so far {peak:,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
