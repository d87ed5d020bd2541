"""Elementwise arithmetic, reductions, views and in-place work over sizes from nothing to 64 MiB."""

import torch

torch.manual_seed(0)
keep = []
for n in (0, 1, 127, 128, 129, 5_000, 262_144, 262_145, 3_000_000, 16_777_216):
    x = torch.randn(n, device="cuda")
    y = torch.sin(x) * 2 + x.abs().sqrt()
    y.mul_(0.5).add_(x)
    keep.append(y[: n // 2])
    total = y.sum() + y.float().double().sum()

matrix = torch.arange(12 * 1024, device="cuda", dtype=torch.float32).view(12, 1024)
views = [matrix.t(), matrix[2:5], matrix.expand(3, 12, 1024), matrix.unfold(1, 8, 4)]
copies = [v.contiguous() for v in views]
keep.append(torch.cat([matrix, matrix * 2]).reshape(-1)[::3].clone())
for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
    keep.append(matrix.to(dtype))
ordered, order = torch.randn(10_000, device="cuda").sort()
top = torch.topk(ordered, 50)
counts = torch.bincount(torch.randint(0, 64, (4096,)).cuda(), minlength=64)
cumulative = torch.cumsum(matrix, dim=1)
where = torch.where(matrix > 3, matrix, -matrix)
storage = torch.empty(1000, device="cuda")
storage.untyped_storage().resize_(4_000_000)
storage.untyped_storage().resize_(0)
del copies, x, y
host = cumulative.cpu()
print("kept", len(keep), "tensors")
