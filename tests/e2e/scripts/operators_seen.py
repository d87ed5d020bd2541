"""The same steps under our MemoryTracker, which sees operators in three ways: as they begin; the same without knowing anything of
them; and by callbacks, as where nobody comes by. Prints how many operators there were."""

import sys

import torch
from trackers_model import Net

import memtrace
import memtrace.memory_tracker as module

how = sys.argv[1]
# Frees of one thread can't overtake those of another.
torch.autograd.set_multithreading_enabled(False)
torch.manual_seed(0)
model = Net(256, checkpointed=how == "checkpoint").cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(64, 256, device="cuda", requires_grad=True)
empty, begin, knowledge = torch.empty, module._begin, module._what_operators_are


def train():
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=how == "autocast"):
        loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def other():
    """What makes tensors, what is made of others, what fails, and unusual states of a thread."""
    with torch.inference_mode():
        model(torch.ones_like(batch))
    with torch.no_grad():
        model(torch.zeros(8, 256, device="cuda") + torch.tensor(1.0, device="cuda")).sort().values.tolist()
    try:
        torch.empty(1 << 40, device="cuda")
    except torch.OutOfMemoryError:
        pass
    torch.linalg.norm(batch.detach().reshape(-1), ord=2)
    torch.ops.aten.add(batch.detach(), 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch)
    seen.append(sum(event.count for event in profile.key_averages() if event.key == "aten::addmm"))


def track(way):
    def noted(known, device, quickly):
        module._what_operators_are = knowledge if way == "quick" else lambda: ""
        module._learned = False
        if way == "callbacks":
            torch.empty = lambda size: None
        how_seen = begin(known, device, quickly)
        torch.empty = empty
        assert how_seen == (module._BY_CALLBACKS if way == "callbacks" else module._QUICKLY), how_seen
        return how_seen

    module._begin = noted
    tracker = memtrace.MemoryTracker()
    tracker.start_monitor(model)
    step()
    step()
    tracker.stop()
    return [call[:2] + call[3:] for call in tracker.calls], tracker.markers


seen = []
step = other if how == "other" else train
step()
by_callbacks = track("callbacks")
exact = track("exact")
quick = track("quick")
assert exact == by_callbacks, [(a, b) for a, b in zip(exact[0], by_callbacks[0]) if a != b][:3]
assert quick == exact, [(a, b) for a, b in zip(quick[0], exact[0]) if a != b][:3]
assert len(set(seen)) <= 1, seen  # PyTorch's own profiler misses nothing
print(len(quick[0]))
