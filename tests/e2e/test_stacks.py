"""Stacks equal PyTorch's own, frame for frame, C++ and Python, wherever
memory is asked for and given back.

PyTorch records with `stacks="all"` in the same process; `oracle.py --native` says what is compared.
T13 of the public reports (frames of backward threads are empty) is among it.
"""

import copy
import json
import pickle

import corpus
import oracle
import pytest
import support

torch = pytest.importorskip("torch")
# Older releases write a C++ frame's source line, from debug information,
# and so say nothing of its address.
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
    pytest.skip("PyTorch before 2.15 names C++ frames in another way", allow_module_level=True)

# What is looked at: programs of the corpus, and frames that must be in them.
SITES = {
    "sites": ("through_alloca", "after_longjmp", "work", "sort_of_three", "backward", "on_the_card", "<genexpr>", "tracer"),
    "elementwise": ("<module>",),
    "backward-threads": ("backward", "train"),
    "compiled": ("call", "forward"),
    "dataloader": ("<module>",),
    "checkpointing": ("recompute_fn",),
    "transformer": ("forward",),
    "cuda-graphs": ("<module>",),
    "expandable": ("<module>",),
    "python-threads": ("run",),
    "ddp": ("<module>",),
    "fsdp2": ("<module>",),
}


def both_recorders(name, tmp_path):
    """Both recorders' snapshots of one program of the corpus, and the verdicts."""
    (program,) = [p for p in corpus.compared() if p.name == name]
    keep = tmp_path / "keep"
    keep.mkdir()
    command = program.command(support.PYTHON, support.ORACLE, "--native", "--keep", keep, "--results", keep)
    env = {**program.env, "TORCH_SYMBOLIZE_MODE": "dladdr", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = support.must(support.record(command, tmp_path / "out", spec=program.spec, stacks="all", env=env))
    verdicts = [json.loads(p.read_text()) for p in sorted(keep.glob("verdict-*.json"))]
    assert len(verdicts) == program.ranks, done.stderr
    read = lambda pattern: [pickle.loads(p.read_bytes()) for p in sorted(keep.glob(pattern))]  # noqa: E731
    return verdicts, read("theirs-*"), read("ours-*")


@pytest.mark.parametrize("name", SITES)
def test_equal_frame_for_frame(name, tmp_path):
    verdicts, _, ours = both_recorders(name, tmp_path)
    for verdict in verdicts:
        assert verdict["differences"] == {}
        assert verdict["frames"] > 50 and verdict["native"] > 5 * verdict["entries"] > 200, verdict
    seen = {f["name"] for s in ours for t in s["device_traces"] for e in t for f in e.get("frames", ())}
    missing = set(SITES[name]) - seen
    assert not missing


def test_threads_of_backward_have_stacks(tmp_path):
    """T13: each block that a thread of autograd's allocates has a C++ stack, from
    the thread's start to the operator."""
    _, _, (ours,) = both_recorders("backward-threads", tmp_path)
    threads = 0
    for entry in support.history(ours):
        names = [f["name"] for f in entry["frames"]]
        if entry["action"] == "alloc" and any("Engine::thread_main(" in n for n in names):
            threads += 1
            assert any(n.startswith("at::") for n in names), names
            assert any("libc.so" in f["filename"] for f in entry["frames"][-2:]), entry["frames"][-2:]
    assert threads > 100


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two equal snapshots, to be spoilt."""
    _, (theirs,), (ours,) = both_recorders("elementwise", tmp_path_factory.mktemp("pair"))
    assert oracle.compare(theirs, ours, native=True).differences == {}
    return theirs, ours


def native_at(frames):
    """A C++ frame in the middle that has a name for both."""
    return next(i for i, f in enumerate(frames) if f["name"].startswith("at::_ops::"))


@pytest.mark.parametrize(
    "kind, spoil",
    [
        ("native frames", lambda frames: frames.pop(native_at(frames))),
        ("native frames", lambda frames: frames.pop()),
        ("native frames", lambda frames: frames.insert(0, {**frames[0]})),
        ("native frames", lambda frames: frames[native_at(frames)].update(line=frames[native_at(frames)]["line"] + 1)),
        ("native frames", lambda frames: frames[native_at(frames)].update(name="at::other")),
        ("native frames", lambda frames: frames[native_at(frames)].update(filename="/lib/other.so")),
        ("native frames", lambda frames: frames.reverse()),
        ("frames", lambda frames: frames.remove(next(f for f in frames if f["filename"].endswith(".py")))),
        ("native frames", lambda frames: frames.clear()),
    ],
)
def test_the_oracle_sees_a_wrong_frame(kind, spoil, pair):
    """The verdict can be no."""
    theirs, ours = pair
    ours = copy.deepcopy(ours)
    entry = [e for e in support.history(ours) if e["action"] == "alloc"][20]
    entry["frames"] = [dict(f) for f in entry["frames"]]
    spoil(entry["frames"])
    found = oracle.compare(theirs, ours, native=True).differences
    assert kind in found and found[kind]["count"] == 1, found
