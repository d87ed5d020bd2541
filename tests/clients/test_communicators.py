"""NCCL's memory by communicator, where its calls say it; a small NCCL is loaded
in front of the virtual one."""

import json

import support

KIB = 1 << 10

PROGRAM = """
import ctypes, sys
nccl = ctypes.CDLL({library})
class Id(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 128)]
def init(ranks, rank):
    comm = ctypes.c_void_p()
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    assert nccl.ncclCommInitRank(ctypes.byref(comm), ranks, Id(), rank) == 0
    return comm
def reduce(comm): assert nccl.ncclAllReduce(None, None, ctypes.c_size_t(1), 7, 0, comm, None) == 0
def split(comm):
    out = ctypes.c_void_p()
    assert nccl.ncclCommSplit(comm, 0, 0, ctypes.byref(out), None) == 0
    return out
"""


def communicators(programs, gpu, tmp_path, body, library="None"):
    """By communicator as `memtrace report` says it: of device 0, and of the host."""
    ours, rest = gpu["LD_PRELOAD"].split(":", 1)
    env = {**gpu, "LD_PRELOAD": f"{ours}:{programs / 'libnccl_small.so'}:{rest}", "MEMTRACE_OUT": str(tmp_path)}
    program = PROGRAM.format(library=library) + body
    support.must(support.execute([support.PYTHON, "-c", program], env=env))
    path = support.only_file(tmp_path)
    support.must(support.memtrace("check", path))
    report = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    [device] = report["devices"]
    assert sum(c["bytes"] for c in device["communicators"]) == device["owners"][0]["bytes"] == device["held"]
    assert device["owners"][0]["owner"] == "NCCL"
    text = support.must(support.memtrace("report", path)).stdout
    assert all(c["owner"] in text for c in device["communicators"])
    named = lambda all: {c["owner"].removeprefix("NCCL, communicator "): c["bytes"] // KIB for c in all}  # noqa: E731
    return named(device["communicators"]), named(report["host_communicators"])


def test_each_communicator_has_its_own_sum(programs, gpu, tmp_path):
    """T19: process groups of two, three and four ranks."""
    device, host = communicators(programs, gpu, tmp_path, "a, b, c = init(2, 1), init(3, 0), init(4, 3)")
    assert device == {"1: rank 1 of 2": 128, "2: rank 0 of 3": 192, "3: rank 3 of 4": 256}
    assert set(host.values()) == {4} and len(host) == 3


def test_the_first_collective_is_its_communicators(programs, gpu, tmp_path):
    """T18: memory that comes with the first collective."""
    body = "a, b = init(2, 0), init(4, 0); reduce(b); reduce(b); nccl.ncclGroupStart(); reduce(a); nccl.ncclGroupEnd()"
    assert communicators(programs, gpu, tmp_path, body)[0] == {"1: rank 0 of 2": 384, "2: rank 0 of 4": 512}


def test_a_split_is_one_of_its_own_and_outlives_its_end(programs, gpu, tmp_path):
    body = "a = init(4, 2); b = split(a); reduce(b); nccl.ncclCommFinalize(b); nccl.ncclCommDestroy(b)"
    assert communicators(programs, gpu, tmp_path, body)[0] == {"1: rank 2 of 4": 256, "2": 384 + 32 + 16}


def test_a_handle_that_is_used_again_is_another_communicator(programs, gpu, tmp_path):
    body = "a = init(2, 1); nccl.ncclCommDestroy(a); b = init(4, 3); assert a.value == b.value; reduce(b)"
    assert communicators(programs, gpu, tmp_path, body)[0] == {"1: rank 1 of 2": 128 + 16, "2: rank 3 of 4": 512}


def test_what_a_group_makes_is_made_at_its_end(programs, gpu, tmp_path):
    """Also in a group within a group, whose end does nothing."""
    start, end = "nccl.ncclGroupStart()", "nccl.ncclGroupEnd()"
    body = f"{start}; a = init(2, 1); {end}; {start}; {start}; reduce(a); {end}; {end}"
    assert communicators(programs, gpu, tmp_path, body)[0] == {"1: rank 1 of 2": 128 + 256}


def test_of_several_made_at_once_none_is_charged_and_each_is_known(programs, gpu, tmp_path):
    body = "all = (ctypes.c_void_p * 2)(); assert nccl.ncclCommInitAll(all, 2, None) == 0; [reduce(ctypes.c_void_p(one)) for one in all]"
    assert communicators(programs, gpu, tmp_path, body)[0] == {"unknown": 256, "1: rank 0 of 2": 256, "2: rank 1 of 2": 256}


def test_a_child_works_for_nobody_that_its_parent_works_for(programs, gpu, tmp_path):
    """Forked by one thread while another makes a communicator."""
    body = """
import os, threading
begun, forked = threading.Event(), threading.Event()
@ctypes.CFUNCTYPE(None)
def config(): begun.set(); forked.wait()
comm = ctypes.c_void_p()
nccl.ncclCommInitRankConfig.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int, ctypes.c_void_p]
arguments = (ctypes.byref(comm), 2, Id(), 0, ctypes.cast(config, ctypes.c_void_p))
thread = threading.Thread(target=nccl.ncclCommInitRankConfig, args=arguments)
thread.start(); begun.wait()
child = os.fork()
if child:
    os._exit(os.waitpid(child, 0)[1])
assert nccl.ncclMemAlloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 20)) == 0
"""
    assert communicators(programs, gpu, tmp_path, body)[0] == {"unknown": 1024}


def test_what_is_not_known_is_said_to_be_unknown(programs, gpu, tmp_path):
    """One group for two communicators, and memory for none."""
    group = "nccl.ncclGroupStart(); reduce(a); reduce(b); nccl.ncclGroupEnd()"
    alone = "nccl.ncclMemAlloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1 << 20))"
    body = f"a, b = init(2, 0), init(2, 0); {group}; {alone}"
    expected = {"unknown": 512 + 1024, "1: rank 0 of 2": 128, "2: rank 0 of 2": 128}
    assert communicators(programs, gpu, tmp_path, body)[0] == expected


def test_nccl_by_name(programs, gpu, tmp_path):
    """T32: opened by its file name through ctypes, as serving engines do."""
    library = repr(str(programs / "libnccl_small.so"))
    assert communicators(programs, gpu, tmp_path, "a = init(2, 1)", library)[0] == {"1: rank 1 of 2": 128}
