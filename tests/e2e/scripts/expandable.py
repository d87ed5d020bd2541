"""Expandable segments: they grow, shrink in the middle, and are unmapped when memory is short.

Needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which is read when the process starts.
"""

import torch

MIB = 1 << 20
blocks = [torch.empty(n * MIB, dtype=torch.uint8, device="cuda") for n in (1, 3, 30, 50, 7, 100, 2)]
small = [torch.empty(10_000 * (i + 1), dtype=torch.uint8, device="cuda") for i in range(30)]
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    other = [torch.empty(25 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
del blocks[1::2], small[::2], other[0]
torch.cuda.empty_cache()
blocks.append(torch.empty(120 * MIB, dtype=torch.uint8, device="cuda"))
blocks.append(torch.empty(45 * MIB, dtype=torch.uint8, device="cuda"))
with torch.cuda.stream(side):
    other.append(torch.empty(60 * MIB, dtype=torch.uint8, device="cuda"))

total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(1024 * MIB / total)
try:
    while True:
        blocks.append(torch.empty(90 * MIB, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    print("refused with", len(blocks), "blocks")
del blocks[3::2]
blocks.append(torch.empty(150 * MIB, dtype=torch.uint8, device="cuda"))
segments = torch.cuda.memory_snapshot()
assert segments and all(s["is_expandable"] for s in segments), "expandable segments are not in use"
print("segments", len(segments))
