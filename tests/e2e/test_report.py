"""Who has the rest: every owner to the byte, and a table that adds up to what the device says."""

import json

import pytest
import support

MIB = 1 << 20
CONTEXT = 520 * MIB  # the virtual H100's


def report(path):
    found = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    for device in found["devices"]:
        table = device["reconcile"]
        assert sum(line["bytes"] for line in table["lines"]) == table["used"]
    return found


def lines(device):
    """Without what other ranks hold of a card that they share: how far they are
    when it is measured, nobody says."""
    return {line["name"]: line["bytes"] for line in device["reconcile"]["lines"] if line["name"] != "other processes"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The demo's two ranks, as the script itself shows them."""
    out = tmp_path_factory.mktemp("who")
    env = {"MEMTRACE_BUILD": str(support.build_dir()), "MEMTRACE_TORCH": support.PYTHON, "MEMTRACE_OUT": str(out)}
    shown = support.must(support.execute([support.ROOT / "scripts" / "who_has_the_rest"], env=env)).stdout
    for line in ("104,857,600", "620,756,992  NCCL", "50,331,648", "25,165,824  libextension.so", "8,388,608  cuBLAS workspace"):
        assert shown.count(line) >= 2, f"{line} is not shown for both ranks:\n{shown}"
    return [report(out / f"rank{rank}.pickle") for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_owner_is_named_to_the_byte(ranks, rank):
    [device] = [d for d in ranks[rank]["devices"] if d["device"] == rank]
    owners = {o["owner"]: o["bytes"] for o in device["owners"]}
    assert owners["libextension.so"] == 24 * MIB
    # What the program has from NCCL by itself, and what NCCL takes for its
    # communicators (docs/virtual.md).
    by_communicator = [c["bytes"] for c in device["communicators"]]
    assert 48 * MIB in by_communicator and sum(by_communicator) == owners["NCCL"] > 500 * MIB, device["communicators"]
    found = lines(device)
    assert found == {**owners, "contexts": CONTEXT, "unexplained": 0}
    assert device["held"] == sum(owners.values()) <= device["peak_held"]
    [workspace] = device["workspaces"]
    assert (workspace["library"], workspace["peak"]) == ("cuBLAS workspace", 8 * MIB)


def test_a_stray_context_is_reported_with_the_line_that_made_it(ranks):
    stray = [w for w in ranks[1]["warnings"] if "stray context on device 0" in w]
    script = (support.ROOT / "scripts" / "who_has_the_rest.py").read_text().splitlines()
    [line] = [number for number, text in enumerate(script, 1) if "torch.cuda.synchronize(0)" in text]
    assert len(stray) == 1 and str(CONTEXT) in stray[0] and f"who_has_the_rest.py:{line} " in stray[0], ranks[1]["warnings"]
    assert not any("stray" in w for w in ranks[0]["warnings"])
    [other] = [d for d in ranks[1]["devices"] if d["device"] == 0]
    assert (other["held"], lines(other)) == (0, {"contexts": CONTEXT, "unexplained": 0})


MANAGED = """
import ctypes, torch
cuda = ctypes.CDLL("libcudart.so." + torch.version.cuda.split(".")[0])
torch.empty(1 << 20, device="cuda")
a, b = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cudaMallocManaged(ctypes.byref(a), ctypes.c_size_t(15 << 30), 1) == 0
assert cuda.cudaMallocManaged(ctypes.byref(b), ctypes.c_size_t(1 << 30), 1) == 0
assert cuda.cudaFree(b) == 0
"""


def test_managed_memory_has_a_line_of_its_own(tmp_path):
    """Issue F, B12: a paged optimizer keeps its state there, and no sum of
    what the card holds has it."""
    support.must(support.record([support.PYTHON, "-c", MANAGED], tmp_path))
    path = support.only_file(tmp_path)
    [device] = report(path)["devices"]
    managed = device["managed"]
    assert (managed["held"], managed["peak_held"]) == (15 << 30, 16 << 30)
    assert sum(o["bytes"] for o in managed["owners"]) == 15 << 30 and sum(o["bytes"] for o in managed["owners_at_peak"]) == 16 << 30
    assert device["peak_held"] < 1 << 30
    text = support.must(support.memtrace("report", path)).stdout
    assert "managed memory" in text and "16.0 GiB at most, 15.0 GiB at the end" in text, text


OOM = """
import torch
kept = [torch.zeros(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
try:
    kept.append(torch.empty(78 << 30, dtype=torch.uint8, device="cuda"))
    kept.append(torch.empty(78 << 30, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print("caught")
"""


@pytest.mark.parametrize("stacks", ["all", "python", "none"])
def test_a_program_that_goes_on_leaves_a_text_about_its_failure(stacks, tmp_path):
    done = support.must(support.record([support.PYTHON, "-c", OOM], tmp_path, stacks=stacks))
    assert done.stdout == "caught\n"
    [path] = tmp_path.glob("memtrace-*-0-oom.txt")
    text = path.read_text()
    assert len(text.splitlines()) <= 25 and done.stderr.count("OUT OF MEMORY") == 1
    assert "OUT OF MEMORY on device 0: 78.00 GiB asked of PyTorch's allocator" in text
    assert "78.25 GiB  PyTorch" in text
    assert stacks == "none" or "256.0 MiB  4 x" in text


def test_a_failure_of_the_driver_outside_pytorch_leaves_one_too(tmp_path):
    call = 'print(ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(at), ctypes.c_size_t(99 << 30)))'
    code = "import ctypes\nat = ctypes.c_void_p()\n" + call
    done = support.must(support.record([support.PYTHON, "-c", code], tmp_path, stacks="all"))
    assert done.stdout == "2\n"
    [path] = tmp_path.glob("memtrace-*-oom.txt")
    assert "99.00 GiB asked of cudaMalloc by <string>" in path.read_text()
