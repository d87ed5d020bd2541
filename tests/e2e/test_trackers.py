"""The trackers, beside PyTorch's own on the same run."""

import importlib.util
import json
import pickle

import pytest
from support import HERE, PYTHON, ROOT, execute, must, record

PACKAGE = {"PYTHONPATH": str(ROOT / "python")}


def run(script, *args, out, code=0):
    """What a script printed, under memtrace on a virtual GPU."""
    command = [PYTHON, HERE / "scripts" / script, *args]
    return must(record(command, out, env=PACKAGE), code).stdout


def both(how, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    more = json.loads(run("memory_tracker.py", how, ours, theirs, out=tmp_path / "out"))
    return pickle.loads(ours.read_bytes()), pickle.loads(theirs.read_bytes()), more


TABLES = ("memories_allocated", "memories_active", "memories_reserved")


@pytest.mark.parametrize("how", ["plain", "single", "autocast", "checkpoint", "streams"])
def test_memory_tracker_says_what_pytorchs_says(tmp_path, how):
    ours, theirs, _ = both(how, tmp_path)
    assert theirs["op_index"] > 100
    for table in TABLES:
        assert ours[table] == dict(theirs[table]), table
    for marker, at in theirs["markers"].items():
        assert ours["markers"][marker] == at
    assert ours["op_index"] == theirs["op_index"]
    if how == "streams":
        waiting = [a[1] > b[1] for a, b in zip(ours["memories_active"].values(), ours["memories_allocated"].values())]
        assert any(waiting) and not all(waiting)


def test_memory_tracker_alone_sees_the_same_operators(tmp_path):
    """Under a dispatch mode autograd adds gradients up out of place, without one in place; all else is the same."""
    alone, _, more = both("alone", tmp_path / "a")
    beside, _, _ = both("plain", tmp_path / "b")

    def others(tables):
        rows = [row[0].rpartition("_")[0] for row in tables["memories_allocated"].values()]
        return [name.replace("add_.", "add.") for name in rows]

    assert others(alone) == others(beside)
    assert max(row[1] for row in alone["memories_allocated"].values()) <= max(
        row[1] for row in beside["memories_allocated"].values()
    )
    for marker in ("fw_start", "fw_bw_boundary", "bw_end", "optimizer_step"):
        assert alone["markers"][marker] == beside["markers"][marker]
    start, boundary, end, step = (alone["markers"][m] for m in ("fw_start", "fw_bw_boundary", "bw_end", "optimizer_step"))
    assert start < boundary < end <= step
    assert any(more["backward"][boundary:end]) and not any(more["backward"][end:])


def test_memory_tracker_says_what_is_missing(tmp_path):
    program = "import memtrace, torch; memtrace.MemoryTracker().start_monitor(torch.nn.Linear(1, 1))"
    done = must(execute([PYTHON, "-c", program], env=PACKAGE), 1)
    assert "memtrace run -- python" in done.stderr


def test_either_class_reads_the_others_file(tmp_path):
    program = """
import sys, pickle, memtrace, torch
from torch.distributed._tools.memory_tracker import MemoryTracker as Theirs
for cls in (memtrace.MemoryTracker, Theirs):
    for path in sys.argv[1:]:
        tracker = cls()
        tracker.load(path)
        tracker.summary(top=3)
        tracker.save_stats(path)
"""
    both("plain", tmp_path)
    files = [tmp_path / "ours", tmp_path / "theirs"]
    before = [pickle.loads(path.read_bytes()) for path in files]
    done = must(execute([PYTHON, "-c", program, *files], env=PACKAGE))
    assert done.stdout.count("addmm") + done.stdout.count("_foreach") >= 4, done.stdout
    assert [pickle.loads(path.read_bytes()) for path in files] == before


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not here")
def test_curves(tmp_path):
    both("alone", tmp_path)
    program = "import sys, memtrace; memtrace.MemoryTracker().show_traces(sys.argv[1]).savefig(sys.argv[2])"
    env = {**PACKAGE, "MPLBACKEND": "agg"}
    must(execute([PYTHON, "-c", program, tmp_path / "ours", tmp_path / "curves.png"], env=env))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(bool(importlib.util.find_spec("matplotlib")), reason="matplotlib is here")
def test_without_matplotlib_it_says_what_to_do(tmp_path):
    both("alone", tmp_path)
    program = "import sys, memtrace; memtrace.MemoryTracker().show_traces(sys.argv[1])"
    done = must(execute([PYTHON, "-c", program, tmp_path / "ours"], env=PACKAGE), 1)
    assert "pip install matplotlib" in done.stderr
