"""Programs that users of PyTorch asked about, in small: what memtrace must answer."""

import json
from importlib.metadata import version

import pytest
import support

MIB = 1 << 20


def run(tmp_path, program, code=0, **options):
    """Runs a program; returns it, its last snapshot, and what `memtrace report` says of that."""
    done = support.must(support.record([support.PYTHON, "-c", program], tmp_path, **options), code)
    path = support.files(tmp_path)[-1]
    report = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    return done, support.load(path), report


def test_a_failure_is_the_programs_own(tmp_path):
    """T08: out of memory leaves a snapshot, and the error and the exit code as they are."""
    program = 'import torch\nkept = torch.empty(60 << 30, dtype=torch.uint8, device="cuda")\ntorch.empty(30 << 30, dtype=torch.uint8, device="cuda")'
    command = [support.PYTHON, "-c", program]
    without = support.must(support.record(command, tmp_path, run=("--record", "off")), code=1)
    done, _, _ = run(tmp_path, program, code=1)
    own = [line for line in done.stderr.splitlines() if not line.startswith("memtrace: ")]
    assert "torch.OutOfMemoryError" in own[-1], done.stderr
    assert own == [line for line in without.stderr.splitlines() if not line.startswith("memtrace: ")]
    assert "oom" in {support.load(path)["memtrace"]["reason"] for path in support.files(tmp_path)}


def test_history_is_there_though_nobody_asked_for_it(tmp_path):
    """T09: a snapshot in the middle of a program that never switched PyTorch's recording on."""
    path = tmp_path / "asked.pickle"
    program = f"""
import ctypes, torch
def work(): return [torch.empty(n << 20, device="cuda") for n in range(1, 20)]
kept = work()
assert not torch.cuda.memory._snapshot()["device_traces"][0], "PyTorch records by itself"
assert ctypes.CDLL(None).memtrace_dump({str(path)!r}.encode()) == 0
"""
    run(tmp_path, program)
    entries = support.history(support.load(path))
    allocs = [e for e in entries if e["action"] == "alloc"]
    assert len(allocs) == 19 and all("work" in [f["name"] for f in e["frames"]] for e in allocs)


def test_a_workspace_for_each_stream_that_a_graph_was_captured_on(tmp_path):
    """T43: memory that rises with each capture is BLAS's to work in, stream by stream."""
    program = """
import torch
x = torch.randn(512, 512, device="cuda")
kept = []
for _ in range(3):
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream): y = x @ x
    kept.append((stream, graph))
"""
    _, _, report = run(tmp_path, program, stacks="all")
    spaces = report["devices"][0]["workspaces"]
    assert {w["library"] for w in spaces} == {"cuBLAS workspace"}
    assert len({w["stream"] for w in spaces}) == 3 and {w["peak"] for w in spaces} == {spaces[0]["peak"]}
    assert spaces[0]["peak"] > MIB


def test_what_a_linear_layer_leaves_is_a_workspace_and_no_leak(tmp_path):
    """T44: all that is left of a layer, if anything, is reported as its library's."""
    path = tmp_path / "after.pickle"
    program = f"""
import ctypes, torch
torch.zeros(1, device="cuda")
x, layer = torch.randn(1, 1, device="cuda"), torch.nn.Linear(1, 1).cuda()
y = layer(x)
del x, y, layer
print(torch.cuda.memory_allocated())
assert ctypes.CDLL(None).memtrace_dump({str(path)!r}.encode()) == 0
"""
    done, _, _ = run(tmp_path, program, stacks="all")
    [device] = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)["devices"]
    assert device["workspaces"] and device["workspaces"][0]["peak"] >= MIB
    assert sum(w["bytes"] for w in device["workspaces"]) == int(done.stdout)


def test_the_blocks_that_pin_a_segment_are_named(tmp_path):
    """T45: half the card is idle, and small live blocks are in it."""
    program = """
import torch
big = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
del big
kept = []
def pin(size): kept.append(torch.empty(size << 20, dtype=torch.uint8, device="cuda"))
pin(1024), pin(64), pin(1024)
del kept[0], kept[1]
torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
"""
    run(tmp_path, program, code=1, spec="sm_80,6GiB,40SM")
    [path] = tmp_path.glob("memtrace-*-oom.txt")
    text = path.read_text()
    assert "64.0 MiB in 1 blocks that pin a run of 3.00 GiB: <string>:6 pin" in text, text


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("collect", [True, False])
def test_expandable_segments_are_seen_and_balanced(collect, tmp_path):
    """T58: what is mapped less what is unmapped is what is reserved, and the device agrees."""
    program = f"""
import torch
kept = [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in range(1, 40)]
del kept[::2]
if {collect}: torch.cuda.empty_cache()
print(torch.cuda.memory_reserved())
"""
    done, snapshot, report = run(tmp_path, program, env=EXPANDABLE)
    sizes = {"segment_map": 0, "segment_unmap": 0}
    for entry in support.history(snapshot):
        if entry["action"] in sizes:
            sizes[entry["action"]] += entry["size"]
    reserved = int(done.stdout)
    assert sizes["segment_map"] - sizes["segment_unmap"] == reserved > 0 and (sizes["segment_unmap"] > 0) == collect
    [device] = report["devices"]
    assert (device["held"], device["reconcile"]["unexplained"]) == (reserved, 0)
    assert snapshot["memtrace"]["ledger"]["devices"][0]["framework"] == reserved


def test_a_free_that_waits_says_how_long_and_for_which_stream(tmp_path):
    """T49: used on another stream that is busy; PyTorch's snapshot shows the
    block, and not for whom it waits."""
    program = """
import torch
side = torch.cuda.Stream()
x = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
with torch.cuda.stream(side): y = x + 1
x.record_stream(side)
del x
torch.cuda.synchronize()
z = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
print(side.cuda_stream)
"""
    done, snapshot, report = run(tmp_path, program, spec="h100,lazy")
    waits = report["deferred_frees"]
    [wait] = waits["longest"]
    assert (waits["count"], waits["most_bytes"], wait["bytes"]) == (1, 64 * MIB, 64 * MIB)
    assert wait["streams"] == [int(done.stdout)] and wait["requested_us"] <= wait["completed_us"]
    times = {e["action"]: e["time_us"] for e in reversed(support.history(snapshot)) if e["size"] == 64 * MIB and "free" in e["action"]}
    assert times == {"free_requested": wait["requested_us"], "free_completed": wait["completed_us"]}
    text = support.must(support.memtrace("report", support.files(tmp_path)[-1])).stdout
    assert f"64.0 MiB waited for stream {int(done.stdout):#x}" in text


PINNED = {
    "rounded": "",
    "registered": "pinned_use_cuda_host_register:True",
    "not rounded above 8 MiB": "pinned_max_round_threshold_mb:8",
}


@pytest.mark.parametrize("conf", PINNED.values(), ids=PINNED)
def test_pinned_memory_is_reported_beside_what_was_asked_for(conf, tmp_path):
    """T53: PyTorch rounds requests for page-locked memory up, and uses
    again what it was given back."""
    path, released = tmp_path / "held.pickle", tmp_path / "released.pickle"
    program = f"""
import ctypes, json, torch
MIB, memtrace = 1 << 20, ctypes.CDLL(None)
def pin(n): return torch.empty(n * MIB, dtype=torch.uint8, pin_memory=True)
def copied(n): return torch.zeros(n * MIB, dtype=torch.uint8).pin_memory()
kept = [pin(n) for n in (5, 9, 33)] + [copied(3)]
used_once = pin(17)
del used_once
kept += [pin(20), pin(6)]
del kept[-1]
torch.cuda.init()
assert memtrace.memtrace_dump({str(path)!r}.encode()) == 0
stats = getattr(torch.cuda, "host_memory_stats", dict)()
print(json.dumps([stats.get(f"{{key}}_bytes.current") for key in ("allocated", "active")]))
del kept
torch._C._host_emptyCache()
assert memtrace.memtrace_dump({str(released)!r}.encode()) == 0
"""
    torch = tuple(map(int, version("torch").split(".")[:2]))
    if "threshold" in conf and torch < (2, 13):
        pytest.skip("a setting of PyTorch 2.13's")
    done, last, _ = run(tmp_path, program, env={"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {})
    rounded = "threshold" not in conf
    blocks = {5: 8, 9: 16 if rounded else 9, 33: 64 if rounded else 33, 3: 4, 20: 32 if rounded else 20}
    idle = 8 if rounded else 8 + 17
    report = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    assert support.must(support.memtrace("check", path)).stdout.count("ok") == 1
    end = report["pinned"]["end"]
    asked, used = sum(blocks) * MIB, sum(blocks.values()) * MIB
    assert (end["requested"], end["rounding"], end["idle"]) == (asked, used - asked, idle * MIB), end
    assert end["held"] == used + idle * MIB
    sites = {s["site"].split()[-1]: (s["bytes"], s["count"]) for s in end["sites"]}
    assert sites["copied"] == (1 * MIB, 1) and sites["pin"] == (used - asked - MIB, 4 if rounded else 1)
    allocated, active = json.loads(done.stdout)
    assert allocated in (None, end["held"]), "PyTorch's own sums"
    if torch >= (2, 15):  # 2.11 counts more in use than it holds
        assert active == used, "PyTorch's own sums"
    ledger = support.load(released)["memtrace"]["ledger"]["host"]
    assert (ledger["pinned"], ledger["registered"], ledger["framework"], ledger["requested"]) == (0, 0, 0, 0), ledger
    ledger = support.load(path)["memtrace"]["ledger"]["host"]
    assert (ledger["framework"], ledger["requested"]) == (end["held"], asked)
    peak = support.must(support.memtrace("report", support.files(tmp_path)[-1])).stdout
    if rounded:
        assert "PyTorch held 138412032 bytes for 79691776 that were asked for" in peak, peak
    assert last["memtrace"]["counters"]["anomalies"] == 0
