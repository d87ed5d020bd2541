"""Several streams: blocks that are freed while another stream may still use them."""

import torch

torch.manual_seed(0)
main = torch.cuda.current_stream()
sides = [torch.cuda.Stream() for _ in range(3)]
pending = []
for step in range(40):
    side = sides[step % 3]
    x = torch.randn(50_000 + 7_919 * step, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
        z = torch.empty(1 << (10 + step % 14), dtype=torch.uint8, device="cuda")
        x.record_stream(side)
    y.record_stream(main)
    z.record_stream(sides[(step + 1) % 3])
    z.record_stream(main)
    del x, y, z
    if step % 10 == 9:
        event = torch.cuda.Event()
        event.record(side)
        main.wait_event(event)
        pending.append(event)
    if step % 16 == 15:
        torch.cuda.synchronize()
pending[0].synchronize()
torch.cuda.empty_cache()

# Frees that are still outstanding when the snapshot is taken.
last = torch.zeros(3_000_000, device="cuda")
with torch.cuda.stream(sides[0]):
    big = last + 1
last.record_stream(sides[0])
big.record_stream(main)
del last, big
print("used", len(sides) + 1, "streams")
