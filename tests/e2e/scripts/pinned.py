"""Page-locked host memory and asynchronous copies both ways, on the current and on a side stream."""

import torch

side = torch.cuda.Stream()
kept = []
for size in (1, 4_000, 1 << 20, 5_000_000):
    host = torch.arange(size, dtype=torch.float32).pin_memory()
    assert host.is_pinned()
    device = host.to("cuda", non_blocking=True)
    with torch.cuda.stream(side):
        copied = host.cuda(non_blocking=True)
        back = torch.empty(size, pin_memory=True)
        back.copy_(copied, non_blocking=True)
    copied.record_stream(side)
    side.synchronize()
    kept.append((device, back))
    del host, copied
torch.cuda.synchronize()
small = torch.arange(1_000, dtype=torch.int64)
round_trip = small.pin_memory().cuda(non_blocking=True).cpu()
assert torch.equal(small, round_trip), "a small copy must come back as it was"
print("copied", len(kept), "sizes both ways")
