"""Events that are the program's own, recorded and queried among the allocator's: torch.Event, and backward on two streams.

PyTorch's generic events and its allocator use the same library and the same calls; only the allocator's decide when a
block is free again.
"""

import torch
import torch.nn as nn

torch.manual_seed(0)
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
for step in range(30):
    x = torch.empty(10_000 + 4_096 * step, dtype=torch.uint8, device="cuda")
    event = torch.Event(device="cuda")
    event.record(main)
    side.wait_event(event)
    x.record_stream(side)
    later = torch.Event(device="cuda")
    later.record(side)
    if step % 3 == 0:
        later.query()
    del x
    again = torch.empty(5_000, dtype=torch.uint8, device="cuda")
    if step % 7 == 0:
        later.synchronize()

# Autograd joins streams with events of the same kind.
# In this thread: a thread of autograd's own that still wants the GIL when Python ends aborts the process, with memtrace or without.
torch.autograd.set_multithreading_enabled(False)
net_a, net_b = nn.Linear(256, 256).cuda(), nn.Linear(256, 256).cuda()
for step in range(5):
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = net_b(x)
    x.record_stream(side)
    main.wait_stream(side)
    y.record_stream(main)
    (net_a(x) + y).sum().backward()
    del x, y
torch.cuda.synchronize()
kept = torch.empty(1_000, device="cuda")
print("used", step + 1, "backward passes on two streams")
