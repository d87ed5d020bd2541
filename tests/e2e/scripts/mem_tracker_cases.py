"""Cases that PyTorch's tracker has no answer to; prints what ours says as JSON."""

import json

import torch
from trackers_model import Net

import memtrace

device = torch.device("cuda", 0)
model = Net(512, layers=2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
size = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
batch = torch.randn(64, 512, device="cuda")
said = {"parameters": size}


def snapshot(tracker, kind="current"):
    return tracker.get_tracker_snapshot(kind)[device]


# Gradients that are gone before anybody looks.
with memtrace.MemTracker() as tracker:
    tracker.track_external(model)
    model(batch).sum().backward()
    model.zero_grad()
    said["gone"] = snapshot(tracker, "peak"), snapshot(tracker)

# Gradients that a hook on them gives back inside the backward pass.
given = []
hooks = []
for parameter in model.parameters():

    def step(p):
        given.append(-(-p.grad.nbytes // 512) * 512)
        if p is first:
            said["in a hook"] = snapshot(tracker)
        p.grad = None

    hooks.append(parameter.register_post_accumulate_grad_hook(step))
first = model.head.weight
with memtrace.MemTracker() as tracker:
    tracker.track_external(model)
    model(batch).sum().backward()
    said["given back"] = snapshot(tracker), snapshot(tracker, "peak"), given
for hook in hooks:
    hook.remove()

# On the program's own thread.
with torch.autograd.set_multithreading_enabled(False), memtrace.MemTracker() as tracker:
    tracker.track_external(model)
    for _ in range(2):  # the second adds up in place
        model(batch).sum().backward()
    said["one thread"] = snapshot(tracker), torch.cuda.memory_allocated()
    optimizer.step()
    optimizer.zero_grad()

# A second tracker, and inputs and optimizers that come late.
outer = memtrace.MemTracker()
outer.track_external(model)
with outer:
    model(batch).sum().backward()
    with memtrace.MemTracker() as inner:
        inner.track_external(model)
        late = torch.randn(64, 512, device="cuda")
        inner.track_external([late])
        model(late).sum().backward()
        said["inner"] = snapshot(inner)
    adam = torch.optim.Adam(model.parameters())
    adam.step()
    said["outer"] = snapshot(outer), torch.cuda.memory_allocated()

# Much more than a tracker keeps unread, most of which nobody reads.
import memtrace.mem_tracker as module  # noqa: E402

module._MOST_UNREAD = 20_000
with memtrace.MemTracker() as tracker:
    tracker.track_external(model)
    unread = []
    for _ in range(60):
        for _ in range(300):
            torch.empty(100, device="cuda")
        model(late)
        known = module.native()
        unread.append(known.changes_count(None) - tracker._ledger.next)
    said["unread"] = max(unread), sum(b < a for a, b in zip(unread, unread[1:]))
    said["after"] = snapshot(tracker), torch.cuda.memory_allocated()
print(json.dumps(said))
