"""Every way in which a program starts others: each that uses CUDA leaves one
file, which says where it is."""

import os
import re
import signal
import subprocess
from importlib.metadata import version

import pytest
import support

# Whether PyTorch's launcher looks at the GPUs itself; 2.6's does not.
COUNTS_GPUS = tuple(map(int, version("torch").split(".")[:2])) >= (2, 11)

# `take(n)` takes n bytes of the GPU without PyTorch, whose import would take most of the time.
PRELUDE = """
import ctypes, multiprocessing, os, subprocess, sys, time
def take(n):
    at = ctypes.c_void_p()
    assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(at), ctypes.c_size_t(n)) == 0
TAKE = "import ctypes; assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(%d)) == 0"
def leave(pid):
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
def start(context, *sizes):
    context = multiprocessing.get_context(context)
    children = [context.Process(target=take, args=(n,)) for n in sizes] + [context.Process(target=os.getpid)]
    for child in children: child.start()
    for child in children: child.join(); assert child.exitcode == 0
"""

# The way, what the program does, and the sizes that its children take; the parent takes 5000 first.
RECORDED = {
    "exec": ("pid = os.fork()\nif pid == 0: os.execv(sys.executable, [sys.executable, '-c', TAKE % 1000])\nleave(pid)", [1000]),
    "subprocess": ("subprocess.run([sys.executable, '-c', TAKE % 1000], check=True)", [1000]),
    "posix_spawn": ("leave(os.posix_spawn(sys.executable, [sys.executable, '-c', TAKE % 1000], os.environ))", [1000]),
    "shells": (
        "subprocess.run(['sh', '-c', 'for i in 1000 2000; do sh -c \"$1 -c \\'$0\\'\"; done; true' .replace('$0', TAKE % 1000),"
        " '-', sys.executable], check=True)",
        [1000, 1000],
    ),
    "spawn": ("start('spawn', 1000, 2000)", [1000, 2000]),
    "forkserver": ("start('forkserver', 1000, 2000)", [1000, 2000]),
}


def run(tmp_path, body, **options):
    """Runs a program; returns its process, and what each file says of
    itself with the sizes it holds."""
    program = tmp_path / "program.py"
    body = "\n".join("    " + line for line in body.splitlines())
    program.write_text(f"{PRELUDE}\nif __name__ == '__main__':\n{body}\n")
    done = support.must(support.record([support.PYTHON, program], tmp_path / "out", **options))
    found = []
    for path in support.files(tmp_path / "out"):
        snapshot = support.load(path)
        sizes = sorted(b["requested_size"] for b in support.live_blocks(snapshot))
        found.append((sizes, snapshot["memtrace"]))
    assert len({about["pid"] for _, about in found}) == len(found), "one file each"
    return done, found


@pytest.mark.parametrize("way", RECORDED)
def test_children_of_a_process_that_records(way, tmp_path):
    body, sizes = RECORDED[way]
    done, found = run(tmp_path, f"take(5000)\n{body}")
    (parent,) = [about for held, about in found if held == [5000]]
    children = [(held, about) for held, about in found if held != [5000]]
    assert sorted(held for held, _ in children) == [[n] for n in sizes]
    assert parent["recorded_parent"] is None and parent["root"] == parent["pid"]
    for _, about in children:
        assert about["root"] == parent["pid"]
        assert about["recorded_parent"] == {"pid": parent["pid"], "blackbox": parent["blackbox"]}
    assert f"this run wrote {1 + len(sizes)} snapshots:" in done.stderr


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_forked_children_that_are_first(how, tmp_path):
    """A parent that has not used CUDA yet has no record that a child could name."""
    forks = "for n in (1000, 2000):\n    pid = os.fork()\n    if pid == 0:\n        take(n)\n        sys.exit()\n    leave(pid)\n"
    body = forks if how == "os.fork" else "start('fork', 1000, 2000)\n"
    _, found = run(tmp_path, body + "take(5000)")
    by_size = {held[0]: about for held, about in found}
    assert sorted(by_size) == [1000, 2000, 5000]
    for size in (1000, 2000):
        assert by_size[size]["recorded_parent"] is None
        assert by_size[size]["parent"] == by_size[size]["root"] == by_size[5000]["pid"]


def test_a_forked_child_names_the_parent_that_is_gone(tmp_path):
    """The parent records, its child forks another and ends: the
    grandchild's record still names the first."""
    body = (
        "take(5000)\npid = os.fork()\nif pid == 0:\n"
        "    if os.fork(): os._exit(0)\n"
        "    time.sleep(0.2); ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1000)); sys.exit()\n"
        "leave(pid); time.sleep(1)"
    )
    _, found = run(tmp_path, body)
    (parent,) = [about for held, about in found if held == [5000]]
    (child,) = [about for held, about in found if held != [5000]]
    assert child["recorded_parent"] == {"pid": parent["pid"], "blackbox": parent["blackbox"]}
    assert child["parent"] != parent["pid"]


def test_a_pool_of_workers(tmp_path):
    """T37 and T38: as many files as workers, however often one is
    replaced, with the frames of the job."""
    body = (
        "with multiprocessing.get_context('fork').Pool(2, maxtasksperchild=1) as pool:\n"
        "        pool.map(job, range(1, 7), chunksize=1); pool.close(); pool.join()"
    )
    program = tmp_path / "program.py"
    program.write_text(
        f"{PRELUDE}\ndef inner(n): take(1000 * n)\ndef job(n): inner(n)\nif __name__ == '__main__':\n    {body}\n    job(7)\n"
    )
    support.must(support.record([support.PYTHON, program], tmp_path / "out"))
    frames = {}
    for path in support.files(tmp_path / "out"):
        (entry,) = [e for e in support.load(path)["device_traces"][0] if e["action"] == "segment_alloc"]
        names = [f["name"] for f in entry["frames"] if f["filename"].endswith("program.py")]
        frames[entry["size"]] = names
    assert sorted(frames) == [1000 * n for n in range(1, 8)]
    for size, names in frames.items():
        assert names[:3] == ["take", "inner", "job"], (size, names)


def test_torchrun(tmp_path):
    """Ranks under a launcher that only counts GPUs: a file each, with its
    rank, and a list of them at the end."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, torch\n"
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\n"
        "x = torch.empty(1000 * (1 + int(os.environ['RANK'])), dtype=torch.uint8, device='cuda')\n"
        "print('rank', os.environ['RANK'], flush=True)\n"
    )
    launcher = [support.PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = support.must(support.record(launcher, tmp_path / "out", spec="h100*2"))
    found = {}
    for path in support.files(tmp_path / "out"):
        about = support.load(path)["memtrace"]
        found[about["rank"]] = about
        assert f"-rank{about['rank']}-" in path.name and str(path) in done.stderr
    assert sorted(found) == [0, 1]
    for rank, about in found.items():
        assert (about["local_rank"], about["world_size"]) == (rank, 2)
        assert about["root"] == about["parent"]
        assert (about["recorded_parent"] or {}).get("pid") == (about["parent"] if COUNTS_GPUS else None)
    assert done.stderr.rstrip().splitlines()[-3].endswith("this run wrote 2 snapshots:")


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
        {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"},
        {"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8"},
        # A launcher inside another one knows better.
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_ranks_as_launchers_say_them(env, tmp_path):
    _, ((_, about),) = run(tmp_path, "take(5000)", env=env)
    assert (about["rank"], about["local_rank"], about["world_size"]) == (3, 1, 8)


def test_the_end_of_a_run_says_what_was_written(tmp_path):
    """Ten files by name and a count; the list that it comes from is gone."""
    children = "for i in range(12): subprocess.run([sys.executable, '-c', TAKE % 1000], check=True)"
    done, found = run(tmp_path, children)
    assert len(found) == 12
    lines = [line for line in done.stderr.splitlines() if not line.startswith("memtrace: wrote ")]
    assert lines[0] == "memtrace: this run wrote 12 snapshots:"
    assert lines[11:] == ["memtrace:   and 2 more"]
    assert all(os.path.exists(line.split("memtrace:   ")[1]) for line in lines[1:11])
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_a_shell_is_the_root(tmp_path):
    """Shells end by _exit, some in a child of vfork's."""
    take = "import ctypes; ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(1000))"
    script = f"'{support.PYTHON}' -c '{take}'; '{support.PYTHON}' -c '{take}'; exit 3"
    done = support.must(support.record(["sh", "-c", script], tmp_path / "out"), code=3)
    assert done.stderr.splitlines()[2] == "memtrace: this run wrote 2 snapshots:"
    assert len(done.stderr.splitlines()) == 5 and len(support.files(tmp_path / "out")) == 2


def test_one_process_says_it_once(tmp_path):
    done, _ = run(tmp_path, "take(5000)")
    assert len([line for line in done.stderr.splitlines() if "memtrace" in line]) == 1, done.stderr


def test_a_killed_child_is_named(tmp_path):
    """T31: one of several processes is killed; the others end as ever, and
    the end says what became of it."""
    body = (
        "children = [subprocess.Popen([sys.executable, '-c', TAKE % (1000 * i) + '; print(flush=True); input()'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE) for i in range(1, 9)]\n"
        "for c in children: c.stdout.readline()\n"
        "children[3].kill(); print(children[3].pid)\n"
        "began = time.monotonic()\n"
        "for c in children: c.communicate(b'\\n')\n"
        "assert [c.returncode for c in children] == [-9 if i == 3 else 0 for i in range(8)]\n"
        "assert time.monotonic() - began < 60"
    )
    done, found = run(tmp_path, body)
    assert sorted(held for held, _ in found) == [[1000 * i] for i in range(1, 9) if i != 4]
    killed = done.stdout.split()[-1]
    path = re.search(rf"process {killed} was killed; what it did: memtrace recover (\S+)", done.stderr)[1]
    (recovered,) = support.must(support.memtrace("recover", "--out", tmp_path, path)).stdout.splitlines()
    assert [b["requested_size"] for b in support.live_blocks(support.load(recovered))] == [4000]
    assert not [p for p in (tmp_path / "out").iterdir() if p.suffix == ".blackbox" and p.exists()]


def test_a_run_that_is_killed_leaves_no_list_for_ever(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"{PRELUDE}\ntake(5000)\nprint(flush=True)\ntime.sleep(100)\n")
    out = tmp_path / "out"
    command = [support.MEMTRACE, "run", "--virtual", "h100", "--out", out, "--", support.PYTHON, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=support.environment()) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert len([p for p in out.iterdir() if p.name.endswith(".run")]) == 1
    support.must(support.memtrace("recover", out))
    support.must(support.record(["true"], out))
    assert not [p for p in out.iterdir() if p.name.endswith(".run")]
