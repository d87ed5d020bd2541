"""memtrace.Tracer, with PyTorch's own statistics as the oracle."""

import json
import importlib.util

import pytest
from support import HERE, MEMTRACE, PYTHON, ROOT, execute, load, must, only_file, record

PACKAGE = {"PYTHONPATH": str(ROOT / "python")}


def traced(how, out):
    """What a program reports, and what is true."""
    done = must(record([PYTHON, HERE / "scripts" / "tracer.py", how], out, env=PACKAGE))
    found = json.loads(done.stdout)
    return found["report"], found["said"], done.stderr


@pytest.mark.parametrize("how", ["plain", "checkpoint"])
def test_training_is_what_pytorch_counts(tmp_path, how):
    report, said, text = traced(how, tmp_path)
    assert "an estimate, on the virtual GPU h100" in text and "backward" in text and "layers.0.up" in text
    assert (report["virtual"], report["version"]) == ("h100", 1)
    check_phases(report, said)
    blocks = report["lifetimes"]["blocks"]
    check_lives(report, said, blocks)
    relus = [b for b in blocks if b["operator"] == "aten::relu.default" and not b["in_backward"]]
    again = [b for b in relus if b["created_in_phase"] == "backward"]
    assert {b["freed_in_phase"] for b in relus} == ({"backward", "forward"} if how == "checkpoint" else {"backward"})
    assert len(again) == (2 * 3 if how == "checkpoint" else 0)
    assert {b["module"] for b in relus} == {f"layers.{i}" for i in range(3)}
    if how == "plain":
        check_saved(report, said, blocks)
        # Between two nodes of autograd's, too, which work on this thread.
        assert all(b["in_backward"] == (b["created_in_phase"] == "backward") for b in blocks if b["created"] >= 0)
        # The hook on saved tensors keeps nothing: without it, the same steps take the same.
        unhooked, without, _ = traced("unhooked", tmp_path / "unhooked")
        assert without["phases"] == said["phases"]
        assert not any(block["saved"] for block in unhooked["lifetimes"]["blocks"])


def check_phases(report, said):
    for name, calls in said["phases"].items():
        assert report["phases"][name]["cuda:0"]["calls"] == calls, name
        assert report["phases"][name]["cuda:0"]["max"] == max(call["max"] for call in calls)
    device = report["devices"]["cuda:0"]
    assert device["max"] == max(call["max"] for calls in said["phases"].values() for call in calls)
    assert sum(device["categories"].values()) == device["max"]
    assert device["current"] == said["now"] == said["until now"]
    assert device["max_reserved"] >= device["reserved"] >= device["current"]
    # Phases that nobody named are found.
    steps = report["phases"]["optimizer_step"]["cuda:0"]["calls"]
    assert len(steps) == len(report["phases"]["zero_grad"]["cuda:0"]["calls"]) == 2
    assert [call["max"] for call in steps] == [call["max"] for call in said["phases"]["update"]]


def check_lives(report, said, blocks):
    alive = {str(b["address"]): b["bytes"] for b in blocks if b["freed"] is None}
    assert alive == said["alive"]
    assert sum(b["bytes"] for b in blocks if b["created"] < 0) == report["devices"]["cuda:0"]["start"]
    for block in blocks:
        assert block["freed"] is None or block["freed"] > block["created"]
    states = [b for b in blocks if b["category"] == "Optstate" and b["created"] >= 0]
    assert states and all(b["created_in_phase"] == "update/optimizer_step" and b["freed"] is None for b in states)
    gradients = [b for b in blocks if b["category"] == "Gradient"]
    assert gradients and all((b["created_in_phase"], b["in_backward"]) == ("backward", True) for b in gradients)
    assert "update/zero_grad" in {b["freed_in_phase"] for b in gradients}


def check_saved(report, said, blocks):
    # By address, since the second step gets the same ones.
    saved = [b for b in blocks if b["saved"] is not None]
    assert len(said["saved"]) == 2
    assert {b["address"] for b in saved} == set(said["saved"][0]) | set(said["saved"][1])
    for block in saved:
        assert block["created"] < block["saved"] and (block["freed"] is None or block["saved"] < block["freed"])
    assert any((b["module"], b["saved_in_module"]) == ("layers.1.norm", "layers.1.up") for b in saved)
    # `relu` keeps its result, and then `down` does: the first is the one that counts.
    relus = {(b["module"], b["saved_in_module"]) for b in saved if b["operator"] == "aten::relu.default"}
    assert relus == {(f"layers.{i}", f"layers.{i}") for i in range(3)}
    # What goes into it is given back by the block that called `up`.
    hidden = [b for b in blocks if b["category"] == "Activation" and (b["module"], b["saved"]) == ("layers.1.up", None)]
    assert {(b["freed_in_phase"], b["freed_in_module"]) for b in hidden if not b["in_backward"]} == {("forward", "layers.1")}
    by_module = report["lifetimes"]["by_module"]
    assert by_module["layers.1"]["saved"] == sum(b["bytes"] for b in saved if b["module"] == "layers.1") > 0
    for row in by_module.values():
        assert row["created"] == row["freed_in_backward"] + row["freed_elsewhere"] + row["alive"]
    gradients = [b["bytes"] for b in blocks if b["module"] == "layers.1.norm" and b["freed_in_phase"] == "update/zero_grad"]
    assert by_module["layers.1.norm"]["freed_elsewhere"] == sum(gradients) > 0 == by_module["layers.1.norm"]["alive"]


def test_phases_that_nobody_names_are_found(tmp_path):
    report, said, _ = traced("unnamed", tmp_path)
    assert set(report["phases"]) == {"forward", "backward", "optimizer_step", "zero_grad"}
    calls = {name: phase["cuda:0"]["calls"] for name, phase in report["phases"].items()}
    assert {len(each) for each in calls.values()} == {2}
    for name, theirs in (("backward", "backward"), ("optimizer_step", "update")):
        assert [call["max"] for call in calls[name]] == [call["max"] for call in said["phases"][theirs]], name
    for ours, theirs in zip(calls["backward"], said["phases"]["backward"]):
        assert 0 <= theirs["allocated"] - ours["allocated"] <= 1024  # what begins it is taken before its first node


def test_a_phase_is_of_every_thread(tmp_path):
    report, said, _ = traced("threads", tmp_path)
    ours = report["phases"]["backward"]["cuda:0"]["calls"]
    for call, theirs in zip(ours, said["phases"]["backward"]):
        assert {what: call[what] for what in ("max", "allocated", "blocks")}.items() <= theirs.items()
    blocks = [b for b in report["lifetimes"]["blocks"] if b["in_backward"]]
    assert {b["created_in_phase"] for b in blocks} == {"backward"} and {"layers.0.up", "head"} <= {b["module"] for b in blocks}


def test_operators_and_modules_are_what_pytorch_counts(tmp_path):
    report, said, _ = traced("operators", tmp_path)
    ours = {name: use["cuda:0"]["allocated"] for name, use in report["operators"].items()}
    theirs = {name: n for name, n in said["operators"].items() if n}
    assert len(theirs) >= 4
    for name, taken in theirs.items():
        assert ours[name] == taken, name
    assert set(ours) - set(theirs) == {"aten::stack.default", "aten::sum.dim_IntList"}
    # How often each was called, as plugins learn it.
    assert {name: report["plugins"]["calls"][name] for name in theirs} == {name: said["calls"][name] for name in theirs}
    for name, taken in said["modules"].items():
        assert report["modules"][name]["cuda:0"]["allocated"] == taken, name
    # Before 2.15 PyTorch keeps the workspaces that the first matrix products
    # took for cuBLAS; nothing else stays.
    kept = [b for b in report["lifetimes"]["blocks"] if b["freed"] is None and b["module"] is not None]
    assert all(block["category"] == "Other" for block in kept)
    for name, use in report["modules"].items():
        inside = [b["bytes"] for b in kept if not name or f"{b['module']}.".startswith(f"{name}.")]
        assert use["cuda:0"]["current"] == sum(inside), name


@pytest.mark.parametrize("how", ["ways", "ways-checkpoint"])
def test_operators_that_are_seen_as_they_begin_are_those_that_callbacks_see(tmp_path, how):
    _, said, _ = traced(how, tmp_path)
    by_callbacks, quickly = said["ways"]
    assert quickly == by_callbacks
    # Of each kind: seen as they begin, made of others, by callbacks alone (they
    # have no tensor), under inference mode.
    operators = {operator for operator, *_ in quickly}
    assert {"aten::addmm.default", "aten::mm.default", "aten::zeros.default", "aten::ones_like.default", "aten::sort.default"} <= operators
    assert "(no operator)" not in operators


# --- the device ---

PROGRAM = """
import sys, memtrace
memtrace.ensure_device({device!r})
import torch
with memtrace.Tracer(device={device!r}) as tracer:
    kept = torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
report = tracer.report()
print(report.virtual, report.devices["cuda:0"].max, *sys.argv[1:])
"""


def test_a_program_starts_itself_anew_on_the_device(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(device="virtual:h100"))
    env = {**PACKAGE, "MEMTRACE_LIBRARY": str(MEMTRACE.parent / "libmemtrace.so"), "MEMTRACE_OUT": str(tmp_path)}
    done = must(execute([PYTHON, script, "an argument", "-x"], env=env, cwd=tmp_path))
    assert done.stdout.split("\n")[0] == "h100 1048576 an argument -x"
    assert load(only_file(tmp_path))["memtrace"]["virtual"]


def test_another_device_than_the_one_at_hand_is_refused(tmp_path):
    program = "import memtrace\nmemtrace.Tracer(device={!r}).__enter__()"
    done = must(record([PYTHON, "-c", program.format("virtual:a100-80")], tmp_path, env=PACKAGE), 1)
    assert "on the virtual GPU h100" in done.stderr and "memtrace run --virtual a100-80 -- " in done.stderr
    done = must(execute([PYTHON, "-c", program.format("virtual:h100")], env=PACKAGE), 1)
    assert "memtrace run --virtual h100 -- " in done.stderr and "ensure_device('virtual:h100')" in done.stderr
    done = must(execute([PYTHON, "-c", program.format("cuda")], env=PACKAGE), 1)
    assert "`memtrace run -- " in done.stderr
    done = must(execute([PYTHON, "-c", program.format("tpu")], env=PACKAGE), 1)
    assert "'cuda', 'cuda:0' or 'virtual:'" in done.stderr


# --- plugins ---


def ranks(out, *args):
    """What two ranks say."""
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = must(record([*torchrun, HERE / "scripts" / "tracer_ranks.py", *args], out, spec="h100*2", env=PACKAGE))
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda one: one["rank"])


def test_pipeline_stages_tell_each_other_their_shapes(tmp_path):
    for rank, said in enumerate(ranks(tmp_path, "torch", "auto")):
        assert said["broadcast"] == [{"from": 1}] and said["gathered"] == [0, 1] and said["put back"]
        assert list(said["plugins"]) == ["torch.distributed"]
        found = said["plugins"]["torch.distributed"]
        assert (found["rank"], found["world_size"]) == (rank, 2)
        # Four pieces of a batch go on, and their gradients come back.
        assert found["calls"]["c10d::send.default"] >= 4 and found["calls"]["c10d::recv_.default"] >= 4
        assert said["phases"]["forward"] == [f"cuda:{rank}"]


@pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not here")
def test_megatrons_stages_tell_each_other_their_shapes(tmp_path):
    _, second = ranks(tmp_path, "megatron", "auto")
    assert second["received"] == [[64, 2, 128], [96, 2, 128]]
    assert set(second["plugins"]) == {"torch.distributed", "megatron-core"}


def test_a_plugin_of_ones_own(tmp_path):
    program = """
import memtrace, torch
from memtrace.tracer import Plugin
class Mine(Plugin):
    name = "mine"
    def begin(self, tracer): print("begins")
    def end(self): print("ends")
    def report(self, operators): return dict(operators)
class Absent(Mine):
    name, library = "absent", "no_such_library"
with memtrace.Tracer(plugins=["auto", Mine(), Absent()]) as tracer:
    torch.ones(4, device="cuda").add_(1)
print(tracer.report().plugins)
try:
    memtrace.Tracer(plugins="nobody")
except memtrace.MemtraceError as error:
    print(error)
"""
    done = must(record([PYTHON, "-c", program], tmp_path, env=PACKAGE))
    assert done.stdout.splitlines() == [
        "begins",
        "ends",
        "{'mine': {'aten::ones.default': 1, 'aten::add_.Tensor': 1}}",
        "there is no plugin 'nobody': torch.distributed, megatron-core, or 'auto'",
    ]


# --- what it says, and pictures ---


def test_logging(tmp_path):
    program = """
import memtrace
with memtrace.Tracer() as tracer, tracer.track_phase("loading"):
    pass
"""
    file = tmp_path / "log" / "memtrace.jsonl"
    run = [PYTHON, "-c", program]
    quiet = must(record(run, tmp_path, env={**PACKAGE, "MEMTRACE_QUIET": "1"}))
    assert quiet.stderr == ""
    env = {**PACKAGE, "MEMTRACE_LOG_LEVEL": "debug", "MEMTRACE_LOG_FILE": str(file), "RANK": "3"}
    done = must(record(run, tmp_path, env=env))
    assert "memtrace: DEBUG: phase begins phase=loading\n" in done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"level": "debug", "message": "phase ends", "phase": "loading", "rank": 3}.items() <= lines[-1].items()
    assert all(line["logger"] == "memtrace.tracer" and line["time"].endswith("Z") for line in lines)
    odd = must(record(run, tmp_path, env={**PACKAGE, "MEMTRACE_LOG_LEVEL": "loudly", "MEMTRACE_QUIET": "1"}))
    assert odd.stderr == (
        "memtrace: MEMTRACE_LOG_LEVEL='loudly' is not one of debug, info, warning, error, off; warnings are shown\n"
    )


PICTURES = """
import sys, memtrace, torch
layer = torch.nn.Linear(64, 64).cuda()
with memtrace.Tracer(layer) as tracer:
    with tracer.track_phase("forward"):
        loss = layer(torch.ones(8, 64, device="cuda")).sum()
    loss.backward()
report = tracer.report()
for what in ("time", "phases", "modules", "operators", "devices"):
    figure = report.plot(what)
    (axes,) = figure.axes
    print(what, len(axes.collections) + len(axes.patches))
    figure.savefig(f"{sys.argv[1]}/{what}.png")
most = max(tracer.report().lifetimes.plot().axes[0].get_ylim())
print("most", most * 2**20, report.devices["cuda:0"].max)
"""


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not here")
def test_pictures(tmp_path):
    env = {**PACKAGE, "MPLBACKEND": "agg"}
    done = must(record([PYTHON, "-c", PICTURES, tmp_path], tmp_path / "out", env=env))
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for what in ("time", "phases", "modules", "operators", "devices"):
        assert int(lines[what]) > 0
        assert (tmp_path / f"{what}.png").read_bytes().startswith(b"\x89PNG")
    top, most = map(float, lines["most"].split())
    assert most <= top <= 1.1 * most
