"""Warnings that only the driver's doors can give: right where they belong, and silence everywhere else."""

import pytest
import support

PRELUDE = """
import ctypes
cuda = ctypes.CDLL(None)
def context(device): assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device) == 0
def take(device): assert cuda.cudaSetDevice(device) == 0 and cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096)) == 0
def careless(): context(0)
"""


def run(tmp_path, body):
    command = [support.PYTHON, "-c", PRELUDE + body]
    done = support.must(support.record(command, tmp_path, spec="h100*2", env={"LOCAL_RANK": "1", "RANK": "1"}))
    said = [line for line in done.stderr.splitlines() if "warning:" in line]
    return said, support.load(support.only_file(tmp_path))["memtrace"]["warnings"]


def test_a_context_on_a_device_that_is_not_used(tmp_path):
    """Every rank on GPU 0: said once, with the line that did it."""
    said, (warning,) = run(tmp_path, "careless(); take(1); take(1)")
    assert len(said) == 1 and "a context was made on GPU 0" in said[0] and "on GPU 1" in said[0]
    assert (warning["kind"], warning["device"]) == ("stray context", 0)
    assert "careless" in [f["name"] for f in warning["frames"]]


@pytest.mark.parametrize("body", ["context(1); take(1)", "take(0); take(1)", "context(0); context(1)", "take(0)"])
def test_nothing_to_warn_of(body, tmp_path):
    assert run(tmp_path, body) == ([], [])
