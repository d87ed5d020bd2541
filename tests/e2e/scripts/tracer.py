"""Trains a few steps under memtrace.Tracer; prints what it reports and what PyTorch's own statistics say, as JSON."""

import contextlib
import json
import sys
from collections import Counter, defaultdict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trackers_model import Net

import memtrace
from memtrace import memory_tracker
from memtrace.tracer import Plugin

how = sys.argv[1]
torch.manual_seed(0)
# A thread of autograd's may give its last blocks back after backward() has returned.
torch.autograd.set_multithreading_enabled(how == "threads")
model = Net(512, layers=3, checkpointed=how.endswith("checkpoint")).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(256, 512, device="cuda", requires_grad=True)
said = {"phases": defaultdict(list), "saved": []}


def statistics():
    stats = torch.cuda.memory_stats()
    return {"current": stats["allocated_bytes.all.current"], "max": stats["allocated_bytes.all.peak"],
            "allocated": stats["allocated_bytes.all.allocated"], "blocks": stats["allocation.all.allocated"]}  # fmt: skip


class Phase:
    """The tracer's phase, if one is given, and PyTorch's numbers of the same stretch."""

    def __init__(self, tracer, name):
        self.inner, self.name = tracer.track_phase(name) if tracer else contextlib.nullcontext(), name

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats()
        self.before = statistics()
        self.inner.__enter__()

    def __exit__(self, *error):
        self.inner.__exit__(*error)
        after = statistics()
        taken = {what: after[what] - self.before[what] for what in ("allocated", "blocks")}
        said["phases"][self.name].append(
            {"start": self.before["current"], "end": after["current"], "max": after["max"], **taken}
        )


def saved_by(node, found, seen):
    """The storages that the graph keeps, by PyTorch's own attributes."""
    if node is None or node in seen:
        return
    seen.add(node)
    for name in dir(node):
        if name.startswith("_saved_"):
            values = getattr(node, name)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    found.add(value.untyped_storage().data_ptr())
    for around, _ in node.next_functions:
        saved_by(around, found, seen)


def train(tracer, saved):
    for _ in range(2):
        with Phase(tracer, "forward"):
            loss = model(batch).square().mean()
        if saved:
            found = set()
            saved_by(loss.grad_fn, found, set())
            said["saved"].append(sorted(found))
        with Phase(tracer, "backward"):
            loss.backward()
        del loss
        batch.grad = None
        with Phase(tracer, "update"):
            optimizer.step()
            optimizer.zero_grad()


class Taken(TorchDispatchMode):
    """What each operator takes."""

    def __init__(self):
        super().__init__()
        self.by_operator = Counter()
        self.calls = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        before = statistics()["allocated"]
        result = operator(*args, **(kwargs or {}))
        name = operator.name() if operator._overloadname != "default" else f"{operator.name()}.default"
        self.by_operator[name] += statistics()["allocated"] - before
        self.calls[name] += 1
        return result


class Calls(Plugin):
    """How often each operator was called, as plugins learn it."""

    name = "calls"

    def report(self, operators):
        return dict(operators)


def modules():
    """What each module takes, by hooks around it."""
    taken, before, handles = Counter(), {}, []
    for name, module in model.named_modules():
        if type(module).forward is torch.nn.Module.forward:
            continue
        handles.append(module.register_forward_pre_hook(lambda m, a, n=name: before.__setitem__(n, statistics()["allocated"])))
        handles.append(
            module.register_forward_hook(lambda m, a, o, n=name: taken.update({n: statistics()["allocated"] - before[n]}))
        )
    return taken, handles


if how in ("plain", "unhooked", "checkpoint", "threads"):
    with memtrace.Tracer(model, optimizer, batch, device="virtual:h100", saved_tensors=how == "plain") as tracer:
        # The hook of saved tensors must see them before the graph is asked for them, and keep nothing alive.
        train(tracer, saved=how == "plain")
        alive = {b["address"]: b["size"] for s in torch.cuda.memory_snapshot() for b in s["blocks"]
                 if b["state"] == "active_allocated"}  # fmt: skip
        said.update(alive=alive, now=statistics()["current"])
        halfway = tracer.report()
        said["until now"] = halfway.devices["cuda:0"].current
elif how == "unnamed":
    with memtrace.Tracer(model, optimizer, batch) as tracer:
        train(None, saved=False)
elif how == "operators":
    # Without autograd, so that a dispatch mode sees what is called, and with what was never taken before.
    with memtrace.Tracer(device="cuda:0", plugins=["auto", Calls()]) as tracer, torch.no_grad():
        tracer.track(model)
        taken, handles = modules()
        mode = Taken()
        for _ in range(2):
            with mode, torch.autocast("cuda", dtype=torch.bfloat16, enabled=False):
                model(batch)
            torch.stack([batch, batch]).sum(0)  # outside any module, and unseen by the mode
        for handle in handles:
            handle.remove()
    said.update(operators=mode.by_operator, calls=mode.calls, modules=taken)
elif how.startswith("ways"):
    # Operators that leave records as they end, around which PyTorch calls back, and operators that are seen as they begin.
    begin, ways = memory_tracker._begin, []
    with memtrace.Tracer(model) as tracer:
        train(tracer, saved=False)  # what is taken once in a process
    for quickly in (False, True):
        memory_tracker._begin = lambda known, device, _, quickly=quickly: begin(known, device, quickly)
        with memtrace.Tracer(model, optimizer, batch) as tracer:
            train(tracer, saved=False)
            with torch.inference_mode():
                model(torch.ones_like(batch))
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
                model(torch.zeros(8, 512, device="cuda") + torch.tensor(1.0, device="cuda")).sort().values.tolist()
        blocks = tracer.report().lifetimes
        ways.append([[b.operator, b.bytes, b.module, b.in_backward] for b in blocks if b.created >= 0])
    said["ways"] = ways
report = tracer.report()
report.print(file=sys.stderr)
json.dump({"report": report.to_dict(), "said": said}, sys.stdout)
