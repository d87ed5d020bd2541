"""The library in other people's processes: how it gets there, what it leaves,
forks, threads, shells, odd ends."""

import json
import os
import re

import pytest
import support

ALLOCATE = "import torch; x = torch.zeros(1000, device='cuda')"


def processes(out):
    """The snapshots written at exit, by process."""
    found = {}
    for path in support.files(out):
        about = support.load(path)["memtrace"]
        if about["reason"] == "exit":
            found[about["pid"]] = path
    return found


def virtual_environment(spec="h100"):
    """What `memtrace run` adds to the environment of a program, to do the same by hand."""
    command = ["run", "--virtual", spec, "--record", "off", "--", "env", "-0"]
    printed = support.must(support.memtrace(*command)).stdout
    wanted = dict(line.split("=", 1) for line in printed.split("\0") if "=" in line)
    before = support.environment()
    # Each program is a run of its own, with a card of its own.
    return {k: v for k, v in wanted.items() if before.get(k) != v and k != "MEMTRACE_VIRTUAL_CARDS"}


def test_plain_preload(tmp_path):
    """The way without the command line tool: LD_PRELOAD and MEMTRACE_OUT."""
    env = virtual_environment()
    env["LD_PRELOAD"] = f"{support.LIBRARY}:{env['LD_PRELOAD']}"
    env["MEMTRACE_OUT"] = str(tmp_path)
    support.must(support.execute([support.PYTHON, support.HERE / "scripts" / "mlp.py"], env=env))
    snapshot = support.load(support.only_file(tmp_path))
    assert len(support.history(snapshot)) > 100
    frames = [f for e in support.history(snapshot) for f in e["frames"]]
    assert any(f["filename"].endswith("mlp.py") for f in frames)


@pytest.mark.parametrize(
    "command",
    [
        ["true"],
        ["sh", "-c", "ls / > /dev/null; echo hello"],
        [support.PYTHON, "-c", "print(sum(range(10)))"],
        [support.PYTHON, "-c", "import torch; print(torch.ones(3) + 1)"],
        [support.PYTHON, "-c", "import torch; print(torch.nn.Linear(3, 3)(torch.ones(3)).shape)"],
    ],
)
def test_a_program_without_cuda_is_left_alone(command, tmp_path):
    """No file, no line more, the same output."""
    without = support.must(support.execute(command))
    out = tmp_path / "out"
    done = support.must(support.memtrace("run", "--out", out, "--", *command))
    own = [line for line in done.stderr.splitlines() if not line.startswith("memtrace: ")]
    assert (done.stdout, own) == (without.stdout, without.stderr.splitlines())
    assert not out.exists() or not list(out.iterdir())


def test_names_of_files(tmp_path):
    support.must(support.record([support.PYTHON, "-c", ALLOCATE], tmp_path, env={"RANK": "3", "WORLD_SIZE": "8"}))
    path = support.only_file(tmp_path)
    about = support.load(path)["memtrace"]
    assert re.fullmatch(rf"memtrace-[^/]+-{about['pid']}-rank3-\d+\.pickle", path.name)
    assert (about["rank"], about["world_size"]) == (3, 8)


def test_no_file_is_ever_overwritten(tmp_path):
    for _ in range(3):
        support.must(support.record([support.PYTHON, "-c", ALLOCATE], tmp_path))
    assert len(support.files(tmp_path)) == 3


def test_a_fork_has_its_own_history(tmp_path):
    """Parent and children allocate; a child that never does leaves nothing."""
    code = (
        "import multiprocessing as m, torch\n"
        "def worker(n): torch.zeros(1000 * n, device='cuda')\n"
        "def idle(): pass\n"
        "if __name__ == '__main__':\n"
        "    context = m.get_context('fork')\n"
        "    children = [context.Process(target=worker, args=(i,)) for i in (1, 2)] + [context.Process(target=idle)]\n"
        "    for c in children: c.start()\n"
        "    for c in children: c.join(); assert c.exitcode == 0, c.exitcode\n"
        "    torch.zeros(5000, device='cuda')\n"
    )
    program = tmp_path / "fork.py"
    program.write_text(code)
    out = tmp_path / "out"
    support.must(support.record([support.PYTHON, program], out))
    sizes = {p: [e["size"] for e in support.history(support.load(p)) if e["action"] == "alloc"] for p in support.files(out)}
    assert sorted(sizes.values()) == [[4000], [8000], [20_000]]


def test_spawned_children_are_followed(tmp_path):
    code = (
        "import multiprocessing as m, torch\n"
        "def worker(n): torch.zeros(1000 * n, device='cuda')\n"
        "if __name__ == '__main__':\n"
        "    torch.zeros(5000, device='cuda')\n"
        "    context = m.get_context('spawn')\n"
        "    children = [context.Process(target=worker, args=(i,)) for i in (1, 2)]\n"
        "    for c in children: c.start()\n"
        "    for c in children: c.join(); assert c.exitcode == 0, c.exitcode\n"
    )
    program = tmp_path / "spawn.py"
    program.write_text(code)
    out = tmp_path / "out"
    support.must(support.record([support.PYTHON, program], out))
    sizes = sorted(support.history(support.load(p))[1]["size"] for p in processes(out).values())
    assert sizes == [4000, 8000, 20_000]


def test_shell_scripts_and_their_children(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nset -e\nfor i in 1 2; do '{support.PYTHON}' -c \"{ALLOCATE}\" | cat; done\necho done\n")
    script.chmod(0o755)
    done = support.must(support.record([script], tmp_path / "out"))
    assert done.stdout == "done\n" and len(processes(tmp_path / "out")) == 2


def test_the_data_loader_leaves_one_file(tmp_path):
    """Workers never touch the GPU; one file, of the process that trains."""
    support.must(support.record([support.PYTHON, support.HERE / "scripts" / "dataloader.py"], tmp_path))
    assert "dataloader.py" in json.dumps(support.load(support.only_file(tmp_path))["memtrace"]["command"])


def test_stacks_none_has_no_frames(tmp_path):
    support.must(support.record([support.PYTHON, support.HERE / "scripts" / "mlp.py"], tmp_path, stacks="none"))
    snapshot = support.load(support.only_file(tmp_path))
    entries = support.history(snapshot)
    assert len(entries) > 100 and not any(e.get("frames") for e in entries)


def test_nothing_is_lost_unsaid(tmp_path):
    """More threads than cores, and the counters of the file are clean."""
    script = support.HERE / "scripts" / "python_threads.py"
    support.must(support.record([support.PYTHON, script], tmp_path, stacks="all"))
    about = support.load(support.only_file(tmp_path))["memtrace"]
    counters = about["counters"]
    assert counters.pop("events") == counters.pop("events_kept") > 10_000
    counters.pop("measured")  # questions to the device, not losses
    assert counters and not any(counters.values()), counters
    assert about["stacks"]["refused"] == 0


def test_a_bounded_history_keeps_the_live_blocks_exact(tmp_path):
    """A ring of 1,024 events under a program of 100,000: old events go, what still lives stays."""
    env = {"MEMTRACE_EVENTS": "1024"}
    path, _, done = support.record_alive("random_program.py", tmp_path, "4", env=env)
    snapshot = support.load(path)
    counters = snapshot["memtrace"]["counters"]
    # One event stands for up to two entries: a free that completes at once.
    assert counters["events_retired"] > 60_000 and 500 < len(support.history(snapshot)) <= 2 * 1024
    live = support.live_blocks(snapshot)
    count, size = map(int, re.search(r"live (\d+) blocks of (\d+) bytes", done.stdout).groups())
    assert (len(live), sum(b["requested_size"] for b in live)) == (count, size)
    support.must(support.memtrace("check", path))


def test_an_end_without_exit_handlers(tmp_path):
    """os._exit: the exit code is the program's, and the snapshot is written all the same."""
    code = (
        f"import ctypes, os; {ALLOCATE}\n"
        "assert ctypes.CDLL(None).memtrace_dump(None) == 0\n"
        "os._exit(5)"
    )
    support.must(support.record([support.PYTHON, "-c", code], tmp_path), code=5)
    asked, at_exit = support.files(tmp_path)
    for path, reason in ((asked, "request"), (at_exit, "exit")):
        assert support.load(path)["memtrace"]["reason"] == reason
        support.must(support.memtrace("check", path))


def test_a_program_that_closes_everything(tmp_path):
    """Standard error and the folder are gone: no trouble for the program."""
    code = f"import os, shutil; {ALLOCATE}; shutil.rmtree(os.environ['GONE']); os.close(2); print('still here')"
    out = tmp_path / "out"
    out.mkdir()
    done = support.must(support.record([support.PYTHON, "-c", code], out, env={"GONE": str(out)}))
    assert done.stdout == "still here\n"
