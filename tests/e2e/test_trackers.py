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
    lines = len(theirs["memories_allocated"])
    assert lines > 100
    for table in TABLES:
        assert ours[table] == dict(theirs[table]), table
    for marker, at in theirs["markers"].items():
        assert ours["markers"][marker] == at
    assert ours["op_index"] == theirs.get("op_index", lines)  # 2.11 does not write it
    if how == "streams":
        waiting = [a[1] > b[1] for a, b in zip(ours["memories_active"].values(), ours["memories_allocated"].values())]
        assert any(waiting) and not all(waiting)


def test_memory_tracker_alone_sees_the_same_operators(tmp_path):
    """Under a dispatch mode autograd adds gradients up out of place, without
    one in place; all else is the same."""
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


@pytest.mark.parametrize("how", ["plain", "autocast", "checkpoint", "other"])
def test_operators_seen_as_they_begin_are_those_that_callbacks_see(tmp_path, how):
    assert int(run("operators_seen.py", how, out=tmp_path / "out")) > 100


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
    # PyTorch's class was the last to write, and before 2.15 it has one key less.
    written = before[1].keys()
    assert set(before[0]) - set(written) <= {"op_index"}
    after = [pickle.loads(path.read_bytes()) for path in files]
    assert after == [{key: tables[key] for key in written} for tables in before]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not here")
def test_curves(tmp_path):
    both("alone", tmp_path)
    program = "import sys, memtrace; memtrace.MemoryTracker().show_traces(sys.argv[1]).savefig(sys.argv[2])"
    env = {**PACKAGE, "MPLBACKEND": "agg"}
    must(execute([PYTHON, "-c", program, tmp_path / "ours", tmp_path / "curves.png"], env=env))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_do(tmp_path):
    both("alone", tmp_path)
    program = "import sys, memtrace; sys.modules['matplotlib'] = None; memtrace.MemoryTracker().show_traces(sys.argv[1])"
    done = must(execute([PYTHON, "-c", program, tmp_path / "ours"], env=PACKAGE), 1)
    assert "pip install matplotlib" in done.stderr


# --- MemTracker ---


def tracked(how, tmp_path):
    return json.loads(run("mem_tracker.py", how, out=tmp_path / "out").splitlines()[-1])


@pytest.mark.parametrize("how", ["plain", "single", "fused", "checkpoint", "accumulate", "workspaces"])
def test_mem_tracker_is_exact_where_pytorchs_is_near(tmp_path, how):
    found = tracked(how, tmp_path)
    for moment in found["said"]:
        ours, peak = moment["ours"], moment["our peak"]
        assert ours["Total"] == moment["allocated"], moment["when"]
        assert peak["Total"] == moment["peak"], moment["when"]
        for sums in (ours, peak):
            assert sum(n for category, n in sums.items() if category != "Total") == sums["Total"]
            assert min(sums.values()) >= 0
        for category in ("Parameter", "Buffer", "Gradient", "Optstate"):
            assert ours[category] == moment[category], (moment["when"], category)
        # PyTorch's own promise for itself, but for what is in no tensor.
        if how != "workspaces":
            assert abs(moment["their peak"]["Total"] - moment["peak"]) <= 0.1 * moment["peak"], moment["when"]
        assert moment["theirs"]["Parameter"] == ours["Parameter"]
    # The peak of the first backward pass is in it, before anybody knows what is a gradient.
    first = next(moment for moment in found["said"] if moment["when"] == "0 backward 0")
    assert first["our peak"]["Gradient"] > 0
    at = {moment["when"]: moment["ours"] for moment in found["said"]}
    assert at["begin"]["Gradient"] == at["begin"]["Optstate"] == 0 and at["begin"]["Input"] == 256 * 512 * 4
    assert at["0 forward 0"]["Activation"] > 0 and at["0 forward 0"]["Temp"] == 0
    assert at["0 backward 0"]["Activation"] == 0 and at["0 backward 0"]["Gradient"] == at["begin"]["Parameter"]
    assert at["0 step"]["Optstate"] >= 2 * at["begin"]["Parameter"]
    assert at["1 zero_grad"]["Gradient"] == 0


def test_mem_tracker_knows_modules(tmp_path):
    modules = tracked("alone", tmp_path)["modules"]
    first, last = modules["layers.0"], modules["layers.3"]
    assert {"", "layers.0", "layers.0.up", "layers.3.down", "head"} <= set(modules)
    for states in (first, last):
        assert all(len(states[s]) == 2 for s in ("Pre-Forward", "Post-Forward", "Peak-Forward", "Pre-Backward")), states
        before, after = states["Pre-Forward"][0], states["Post-Forward"][0]
        assert after["Activation"] > before["Activation"] and after["Parameter"] == before["Parameter"]
        assert states["Peak-Forward"][0]["Total"] >= max(before["Total"], after["Total"])
        before, after = states["Pre-Backward"][0], states["Post-Backward"][0]
        assert after["Activation"] < before["Activation"] and after["Gradient"] > before["Gradient"]
        assert states["Peak-Backward"][0]["Total"] >= max(before["Total"], after["Total"])


def test_mem_tracker_knows_what_a_checkpoint_computes_again(tmp_path):
    modules = tracked("checkpoint", tmp_path)["modules"]
    again = modules["layers.1"]
    assert len(again["Pre-Forward-AC"]) == 2
    assert modules["layers.1.up"]["Post-Forward-AC"][0]["Activation"] > again["Pre-Forward-AC"][0]["Activation"]


def test_mem_tracker_where_gradients_are_short_lived_and_trackers_are_many(tmp_path):
    said = json.loads(run("mem_tracker_cases.py", out=tmp_path / "out").splitlines()[-1])
    size = said["parameters"]
    peak, now = said["gone"]
    assert peak["Gradient"] > 0 and now["Gradient"] == now["Temp"] == 0
    assert said["in a hook"]["Gradient"] + said["in a hook"]["Temp"] > 0
    now, peak, given = said["given back"]
    assert sum(given) == size and now["Gradient"] == 0 and 0 < peak["Gradient"] < size
    now, allocated = said["one thread"]
    assert now["Gradient"] == size and now["Temp"] == 0 and now["Total"] == allocated
    assert said["inner"]["Input"] == 64 * 512 * 4 and said["inner"]["Gradient"] == size
    outer, allocated = said["outer"]
    assert outer["Total"] == allocated and outer["Gradient"] == size and outer["Optstate"] >= 2 * size
    most, times = said["unread"]
    assert most < 30_000 and times >= 1
    now, allocated = said["after"]
    assert now["Total"] == allocated


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_mem_tracker_is_exact_on_each_rank(how, tmp_path):
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    script = [HERE / "scripts" / "mem_tracker_ranks.py", how, tmp_path]
    must(record([*torchrun, *script], tmp_path / "out", spec="h100*2", env=PACKAGE))
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        for moment in said:
            now, peak, when = moment["now"], moment["peak"], moment["when"]
            assert now["Total"] == moment["allocated"] and peak["Total"] == moment["most"], when
            assert now["Optstate"] == moment["Optstate"], when
            # After a forward FSDP keeps the outermost module gathered: `parameters()` are
            # those, and their parts are there, too.
            gathered = how == "fsdp2" and "forward" in when
            more = now["Parameter"] - moment["Parameter"]
            assert 0 < more <= 16384 if gathered else more == 0, when
            # DDP's buckets stay gradients when they are emptied.
            if how == "fsdp2" or "zero_grad" not in when:
                assert now["Gradient"] == moment["Gradient"], when
        most = max(moment["peak"]["Communication"] for moment in said)
        assert (most > 1_000_000) == (how == "fsdp2")
