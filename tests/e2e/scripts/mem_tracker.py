"""Trains a few steps under PyTorch's MemTracker and ours at once; prints what both say, and what is true, as JSON."""

import contextlib
import json
import os
import sys

if sys.argv[1] != "workspaces":
    # Those of cuBLAS come from the allocator, in no tensor that PyTorch's tracker could see.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":0:0", CUBLASLT_WORKSPACE_SIZE="0")
else:
    os.environ["TORCH_CUBLAS_WORKSPACE_CACHE"] = "1"  # what releases before 2.15 do in any case: one for each thread, for ever

import torch
from torch.distributed._tools.mem_tracker import MemTracker as Theirs
from trackers_model import Net

import memtrace

how = sys.argv[1]
torch.manual_seed(0)
device = torch.device("cuda", 0)
model = Net(512, layers=4, checkpointed=how == "checkpoint").cuda()
kind = {"single": {"foreach": False}, "fused": {"fused": True}}.get(how, {"foreach": True})
optimizer = torch.optim.AdamW(model.parameters(), **kind)
batch = torch.randn(256, 512, device="cuda", requires_grad=True)
ours = memtrace.MemTracker()
ours.track_external(model, optimizer, batch)
theirs = Theirs() if how != "alone" else None
if theirs:
    theirs.track_external(model, optimizer, batch)
said = []


def rounded(tensors):
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return sum(-(-n // 512) * 512 for n in storages.values())


def parts(snapshot):
    return {getattr(k, "value", k): n for k, n in snapshot[device].items()}


def look(when):
    stats = torch.cuda.memory_stats()
    said.append(
        {
            "when": when,
            "ours": parts(ours.get_tracker_snapshot()),
            "our peak": parts(ours.get_tracker_snapshot("peak")),
            "theirs": parts(theirs.get_tracker_snapshot()) if theirs else None,
            "their peak": parts(theirs.get_tracker_snapshot("peak")) if theirs else None,
            "allocated": stats["active_bytes.all.current"],
            "peak": stats["active_bytes.all.peak"],
            "Parameter": rounded(model.parameters()),
            "Buffer": rounded(model.buffers()),
            "Gradient": rounded(p.grad for p in model.parameters() if p.grad is not None),
            "Optstate": rounded(v for s in optimizer.state.values() for v in s.values()),
        }
    )


torch.cuda.reset_peak_memory_stats()
with ours, theirs or contextlib.nullcontext():
    look("begin")
    for step in range(2):
        for part in range(2 if how == "accumulate" else 1):
            loss = model(batch).square().mean()
            look(f"{step} forward {part}")
            loss.backward()
            del loss
            batch.grad = None
            look(f"{step} backward {part}")
            if theirs:
                theirs.reset_mod_stats()
        optimizer.step()
        look(f"{step} step")
        optimizer.zero_grad()
        look(f"{step} zero_grad")
modules = {name: {state: [parts(s) for s in calls] for state, calls in stats.snapshots.items()}
           for name, stats in ours.memory_tracking.items()}  # fmt: skip
ours.display_snapshot("peak", units="MiB", tabulate=True)
ours.display_modulewise_snapshots(depth=2, units="MiB")
print()
print(json.dumps({"said": said, "modules": modules}))
