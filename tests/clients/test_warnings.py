"""Warnings that only hooks of the driver can give: right where they belong,
and silence everywhere else."""

import json

import pytest
import support

PRELUDE = """
import ctypes
cuda = ctypes.CDLL(None)
at = ctypes.c_void_p()
def context(device): assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device) == 0
def choose(device): assert cuda.cudaSetDevice(device) == 0
def take(device, size=4096):
    choose(device)
    assert cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)) == 0
def give(): assert cuda.cudaFree(at) == 0
def use(device, size=4096): take(device, size); give()
def careless(): context(0)
def many():
    for _ in range(60_000): use(1)
"""


def run(tmp_path, body, env=(), **options):
    """What a program's warnings are: those on stderr, and those in its snapshot."""
    command = [support.PYTHON, "-c", PRELUDE + body]
    env = {"LOCAL_RANK": "1", "RANK": "1", **dict(env)}
    done = support.must(support.record(command, tmp_path, spec="h100*2", env=env, **options))
    said = [line for line in done.stderr.splitlines() if "warning" in line]
    path = support.files(tmp_path)[-1]  # out of memory leaves one, too
    warnings = support.load(path)["memtrace"]["warnings"]
    report = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    assert [w for w in report["warnings"] if "stray" in w] == [line.split(": ", 2)[2] for line in said if "stray" in line]
    return said, warnings


# The smallest ring keeps some 32,768 events.
SHORT = {"MEMTRACE_EVENTS": "16384"}


@pytest.mark.parametrize("body", ["careless(); take(1); take(1)", "careless(); use(1)", "careless(); take(1); many()"])
def test_a_context_on_a_device_that_is_not_used(body, tmp_path):
    """T16: every rank on GPU 0. Said once, with the line that did it, also
    when that is before the history."""
    said, (warning,) = run(tmp_path, body, SHORT)
    assert len(said) == 1 and "stray context on device 0" in said[0] and said[0].endswith("<string>:5 context"), said
    assert (warning["kind"], warning["device"]) == ("stray context", 0)
    assert "careless" in [f["name"] for f in warning["frames"]]


@pytest.mark.parametrize(
    "body",
    [
        "context(1); take(1)",
        "take(0); take(1)",
        "context(0); context(1)",
        "take(0)",
        "use(0); take(1)",  # used and given back
        "use(0); take(1); many()",  # used and given back, before the history
        "context(0); use(0, 40 << 20); take(1, 2 << 30)",  # little of it, yet not nothing
    ],
)
def test_a_device_that_was_ever_used_is_not_stray(body, tmp_path):
    assert run(tmp_path, body, SHORT) == ([], [])


def test_what_a_device_has_seen_outlives_the_history(tmp_path):
    """Its highest point and all that was ever taken; by whom is not made up."""
    run(tmp_path, "use(1, 1 << 30); many()", SHORT)
    path = support.only_file(tmp_path)
    about = support.load(path)["memtrace"]
    assert about["counters"]["events_retired"] > 100, "the beginning is in the history after all"
    [device] = about["owners"]["devices"]
    assert device["peak"] == {"held": 1 << 30, "time_us": None, "by": None}
    assert device["taken"] == {"bytes": (1 << 30) + 60_000 * 4096, "count": 60_001}
    text = support.must(support.memtrace("report", path)).stdout
    assert "by whom is not known" in text


def test_a_thread_that_pins_memory_makes_a_context(tmp_path):
    """T17: a loader's thread has chosen no device."""
    body = """
import threading
def pin():
    assert cuda.cudaHostAlloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 20), 0) == 0
take(1, 64 << 20)
thread = threading.Thread(target=pin)
thread.start()
thread.join()
"""
    said, (warning,) = run(tmp_path, body)
    assert len(said) == 1 and "stray context on device 0" in said[0] and "cudaHostAlloc" in said[0] and "pin" in said[0]
    assert "pin" in [f["name"] for f in warning["frames"]]


TORCH = """
import torch
torch.cuda.set_device(1)
kept = []
def step(leak):
    if leak == "beside": take(1, 1 << 20)
    elif leak == "both": take(1, 1 << 20); kept.append(torch.empty(1 << 21, dtype=torch.uint8, device="cuda"))
    elif leak == "back": use(1, 1 << 20)
    elif leak == "pool": kept.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    for _ in range(20): torch.empty(1 << 16, dtype=torch.uint8, device="cuda")
"""


def test_growth_with_each_step_beside_the_pool(tmp_path):
    said, warnings = run(tmp_path, TORCH + "for _ in range(60): step('beside')")
    [warning] = [w for w in warnings if w["kind"] == "growth outside PyTorch"]
    assert "by <string>" in warning["text"] and "step" in [f["name"] for f in warning["frames"]]
    assert len([line for line in said if "grows" in line]) == 1


@pytest.mark.parametrize("leak", ["back", "pool", "both", "none"])
def test_no_growth_beside_the_pool(leak, tmp_path):
    assert run(tmp_path, TORCH + f"for _ in range(60): step('{leak}')") == ([], [])


def test_what_starts_large_does_not_grow(tmp_path):
    assert run(tmp_path, TORCH + "[step('beside') for _ in range(20)]; [step('none') for _ in range(60)]") == ([], [])


FULL = """
kept.append(torch.empty(60 << 30, dtype=torch.uint8, device="cuda"))
def library(size): take(1, size)
def fails(size):
    try: torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError: return
    raise AssertionError("it fits")
"""


def test_memory_that_a_library_took_just_before_it_ran_out(tmp_path):
    said, (warning,) = run(tmp_path, TORCH + FULL + "library(10 << 30); fails(12 << 30)")
    assert warning["kind"] == "taken before out of memory" and f"{10 << 30} bytes of device 1" in warning["text"]
    assert "library" in [f["name"] for f in warning["frames"]] and len(said) == 1


@pytest.mark.parametrize(
    "body",
    [
        "library(1 << 30); fails(40 << 30)",  # would not have fitted anyway
        "library(10 << 30); give(); fails(40 << 30)",  # given back
    ],
)
def test_memory_that_is_not_to_blame(body, tmp_path):
    assert run(tmp_path, TORCH + FULL + body) == ([], [])
