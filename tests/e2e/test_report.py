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
    return {line["name"]: line["bytes"] for line in device["reconcile"]["lines"]}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The demo's two ranks, as the script itself shows them."""
    out = tmp_path_factory.mktemp("who")
    env = {"MEMTRACE_BUILD": str(support.build_dir()), "MEMTRACE_TORCH": support.PYTHON, "MEMTRACE_OUT": str(out)}
    shown = support.must(support.execute([support.ROOT / "scripts" / "who_has_the_rest"], env=env)).stdout
    for line in ("104,857,600", "50,331,648  NCCL", "25,165,824  libextension.so", "8,388,608  cuBLAS workspace"):
        assert shown.count(line) >= 2, f"{line} is not shown for both ranks:\n{shown}"
    return [report(out / f"rank{rank}.pickle") for rank in (0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_owner_is_named_to_the_byte(ranks, rank):
    [device] = [d for d in ranks[rank]["devices"] if d["device"] == rank]
    owners = {o["owner"]: o["bytes"] for o in device["owners"]}
    assert (owners["NCCL"], owners["libextension.so"]) == (48 * MIB, 24 * MIB)
    found = lines(device)
    assert found == {**owners, "contexts": CONTEXT, "unexplained": 0}
    assert device["held"] == sum(owners.values()) <= device["peak_held"]
    [workspace] = device["workspaces"]
    assert (workspace["library"], workspace["peak"]) == ("cuBLAS workspace", 8 * MIB)


def test_a_stray_context_is_told_with_the_line_that_made_it(ranks):
    stray = [w for w in ranks[1]["warnings"] if "stray context on device 0" in w]
    assert len(stray) == 1 and str(CONTEXT) in stray[0] and "who_has_the_rest.py:33" in stray[0], ranks[1]["warnings"]
    assert not any("stray" in w for w in ranks[0]["warnings"])
    [other] = [d for d in ranks[1]["devices"] if d["device"] == 0]
    assert (other["held"], lines(other)) == (0, {"contexts": CONTEXT, "unexplained": 0})


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
