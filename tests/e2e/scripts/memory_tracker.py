"""PyTorch's MemoryTracker and ours on the same run; prints both, as JSON."""

import json
import sys

import torch
from trackers_model import Net
from torch.distributed._tools.memory_tracker import MemoryTracker as Theirs

import memtrace

how, ours_path, theirs_path = sys.argv[1:]
torch.manual_seed(0)
model = Net(256, checkpointed=how == "checkpoint").cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=how != "single")
batch = torch.randn(64, 256, device="cuda", requires_grad=True)
other = torch.cuda.Stream()


def step():
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=how == "autocast"):
        loss = model(batch).float().square().mean()
    if how == "streams":
        # Given back while another stream may still use it: active, not allocated.
        kept = torch.empty(1_000_000, device="cuda")
        with torch.cuda.stream(other):
            kept.mul_(2)
        kept.record_stream(other)
        del kept
        batch.detach().mul_(1)  # takes no memory, so that the allocator does not look whether the other is done
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


step()
ours, theirs = memtrace.MemoryTracker(), Theirs()
ours.start_monitor(model)
if how != "alone":
    theirs.start_monitor(model)
for _ in range(2):
    step()
if how != "alone":
    theirs.stop()
ours.stop()
ours.save_stats(ours_path)
theirs.save_stats(theirs_path)
json.dump({"labels": [call.label for call in ours.calls], "backward": [call.in_backward for call in ours.calls]}, sys.stdout)
