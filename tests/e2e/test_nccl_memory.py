"""What a communicator of NCCL takes of a virtual GPU: an estimate, and charged to
the communicator."""

import json

import pytest
import support

PROGRAM = """
import ctypes, json
nccl, cuda = ctypes.CDLL("libnccl.so.2"), ctypes.CDLL("libcudart.so.13")

class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]

def used():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return (total.value - free.value) >> 20

def made(ranks):
    name, comm = Id(), ctypes.c_void_p()
    assert nccl.ncclGetUniqueId(ctypes.byref(name)) == 0
    assert nccl.ncclCommInitRank(ctypes.byref(comm), ranks, name, 0) == 0
    return comm

data = ctypes.c_void_p()
assert cuda.cudaMalloc(ctypes.byref(data), ctypes.c_size_t(64 << 20)) == 0
steps = [used()]
pair, four = made(2), made(4)
steps.append(used())
for comm in (pair, four, four):
    assert nccl.ncclAllReduce(data, data, ctypes.c_size_t(1), 7, 0, comm, None) == 0
    steps.append(used())
for _ in range(2):
    assert nccl.ncclSend(data, ctypes.c_size_t(1), 7, 1, pair, None) == 0
    steps.append(used())
assert nccl.ncclCommDestroy(four) == 0
steps.append(used())
if __import__("os").environ.get("KEEP") is None:
    assert nccl.ncclCommDestroy(pair) == 0
steps.append(used())
print(json.dumps([b - a for a, b in zip(steps, steps[1:])]))
"""


def run(out, spec, **env):
    command = [support.PYTHON, "-S", "-c", PROGRAM]
    return json.loads(support.must(support.record(command, out, spec=spec, env=env)).stdout)


def test_two_and_four_a100_take_what_was_measured(tmp_path):
    begun, pair, four, again, send, resend, end_four, end_pair = run(tmp_path, "a100-80*4")
    assert begun == 2 * 256, "the pool for the network, of each"
    assert (256 + pair, 256 + four) == (544, 688), "MiB, as in NVIDIA/nccl issue 964"
    assert (again, resend) == (0, 0) and send == 32 * 6
    assert end_four == -(256 + four) and end_pair == -(256 + pair + send), "all of it goes with the communicator"


@pytest.mark.parametrize(("name", "value", "pair"), [("NCCL_BUFFSIZE", 8 << 20, 24 * 16), ("NCCL_MAX_NCHANNELS", 8, 8 * 12)])
def test_nccls_own_variables_count(tmp_path, name, value, pair):
    assert run(tmp_path, "a100-80*4", **{name: str(value)})[1] == pair


def test_a_card_without_links_takes_little(tmp_path):
    begun, pair, four, *_ = run(tmp_path, "t4*4")
    assert 0 < begun + pair + four < 200


def test_the_recorder_charges_each_communicator(tmp_path):
    run(tmp_path, "a100-80*4", KEEP="1")
    snapshot = support.load(support.only_file(tmp_path))
    assert "issues 964" in snapshot["memtrace"]["virtual"]["nccl_source"]
    report = support.must(support.memtrace("report", "--json", support.only_file(tmp_path))).stdout
    [device] = json.loads(report)["devices"]
    held = {owner["owner"]: owner["bytes"] >> 20 for owner in device["owners"]}
    assert held["NCCL"] == 544 + 192, "the pair and its sends; the four are gone"
    communicators = {c["owner"]: c["bytes"] >> 20 for c in device["communicators"] if c["bytes"]}
    assert communicators == {"NCCL, communicator 1: rank 0 of 2": 544 + 192}
