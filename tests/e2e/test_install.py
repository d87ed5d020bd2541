"""memtrace as PyTorch's allocator: the same program with either gets the same addresses, history, statistics and errors."""

import json
import os

import corpus
import pytest
import support

RUNNER = support.HERE / "installed.py"
PACKAGE = support.ROOT / "python"
# What a program of the corpus is called, if its threads race for memory: then its history is another one each time.
RACES = {"backward-threads", "python-threads", "python-threads-lazy", "dataloader", "ddp", "fsdp2"}


def environment(extra=None):
    paths = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": paths, "MEMTRACE_LIBRARY": str(support.LIBRARY), **(extra or {})}


def run(program, way, folder, preloaded=False):
    """Everything that PyTorch says of memory after the program, by process."""
    env = environment({**program.env, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "MEMTRACE_OUT": str(folder / "out")})
    command = program.command(support.PYTHON, RUNNER, way, folder)
    options = ["--virtual", program.spec, "--out", folder / "out"]
    if not preloaded:
        options += ["--record", "off"]
    done = support.must(support.memtrace("run", *options, "--", *command, env=env))
    assert any(line.startswith(program.closing) for line in done.stdout.splitlines()), done.stdout
    found = {p.name: json.loads(p.read_text()) for p in sorted(folder.glob(f"{way}-*.json"))}
    assert len(found) == program.ranks, done.stderr
    return list(found.values())


def first_difference(ours, theirs):
    for n, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return f"entry {n} of {len(ours)} and {len(theirs)}:\n memtrace {a}\n PyTorch  {b}"
    return f"{len(ours)} and {len(theirs)} entries" if len(ours) != len(theirs) else None


def compare(ours, theirs):
    assert theirs["backend"] == "native" and ours["backend"] == "pluggable"
    for a, b in zip(ours["trace"], theirs["trace"]):
        assert first_difference(a, b) is None, first_difference(a, b)
    assert len(ours["trace"]) == len(theirs["trace"])
    assert ours["stats"] == theirs["stats"]
    assert ours["summary"] == theirs["summary"]
    assert ours["segments"] == theirs["segments"]
    assert ours["peaks"] == theirs["peaks"]
    assert ours["settings"] == theirs["settings"]
    assert ours["keys"] == theirs["keys"]
    assert ours["messages"] == theirs["messages"]
    assert ours["observed"] == theirs["observed"]


PROGRAMS = [p for p in corpus.judged() if p.name not in RACES]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_same_as_pytorch(program, tmp_path):
    [theirs], [ours] = run(program, "native", tmp_path), run(program, "installed", tmp_path)
    compare(ours, theirs)
    assert sum(map(len, theirs["trace"])) > 20
    if program.script == "oom.py":
        assert len(theirs["messages"]) >= 3 and len(theirs["observed"]) >= 3


@pytest.mark.parametrize("program", [p for p in corpus.judged() if p.name in RACES], ids=lambda p: p.name)
def test_runs_with_threads_and_ranks(program, tmp_path):
    for ours in run(program, "installed", tmp_path):
        assert ours["stats"][0]["allocated_bytes.all.peak"] > 0
        allocated = sum(s["allocated_size"] for s in ours["segments"] if s["device"] == 0)
        assert allocated == ours["stats"][0]["allocated_bytes.all.current"]


def test_same_when_preloaded(tmp_path):
    program = next(p for p in corpus.PROGRAMS if p.name == "transformer")
    [theirs], [ours] = run(program, "native", tmp_path), run(program, "installed", tmp_path, preloaded=True)
    compare(ours, theirs)
    # What memtrace itself writes has the same history, and nothing of PyTorch's is taken for somebody else's.
    snapshot = support.load(support.only_file(tmp_path / "out"))
    assert len(support.history(snapshot)) >= len(ours["trace"][0])
    assert snapshot["memtrace"]["counters"].get("anomalies", 0) == 0
