"""Looking functions up where it is easy to get wrong: other interposers, RTLD_NEXT,
dlerror, a runtime of one's own."""

import client
import pytest
import support


def look(what, programs, gpu, out, before=(), after=(), last=()):
    """Runs `lookups` with other libraries preloaded before and after
    memtrace, and behind the driver."""
    first, *rest = gpu["LD_PRELOAD"].split(":")
    before, after, last = ([str(programs / p) for p in list] for list in (before, after, last))
    preload = [*before, first, *after, *rest, *last]
    env = {**gpu, "LD_PRELOAD": ":".join(preload), "LD_LIBRARY_PATH": f"{programs}:{gpu.get('LD_LIBRARY_PATH', '')}"}
    return client.run([programs / "lookups", what], env, out)


def test_the_next_one_is_the_next_one(programs, gpu, tmp_path):
    done, _ = look("next", programs, gpu, tmp_path, ["libnext.so"], ["libsecond.so"])
    assert done.stdout == "the next one's, the next one's\n"


def test_errors_are_the_loaders_own(programs, gpu, tmp_path):
    done, _ = look("errors", programs, gpu, tmp_path)
    assert done.stdout == "as it should be\n"


def test_a_runtime_that_was_brought_along_is_kept_and_seen_at_the_driver(programs, gpu, tmp_path):
    _, said = look("bundled", programs, gpu, tmp_path)
    assert client.check_steps(said) == ["bundled"]
    _, snapshot = client.ledger(said[0]["path"])
    # Two of one that worked, and one that the driver refused: the runtime's
    # own error, seen at the driver's entry point.
    assert [(e["action"], e["user_metadata"]) for e in snapshot["device_traces"][0]] == [
        (action, "driver: cuMemAlloc_v2 by libbundled.so") for action in ("segment_alloc", "alloc", "oom")
    ]


def test_a_runtime_call_that_calls_the_driver_is_one_event(programs, gpu, tmp_path):
    _, said = look("nested", programs, gpu, tmp_path, after=["libruntime.so"])
    assert client.check_steps(said) == ["nested"]
    _, snapshot = client.ledger(said[0]["path"])
    names = [e["user_metadata"] for e in snapshot["device_traces"][0]]
    assert names == ["driver: cudaMalloc by lookups"] * 4 + ["driver: cudaFree by lookups"] * 3
    assert client.events(snapshot) == 4  # the context made inside, two allocations, a free


@pytest.mark.parametrize("when", ["deep-now", "deep-lazy"])
def test_a_library_whose_own_dependencies_come_first(when, programs, gpu, tmp_path):
    _, said = look(when, programs, gpu, tmp_path)
    assert client.check_steps(said) == ["deep"]
    _, snapshot = client.ledger(said[0]["path"])
    allocations = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert [(e["size"], e["user_metadata"]) for e in allocations] == [(n, "driver: cuMemAlloc_v2 by libdeep.so") for n in (1000, 2000)]


BEFORE, AFTER, HOOKING = ["libbefore.so"], ["libafter.so"], ["libhooking.so"]


@pytest.mark.parametrize(
    "before, after, last", [([], [], []), (BEFORE, [], []), ([], AFTER, []), (BEFORE, AFTER, []), ([], [], HOOKING)]
)
def test_other_interposers_see_each_call_once(before, after, last, programs, gpu, tmp_path):
    done, said = look("calls", programs, gpu, tmp_path, before, after, last)
    assert client.check_steps(said) == ["calls"]
    _, snapshot = client.ledger(said[0]["path"])
    assert client.events(snapshot) == 4  # a context and three allocations
    # What is in front or behind sees the calls by symbol, as without memtrace;
    # what is behind the driver sees nothing.
    for library, seen in (("libbefore.so", 2), ("libafter.so", 2), ("libhooking.so", 0)):
        if library in (*before, *after, *last):
            assert f"{library[3:-3]} saw {seen}" in done.stderr


def test_interfaces_of_32_bit_days_are_passed_on_and_said_once(programs, gpu, tmp_path):
    done, _ = look("old", programs, gpu, tmp_path)
    first, second = done.stdout.split()
    assert first == second
    assert done.stderr.count("cuMemAlloc has addresses of 32 bits and is not recorded; cuMemAlloc_v2 is") == 1


CTYPES = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)
context, at = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 1)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(123456))
ctypes.CDLL(None).memtrace_dump(b"{out}/step.json")
"""


def test_ctypes(gpu, tmp_path):
    code = CTYPES.replace("{out}", str(tmp_path))
    support.must(support.execute([support.PYTHON, "-c", code], env={**gpu, "MEMTRACE_OUT": str(tmp_path)}))
    found, snapshot = client.ledger(tmp_path / "step.json")
    assert dict(zip(client.COLUMNS, found["1"]))["device_bytes"] == 123456
    [entry] = [e for e in snapshot["device_traces"][1] if e["action"] == "alloc"]
    assert entry["user_metadata"] == "driver: cuMemAlloc_v2 by <string>" and entry["size"] == 123456
