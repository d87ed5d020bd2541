"""Segments that come and go: small and large pools, partly used segments, empty_cache between."""

import torch

for turn in range(4):
    small = [torch.empty(100_000 + 1_000 * i, dtype=torch.uint8, device="cuda") for i in range(40)]
    large = [torch.empty((3 + 5 * i) << 20, dtype=torch.uint8, device="cuda") for i in range(8)]
    del small[turn::3], large[turn::2]
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    again = torch.empty(9 << 20, dtype=torch.uint8, device="cuda")
    del small, again
    if turn % 2:
        del large
        torch.cuda.empty_cache()
keep = [torch.empty(n, device="cuda") for n in (1, 1 << 18, 1 << 20)]
torch.cuda.empty_cache()
print("reserved", torch.cuda.memory_reserved(), "allocated", torch.cuda.memory_allocated())
