"""Where the virtual GPU puts memory, against the addresses that real drivers
gave PyTorch's segments.

Absolute addresses differ from run to run on a real card. What a program can see is which of two
segments has the lower address, so that is compared. It is compared for every segment with each
other one that is alive when it comes.
"""

import gzip
import json

import pytest
import support

DATA = support.ROOT / "tests" / "data" / "placement"

# The share of relations that come out as recorded: what was measured, and less is a step back.
LINUX = {"conv3d": 1.0, "conv_oom_retry": 0.984, "finetune": 0.983, "llama_offload": 0.964, "small": 1.0}
ASCENDING = {"ascending_lm": 0.995, "windows_opt": 0.88}
CASES = [(f"linux_{name}", "linux", share) for name, share in LINUX.items()]
CASES += [(name, "ascending", share) for name, share in ASCENDING.items()]

REPLAY = """
import ctypes, gzip, json, sys
cuda = ctypes.CDLL("libcudart.so.13")
cuda.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
cuda.cudaFree.argtypes = [ctypes.c_void_p]
here, good, bad = {}, 0, 0
for action, size, recorded in json.load(gzip.open(sys.argv[1]))["events"]:
    if action == "segment_free":
        # One that was there before the recording began has no counterpart here.
        if recorded in here:
            assert cuda.cudaFree(here.pop(recorded)) == 0
        continue
    place = ctypes.c_void_p()
    assert cuda.cudaMalloc(place, size) == 0
    for other, lies in here.items():
        same = (recorded < other) == (place.value < lies)
        good, bad = good + same, bad + (not same)
    here[recorded] = place.value
print(good, bad)
"""


def relations(file, placement):
    """How many relations come out as recorded, and how many do not."""
    spec = f"sm_90,1024GiB,132SM,placement={placement}"
    command = ("run", "--record", "off", "--virtual", spec, "--", support.PYTHON, "-c", REPLAY, DATA / f"{file}.json.gz")
    return map(int, support.must(support.memtrace(*command)).stdout.split())


@pytest.mark.parametrize(("file", "placement", "share"), CASES, ids=[case[0] for case in CASES])
def test_segments_lie_as_recorded(file, placement, share):
    good, bad = relations(file, placement)
    recorded = json.loads(gzip.decompress((DATA / f"{file}.json.gz").read_bytes()))["events"]
    assert good + bad >= sum(action == "segment_alloc" for action, *_ in recorded), "the oracle has looked"
    assert good / (good + bad) >= share, f"{good} of {good + bad} relations as recorded"


def test_the_other_placement_is_another():
    good, bad = relations("linux_finetune", "ascending")
    assert good < 0.1 * bad, "an oracle that any placement passes is none"


def test_a_wrong_placement_says_what_to_write():
    done = support.memtrace("run", "--virtual", "h100,placement=up", "--", "true")
    assert done.returncode == 2
    assert "placement=linux (the default) or placement=ascending" in done.stderr, done.stderr


def test_help_names_the_option():
    assert "placement=ascending" in support.must(support.memtrace("run", "--help")).stdout
