"""Real PyTorch in trouble: recovered snapshots against its own, the GIL, pools
of workers, the interpreter's end."""

import json
import os
import signal

import hazard
import pytest
import support

pytest.importorskip("torch")

TRAIN = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.Adam(net.parameters())
held = []
for i in range(60):
    optimizer.zero_grad()
    out = net(torch.randn(32, 64, device="cuda"))
    out.sum().backward()
    optimizer.step()
    held.append(torch.empty(1000 * i + 1, device="cuda"))
"""


def run(code, tmp_path, *args, env=None, returncode=0, name="program.py", **options):
    """Runs a Python program under the recorder; returns what it printed,
    and the folder it wrote into."""
    program = tmp_path / name
    program.write_text(code)
    out = tmp_path / "out"
    done = support.record([support.PYTHON, program, *args], out, env=env, **options)
    return support.must(done, code=returncode), out


@pytest.mark.parametrize("events", ["1048576", "1024"])
@pytest.mark.parametrize("stacks", ["all", "python"])
def test_recovered_equals_dumped(stacks, events, tmp_path):
    """The same moment, written by the process and read from its black box:
    segments, history, stacks, settings."""
    code = TRAIN + "import ctypes, os, signal\nassert ctypes.CDLL(None).memtrace_dump(None) == 0\nos.kill(os.getpid(), signal.SIGKILL)\n"
    env = {"MEMTRACE_EVENTS": events, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done, out = run(code, tmp_path, env=env, stacks=stacks, returncode=-signal.SIGKILL)
    own = support.load(support.only_file(out))
    (path,) = hazard.recover(out)
    recovered = support.load(path)
    support.must(support.memtrace("check", path))
    ours, theirs = own.pop("memtrace"), recovered.pop("memtrace")
    assert set(own) == set(recovered)
    wrapped = ours["counters"]["events_retired"] > 0
    assert wrapped == (int(events) < 2000)
    if wrapped:
        # Between the two the background thread may have made more room in the full ring.
        whole, rest = own.pop("device_traces")[0], recovered.pop("device_traces")[0]
        assert len(whole) / 2 < len(rest) <= len(whole) and whole[-len(rest) :] == rest
        for about in (ours, theirs):
            for key in ("events_kept", "events_retired"):
                about["counters"].pop(key)
    for key in own:
        assert own[key] == recovered[key], key
    assert theirs["reason"] == "recovered" and set(theirs) == set(ours)
    assert isinstance(ours["bound_elsewhere"], list) and theirs["bound_elsewhere"] is None
    for key in set(theirs) - {"reason", "written_us", "virtual", "libraries", "cost", "bound_elsewhere"}:
        assert ours[key] == theirs[key], key
    assert theirs["libraries"].items() <= ours["libraries"].items()
    assert "ESTIMATE" in support.must(support.memtrace("summary", path)).stdout


def test_the_gil_is_never_waited_for(programs, tmp_path):
    """T01, T02: a thread that Python doesn't know allocates, while the GIL
    is held by one that waits for it."""
    code = (
        "import ctypes, sys, torch; torch.zeros(1, device='cuda')\n"
        "assert ctypes.PyDLL(sys.argv[1]).wait_for_a_thread_that_allocates() == 0\n"
    )
    _, out = run(code, tmp_path, programs / "libgil.so", stacks="all", timeout=120)
    snapshot = support.load(support.only_file(out))
    (entry,) = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc" and e["size"] == 4321]
    names = [f["name"] for f in entry["frames"]]
    assert "work" in names and not any(f["filename"].endswith(".py") for f in entry["frames"])


def test_workers_of_a_pool(tmp_path):
    """T36, T37, T38: N processes are N files, each with its parent's number
    and the frames of a single process."""
    code = (
        "import multiprocessing as m, os, sys, torch\n"
        "def leaf(n):\n"
        "    return torch.empty(n, dtype=torch.uint8, device='cuda')\n"
        "def job(n):\n"
        "    return leaf(1000 * n).numel()\n"
        "if __name__ == '__main__':\n"
        "    if sys.argv[1] == 'alone':\n"
        "        job(5)\n"
        "    else:\n"
        "        children = [m.get_context(sys.argv[1]).Process(target=job, args=(i,)) for i in range(1, 6)]\n"
        "        for c in children: c.start()\n"
        "        for c in children: c.join(); assert c.exitcode == 0\n"
        "        print(os.getpid())\n"
    )

    def frames(snapshot):
        entry = next(e for e in support.history(snapshot) if e["action"] == "alloc")
        return [(f["name"], f["line"]) for f in entry["frames"] if f["filename"].endswith("program.py")][:2]

    alone, *_ = [run(code, tmp_path, "alone")[1]]
    expect = frames(support.load(support.only_file(alone)))
    assert [name for name, _ in expect] == ["leaf", "job"]
    for method in ("fork", "spawn"):
        folder = tmp_path / method
        folder.mkdir()
        done, out = run(code, folder, method)
        found = [support.load(p) for p in support.files(out)]
        assert len(found) == 5 and {s["memtrace"]["parent"] for s in found} == {int(done.stdout)}
        assert all(frames(s) == expect for s in found)


def test_daemon_threads_at_the_end(tmp_path):
    """They allocate while the interpreter is taken apart under them. PyTorch may not
    survive that (a thread that CPython ends unwinds through functions that must not
    throw); then the black box has it all."""
    code = (
        "import threading, time, torch\n"
        "def work():\n"
        "    while True: torch.empty(1000, device='cuda')\n"
        "for _ in range(4): threading.Thread(target=work, daemon=True).start()\n"
        "time.sleep(0.3); print('end', flush=True)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    plain = support.record([support.PYTHON, program], tmp_path, run=("--record", "off"))
    for i in range(3):
        out = tmp_path / f"out-{i}"
        done = support.record([support.PYTHON, program], out, stacks="all", timeout=120)
        assert (done.returncode, done.stdout) == (plain.returncode, "end\n"), done.stderr
        paths = support.files(out) if done.returncode == 0 else hazard.recover(out)
        assert len(paths) == 1
        support.must(support.memtrace("check", *paths))


def test_output_and_exit_code_are_the_program_s_own(tmp_path):
    """With memtrace and without: the same, to the byte."""
    code = (
        "import sys, torch\n"
        "x = torch.zeros(1000, device='cuda')\n"
        "print('out', x.shape, flush=True); print('err', file=sys.stderr)\n"
        "try:\n    torch.empty(1 << 50, device='cuda')\n"
        "except torch.OutOfMemoryError as e:\n    print(str(e).split('(')[0])\n"
        "raise SystemExit(17)\n"
    )
    env = {"MEMTRACE_QUIET": "1"}
    plain, _ = run(code, tmp_path, env=env, run=("--record", "off"), returncode=17)
    recorded, _ = run(code, tmp_path, env=env, returncode=17)
    strip = lambda text: [line for line in text.splitlines() if "process" not in line.lower()]  # noqa: E731
    assert (plain.stdout, strip(plain.stderr)) == (recorded.stdout, strip(recorded.stderr))


def test_a_killed_training_is_found_by_its_folder(tmp_path):
    """`memtrace recover OUT` after a kill, and a summary of what it prints."""
    code = TRAIN + "import os\nos.kill(os.getpid(), 9)\n"
    _, out = run(code, tmp_path, returncode=-9)
    (path,) = hazard.recover(out)
    summary = json.loads(support.must(support.memtrace("summary", "--json", path)).stdout)
    assert summary["devices"][0]["allocated"]["bytes"] > 0
    assert not list(out.glob("*.blackbox")) and [p.name for p in out.glob("memtrace-*")] == [path.name]
