"""What a Python program held when Python began to end: what its snapshot shows."""

import os
import json
import signal

import hazard
import pytest
import support

pytest.importorskip("torch")

MIB = 1 << 20

# `new(n)` takes n MiB. What is kept until the end is 10, and 3 more where
# nobody has left the function.
PROGRAM = """
import atexit, ctypes, os, signal, sys, threading, time
import torch
def new(n): return torch.zeros(n << 18, device="cuda")
kept = [new(10)]
def handler():
    kept.clear(); kept.append(new(5))
def work():
    time.sleep(0.3); kept.append(new(7)); passing = new(1); del passing
def main():
    local = new(3)
    %s
%s
main()
"""

# What happens: in the function, before it; the exit code, what is held, and what
# was left, None where the two are one.
WAYS = {
    "the last line": ("pass", "", 0, 10, 0),
    "sys.exit in a function": ("sys.exit(3)", "", 3, 13, 0),
    "an exception": ("raise ValueError('x')", "", 1, 13, 0),
    "a handler that exits": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM)",
        "",
        5,
        13,
        0,
    ),
    # Who runs the tests in the background has SIGINT ignored, and their children, too.
    "SIGINT": (
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        -signal.SIGINT,
        13,
        0,
    ),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", "", -signal.SIGTERM, 13, None),
    "os._exit": ("os._exit(4)", "", 4, 13, None),
    "C's exit": ("ctypes.CDLL(None).exit(6)", "", 6, 13, None),
    "atexit frees": ("pass", "atexit.register(kept.clear)", 0, 10, 0),
    "atexit allocates": ("pass", "atexit.register(handler)", 0, 5, 0),
    "a thread goes on": ("pass", "threading.Thread(target=work).start()", 0, 17, 0),
    "all is freed": ("pass", "kept.clear()", 0, 0, None),
}


def run(program, tmp_path, stacks, code):
    path = tmp_path / "program.py"
    path.write_text(program)
    out = tmp_path / "out"
    support.must(support.record([support.PYTHON, path], out, stacks=stacks), code=code)
    found = support.files(out) or hazard.recover(out)
    assert len(found) == 1
    support.must(support.memtrace("check", found[0]))
    return found[0]


def as_json(verb, path):
    return json.loads(support.must(support.memtrace(verb, "--json", path)).stdout)


def held(path):
    return sum(b["requested_size"] for b in support.live_blocks(support.load(path)))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_held_is_what_python_took_away(way, tmp_path):
    last, before, code, expect, left = WAYS[way]
    path = run(PROGRAM % (last, before), tmp_path, "all", code)
    assert held(path) == expect * MIB
    end = hazard.about(path).get("end")
    if left is None:
        assert end is None
        return
    assert end["shown"] == "python"
    for key, bytes_ in (("python", expect), ("process", left)):
        (device,) = end[key]["devices"]
        assert device["allocated"] == bytes_ * MIB and device["reserved"] == device["held"] >= expect * MIB
    assert end["process"]["events"] > end["python"]["events"]
    summary = support.must(support.memtrace("summary", path)).stdout
    size = f"{expect}.0 MiB" if expect >= 10 else f"{expect}.00 MiB"
    assert f"{size} in" in summary and "when Python began to end; 0 B in 0 blocks at the end of the process" in summary
    report = support.must(support.memtrace("report", path)).stdout
    assert f"{size} allocated by PyTorch; at the end of the process: " in report
    for verb in ("summary", "report"):
        (device,) = as_json(verb, path)["devices"]
        assert device["at_process_end"]["allocated"] == 0


@pytest.mark.parametrize("stacks", ["python", "none"])
def test_without_native_frames_the_interpreter_itself_tells(stacks, tmp_path):
    path = run(PROGRAM % ("pass", ""), tmp_path, stacks, 0)
    assert held(path) == 10 * MIB and hazard.about(path)["end"]["process"]["devices"][0]["allocated"] == 0


def test_copies_of_a_model_are_held_by_the_line_that_made_them(tmp_path):
    """`attribution/06_ema.py`: at the end of the process nothing of the copies is left."""
    program = """
import copy, torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
ema = copy.deepcopy(model)  # line 4
opt = torch.optim.Adam(model.parameters())
model(torch.randn(8, 1024, device="cuda")).sum().backward()
opt.step()
"""
    path = run(program, tmp_path, "all", 0)
    (device,) = as_json("summary", path)["devices"]
    lines = {site["site"].split()[0].rsplit(":", 1)[-1]: site["bytes"] for site in device["at_end"]}
    weights = 4 * (1024 * 1024 + 1024) * 4
    assert lines["4"] == weights and lines["3"] == weights, lines
    assert lines["7"] >= 2 * weights, "the optimizer's"


def test_the_history_may_be_shorter_than_python_s_end(tmp_path):
    """Then the end of the process must do, and nothing is said of another moment."""
    program = "import torch\nkept = [torch.zeros(1000, device='cuda') for _ in range(3000)]\n"
    path = tmp_path / "program.py"
    path.write_text(program)
    env = {"MEMTRACE_EVENTS": "1024"}
    support.must(support.record([support.PYTHON, path], tmp_path / "out", env=env))
    found = support.only_file(tmp_path / "out")
    support.must(support.memtrace("check", found))
    assert "end" not in hazard.about(found) and held(found) == 0


def test_programs_without_python_have_one_end(programs, gpu, tmp_path):
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_QUIET": "1"}
    support.must(support.execute([programs / "client", tmp_path / "ledger", "exit", "50"], env=env), code=3)
    assert "end" not in hazard.about(support.only_file(tmp_path))


def test_what_is_taken_while_python_ends_is_never_left_out(tmp_path):
    program = """
import ctypes, torch
kept = [torch.zeros(1 << 18, device="cuda")]
class Last:
    def __del__(self, call=ctypes.CDLL(None).cudaMalloc, at=ctypes.byref(ctypes.c_void_p()), size=ctypes.c_size_t(12345)):
        call(at, size)
last = Last()
"""
    path = run(program, tmp_path, "all", 0)
    assert 12345 in [b["requested_size"] for b in support.live_blocks(support.load(path))]
