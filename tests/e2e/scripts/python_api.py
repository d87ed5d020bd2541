"""Uses the Python package as the argument says; asserts are the test. Prints what the test reads."""

import json
import os
import pathlib
import sys

import memtrace

MIB = 1 << 20


def tensor(mib):
    import torch

    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def peaks():
    import torch

    first = tensor(64)
    torch.cuda.reset_peak_memory_stats()
    with memtrace.peak() as outer:
        assert outer.peak == 64 * MIB
        tensor(100)
        with memtrace.peak() as inner:
            kept = tensor(10)
            tensor(20)
        assert (inner.peak, inner.increase, inner.kept) == (94 * MIB, 30 * MIB, 10 * MIB), str(inner)
        del kept
    assert (outer.peak, outer.increase, outer.kept) == (164 * MIB, 100 * MIB, 0), str(outer)
    # PyTorch's own peak has not been touched, and is the same.
    assert torch.cuda.max_memory_allocated() == 164 * MIB
    with memtrace.peak() as later:
        pass
    assert later.peak == 64 * MIB and later.usage.peak == 64 * MIB
    assert memtrace.stats()["devices"][0]["peak_allocated"] == 164 * MIB
    try:
        with memtrace.peak() as failed:
            tensor(50)
            raise KeyError
    except KeyError:
        assert failed.increase == 50 * MIB
    assert memtrace.stats()["devices"][0]["allocated"] == torch.cuda.memory_allocated() == 64 * MIB
    assert memtrace.stats()["devices"][0]["reserved"] == torch.cuda.memory_reserved()
    del first


def profile():
    lines = []

    @memtrace.profile
    def plain(mib):
        return tensor(mib)

    @memtrace.profile(name="named", to=lines.append)
    def named(depth):
        return [tensor(2), named(depth - 1)] if depth else None

    tensor(1)
    plain(3)
    assert plain.usage.kept in (0, 3 * MIB) and plain.usage.increase == 3 * MIB and plain.__name__ == "plain"
    named(2)
    assert named.usage.increase == 4 * MIB and len(lines) == 3 and "named: peak" in lines[0], lines
    sizes = {e["size"]: e["user_metadata"] for e in memtrace.snapshot()["device_traces"][0] if e["action"] == "alloc"}
    assert sizes[3 * MIB] == "profile.<locals>.plain" and sizes[2 * MIB] == "named/named", sizes


def files():
    try:
        memtrace.dump()
    except memtrace.MemtraceError as error:
        assert "memtrace run" in str(error), error
    else:
        raise AssertionError("a snapshot of nothing")
    assert not memtrace.is_recording() and memtrace.stats() == {"recording": False, "devices": []}
    assert memtrace.start() == os.environ["EXPECT"]
    tensor(5)
    assert memtrace.is_recording() and memtrace.stats()["recording"]
    path = memtrace.dump()
    assert path.parent == pathlib.Path(os.environ["MEMTRACE_OUT"]) and path.stat().st_size > 1000
    assert memtrace.dump() != path
    assert json.loads(memtrace.dump("here.json").read_text())["memtrace"]["reason"] == "request"
    try:
        memtrace.dump("no/such/folder/x.pickle")
    except memtrace.MemtraceError as error:
        assert "no/such/folder" in str(error)
    else:
        raise AssertionError("written where there is no folder")
    end = memtrace.stop()
    names = [m["name"] for m in memtrace.snapshot()["memtrace"]["marks"]]
    assert end.exists() and names[-1] == "stop", names


def too_late():
    tensor(1)
    try:
        memtrace.start()
    except memtrace.MemtraceError as error:
        assert "memtrace run" in str(error), error
    else:
        raise AssertionError("it can't know what was allocated before")
    # Everything else does nothing, quietly.
    with memtrace.annotate("x"):
        memtrace.mark("y")
        memtrace.step()
        assert memtrace.current_label() == ""
    assert memtrace.stats() == {"recording": False, "devices": []}
    try:
        with memtrace.peak():
            pass
    except memtrace.MemtraceError as error:
        assert "memtrace run" in str(error)
    else:
        raise AssertionError("a peak that nobody measured")

    @memtrace.profile
    def answer():
        return 42

    assert answer() == 42


def without_cuda():
    import torch

    model = torch.nn.Linear(4, 4)
    assert not torch.cuda.is_available() and memtrace.start() == "none"
    with memtrace.watch(model, torch.optim.SGD(model.parameters())), memtrace.annotate("x"), memtrace.peak() as p:
        model(torch.ones(2, 4)).sum().backward()
        memtrace.step()
    assert p.peak == 0 and memtrace.stop() is None
    assert list(memtrace.steps("ab", model)) == ["a", "b"]


def loop():
    import torch

    model = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for batch in memtrace.steps([torch.ones(8, 256)] * 2, model, optimizer, first=10):
        model(batch.cuda()).sum().backward()
        optimizer.step()
    snapshot = memtrace.snapshot()
    assert [m["number"] for m in snapshot["memtrace"]["marks"] if m["sort"] == "step"] == [10, 11]
    assert "forward" in {e["user_metadata"] for e in snapshot["device_traces"][0]}
    assert not model._forward_hooks


def facts():
    tensor(1)
    with memtrace.annotate("batch", n=3, kind="text"):
        assert memtrace.current_label() == 'batch {"n":3,"kind":"text"}'
    try:
        memtrace.watch(None, optimizer=object())
    except TypeError as error:
        assert "has no step()" in str(error)


globals()[sys.argv[1]]()
print("done")
