"""Programs that users of plain CUDA asked about, in small: what memtrace must answer."""

import json

import pytest
import support

MIB = 1 << 20

PRELUDE = """
import ctypes
cuda = ctypes.CDLL(None)
size, ref, null = ctypes.c_size_t, ctypes.byref, None
def must(code): assert code == 0, code
must(cuda.cuInit(0))
"""


def run(tmp_path, body, *args, **options):
    """Runs a program; returns it, its snapshot, and what `memtrace report` says."""
    command = [support.PYTHON, "-c", PRELUDE + body, *map(str, args)]
    done = support.must(support.record(command, tmp_path, **options))
    path = support.only_file(tmp_path)
    support.must(support.memtrace("check", path))
    report = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    return done, support.load(path), report


def test_pinned_memory_of_a_library_with_its_own_runtime(programs, tmp_path):
    """T20: host memory that torch's statistics don't know has an owner."""
    body = """
import sys, torch
kept = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
torch.zeros(1, device="cuda")
must(ctypes.CDLL(sys.argv[1]).pin(5, size(3 << 20)))
"""
    _, snapshot, report = run(tmp_path, body, programs / "libproxy.so", stacks="all")
    owners = {o["owner"]: (o["bytes"], o["count"]) for o in report["host"]}
    assert owners["libproxy.so"] == (15 * MIB, 5)
    assert owners["PyTorch"][0] >= MIB
    assert snapshot["memtrace"]["ledger"]["host"]["pinned"] == sum(o["bytes"] for o in report["host"])


def test_who_calls_through_nvidias_python_bindings_owns_it(tmp_path):
    """As Numba does: not the bindings have the memory, but the code that calls them."""
    pytest.importorskip("cuda.bindings", reason="this PyTorch comes without cuda-bindings")
    script = tmp_path / "engine.py"
    script.write_text("""
from cuda.bindings import driver
def must(answer): assert answer[0] == 0, answer; return answer[-1]
must(driver.cuInit(0))
must(driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(must(driver.cuDeviceGet(0))))))
kept = must(driver.cuMemAlloc(6 << 20))
""")
    support.must(support.record([support.PYTHON, script], tmp_path / "out"))
    path = support.only_file(tmp_path / "out")
    [device] = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)["devices"]
    assert [(o["owner"], o["bytes"]) for o in device["owners"]] == [("engine.py", 6 * MIB)]
    # And the summary of a program without PyTorch is about what it has.
    summary = support.must(support.memtrace("summary", path)).stdout
    assert "peak allocated" not in summary and f"{script}:6 <module>" in summary


def test_a_named_pool_is_counted_and_an_unknown_free_is_passed_through(tmp_path):
    """T27: memory from an explicit pool; the driver's own answer to a
    pointer that nobody has seen."""
    body = """
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int), ("rest", ctypes.c_uint64 * 9)]
must(cuda.cudaSetDevice(0))
pool, at = ctypes.c_void_p(), ctypes.c_void_p()
must(cuda.cudaMemPoolCreate(ref(pool), ref(Properties(1, 0, 1, 0))))
for _ in range(3): must(cuda.cudaMallocFromPoolAsync(ref(at), size(5 << 20), pool, null))
must(cuda.cudaFreeAsync(at, null))
cuda.cudaFree.argtypes = [ctypes.c_void_p]
print(cuda.cudaFree(0x7f0000001000), cuda.cudaFree(at.value + 512))
"""
    command = [support.PYTHON, "-c", PRELUDE + body]
    without = support.must(support.record(command, tmp_path, run=("--record", "off")))
    done, snapshot, report = run(tmp_path, body)
    assert done.stdout == without.stdout and "0" not in done.stdout.split()
    [device] = snapshot["memtrace"]["ledger"]["devices"]
    assert (device["pool_used"], device["held"]) == (10 * MIB, 10 * MIB)
    assert snapshot["memtrace"]["counters"]["anomalies"] == 2  # the two frees of what nobody had
    assert report["devices"][0]["held"] == 10 * MIB


def test_two_handles_to_physical_memory_are_both_counted(tmp_path):
    """T29: two `cuMemCreate` in a row, never mapped."""
    body = """
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int), ("rest", ctypes.c_uint64 * 2)]
must(cuda.cudaSetDevice(0)); must(cuda.cudaFree(null))
handles = [ctypes.c_uint64() for _ in range(2)]
for handle, n in zip(handles, (2, 6)):
    must(cuda.cuMemCreate(ref(handle), size(n << 20), ref(Properties(1, 0, 1, 0)), ctypes.c_ulonglong(0)))
free, total = size(), size()
must(cuda.cuMemGetInfo_v2(ref(free), ref(total)))
"""
    _, snapshot, report = run(tmp_path, body)
    [device] = snapshot["memtrace"]["ledger"]["devices"]
    assert (device["physical"], device["mapped"], device["held"]) == (8 * MIB, 0, 8 * MIB)
    assert report["devices"][0]["reconcile"]["unexplained"] == 0


def test_physical_memory_that_is_refused_is_on_no_stream(tmp_path):
    """T29: a `cuMemCreate` for which the device has no room."""
    body = """
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int), ("rest", ctypes.c_uint64 * 2)]
must(cuda.cudaSetDevice(0)); must(cuda.cudaFree(null))
assert cuda.cuMemCreate(ref(ctypes.c_uint64()), size(1 << 40), ref(Properties(1, 0, 1, 0)), ctypes.c_ulonglong(0)) == 2
"""
    support.must(support.record([support.PYTHON, "-c", PRELUDE + body], tmp_path))
    [_at_oom, at_exit] = [support.load(path) for path in support.files(tmp_path)]
    refused = [e for e in at_exit["device_traces"][0] if e["action"] == "oom"]
    assert [(e["size"], e["stream"], e["user_metadata"].split(" by ")[0]) for e in refused] == [(1 << 40, 0, "driver: cuMemCreate")]


def test_what_the_driver_refuses_is_the_programs_own(tmp_path):
    """T24, T25: no place for an answer, memory that is to be on the host (`test_others.py`:
    where a driver has it), a thread without a context."""
    program = """
import ctypes, threading
cuda, ref, null = ctypes.CDLL(None), ctypes.byref, ctypes.c_void_p()
class Properties(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("where", ctypes.c_int), ("id", ctypes.c_int), ("rest", ctypes.c_uint64 * 2)]
total, handle, at = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
print(cuda.cuInit(0), cuda.cuMemGetInfo_v2(null, ref(total)), cuda.cudaFree(null))
print(cuda.cuMemGetInfo_v2(null, ref(total)), cuda.cuMemGetInfo_v2(null, null))
print([cuda.cuMemCreate(ref(handle), ctypes.c_size_t(2 << 20), ref(Properties(1, 0, where, 77)), ctypes.c_uint64(0)) for where in (2, 3, 4)])
thread = threading.Thread(target=lambda: print(cuda.cuMemAlloc_v2(ref(at), ctypes.c_size_t(4096))))
thread.start(); thread.join()
"""
    said = [
        support.must(support.record([support.PYTHON, "-c", program], tmp_path, run=run)).stdout
        for run in ((), ("--record", "off"))
    ]
    assert said[0] == said[1] and said[0].splitlines()[-1] == "201"
    about = support.load(support.only_file(tmp_path))["memtrace"]
    assert about["counters"]["anomalies"] == 0 and set(about["ledger"]["host"].values()) == {0}
    assert all(device["held"] == 0 for device in about["ledger"]["devices"])
