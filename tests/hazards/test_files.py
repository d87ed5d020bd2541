"""Files that memtrace makes and finds where others may have put traps, and what the killed
leave behind."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import hazard
import pytest
import support

PACKAGE = Path(__file__).resolve().parents[2] / "python"

# Tells its number, waits for a line, and then takes memory, in vain at first.
WAITS = """
import ctypes, os, sys
print(os.getpid(), flush=True); sys.stdin.readline()
def take(n): return ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(n))
assert take(1 << 50) == 2 and take(1000) == 0
"""
DUMPS = "import ctypes, sys\ntake = lambda n: ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(n))\n"


def mode(path):
    return stat.S_IMODE(Path(path).lstat().st_mode)


def dump(path, tmp_path, env=None):
    """A Python program takes memory and writes a snapshot to the path that it
    was given; what that call returned."""
    code = DUMPS + "assert take(1000) == 0\nprint(ctypes.CDLL(None).memtrace_dump(sys.argv[1].encode()))\n"
    command = [support.PYTHON, "-c", code, path]
    done = support.must(support.record(command, tmp_path / "out", env=env, timeout=60))
    return done.stdout.strip(), done.stderr


def test_snapshots_are_for_their_owner_alone(tmp_path):
    """They hold paths and command lines. Whoever wants them read by others says
    so, and a file keeps what it has."""
    old = os.umask(0o022)
    try:
        code = WAITS.replace("sys.stdin.readline()", "pass")
        command = [support.PYTHON, "-c", code]
        for name, run, env, expect in (
            ("private", (), {}, 0o600),
            ("option", ("--permissions", "umask"), {}, 0o644),
            ("variable", (), {"MEMTRACE_PERMISSIONS": "umask"}, 0o644),
            ("both", ("--permissions", "private"), {"MEMTRACE_PERMISSIONS": "umask"}, 0o600),
        ):
            out = tmp_path / name
            support.must(support.record(command, out, run=run, env=env))
            made = [p for p in out.iterdir() if p.suffix != ".blackbox"]
            assert {p.suffix for p in made} == {".pickle", ".txt"}
            assert {mode(p) for p in made} == {expect}, name
        path = support.files(tmp_path / "private")[0]
        named = tmp_path / "named.pickle"
        support.must(support.memtrace("symbolize", "--out", named, path))
        assert mode(named) == 0o600
        named.chmod(0o640)
        assert dump(named, tmp_path)[0] == "0"
        assert mode(named) == 0o640, "a file that is replaced keeps its permissions"
    finally:
        os.umask(old)


def test_nothing_is_written_through_what_stands_at_a_name(tmp_path):
    """Snapshots, the text about a failure and the link to the black box, in a
    folder where somebody was first."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("precious")
    command = [support.MEMTRACE, "run", "--virtual", "h100", "--out", out, "--", support.PYTHON, "-c", WAITS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=support.environment(), text=True, **pipes) as process:
        pid = int(process.stdout.readline())
        stem = f"memtrace-{os.uname().nodename}-{pid}"
        for name in (f"{stem}-0.pickle", f"{stem}-1-oom.txt", f".{stem}-0.pickle.{pid}.part"):
            (out / name).symlink_to(victim)
        os.mkfifo(out / f"{stem}-2.pickle")
        _, said = process.communicate("\n", timeout=60)
    assert process.returncode == 0, said
    assert victim.read_text() == "precious"
    texts = sorted(p.name for p in out.iterdir() if p.suffix == ".txt" and not p.is_symlink())
    found = sorted(p.name for p in out.iterdir() if p.suffix == ".pickle" and p.is_file() and not p.is_symlink())
    assert found == [f"{stem}-1.pickle", f"{stem}-3.pickle"] and texts == [f"{stem}-1-oom-1.txt"]
    assert not [p.name for p in out.iterdir() if p.name.endswith((".part", ".run")) and not p.is_symlink()]


def test_a_named_file_is_replaced_and_nothing_else(tmp_path):
    target, link, fifo = tmp_path / "target", tmp_path / "link.pickle", tmp_path / "fifo.pickle"
    target.write_text("precious")
    link.symlink_to(target)
    assert dump(link, tmp_path)[0] == "0"
    assert target.read_text() == "precious" and not link.is_symlink()
    support.must(support.memtrace("check", link))
    os.mkfifo(fifo)
    device = tmp_path / "device.pickle"
    device.symlink_to("/dev/null")
    for path in (fifo, device, tmp_path):
        before = mode(path)
        answer, said = dump(path, tmp_path)
        assert answer != "0" and "not a plain file" in said, said
        assert mode(path) == before
        if path != tmp_path:  # into a folder, symbolize writes a file
            done = support.memtrace("symbolize", "--out", path, link, timeout=60)
            assert "not a plain file" in support.must(done, code=2).stderr
    assert device.is_symlink() and fifo.is_fifo()


def killed(programs, gpu, folder):
    """Leaves the black box of a killed process, and a link to it, in this folder."""
    env = {**gpu, "MEMTRACE_OUT": str(folder), "MEMTRACE_STACKS": "none"}
    client = hazard.start([programs / "client", folder / "ledger", "run"], env)
    hazard.wait_for_calls(client, folder / "ledger")
    client.kill()
    client.communicate()
    (folder / "ledger").unlink()
    return client.pid


def test_traps_do_not_hang_recover(programs, gpu, tmp_path):
    """FIFOs, devices, folders, links to them, sparse files of any size: each has a line. Nothing is
    taken away, and what is a black box is recovered."""
    pid = killed(programs, gpu, tmp_path)
    (whole,) = tmp_path.glob("*.blackbox")
    header = whole.read_bytes()[:4096]
    traps = tmp_path / "traps"
    traps.mkdir()
    trap = lambda name: traps / f"memtrace-h-4194304-{name}.blackbox"  # noqa: E731
    os.mkfifo(trap("fifo"))
    trap("folder").mkdir()
    # Never a link to a device that the machine needs: who takes it away, by a fault that this
    # looks for, takes it from everybody.
    device = tmp_path / "zero"
    try:
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        device = "/dev/zero"  # which then can't be taken away either
    trap("device").symlink_to(device)
    trap("link").symlink_to(trap("fifo"))
    (traps / "other").symlink_to(whole.resolve())
    (tmp_path / "text").write_text("somebody's")
    trap("elsewhere").symlink_to(tmp_path / "text")
    trap("loop").symlink_to(trap("loop"))
    (traps / "notes.blackbox").write_bytes(bytes(100))
    with open(traps / "zeros.blackbox", "wb") as file:
        file.truncate(1 << 42)
    with open(trap("sparse"), "wb") as file:
        # As if it had as many events as a number holds.
        words = bytearray(header)
        for word, value in ((2, 4194305), (9, 1 << 41), (32, 1 << 34), (64, 1 << 60), (72, 0)):
            words[8 * word : 8 * word + 8] = value.to_bytes(8, "little")
        file.write(words)
        file.truncate(1 << 42)
    before = sorted(p.name for p in traps.iterdir())
    done = support.memtrace("recover", traps, timeout=60)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert sorted(p.name for p in traps.iterdir()) == before
    for name, words in (("fifo", "FIFO"), ("folder", "folder"), ("device", "link to"), ("zeros", "empty"), ("notes", "empty")):
        assert any(name in line and words in line for line in done.stderr.splitlines()), (name, done.stderr)
    for path in traps.iterdir():
        path.rename(tmp_path / path.name)
    done = support.must(support.memtrace("recover", tmp_path, timeout=60), code=1)
    (path,) = done.stdout.splitlines()
    assert hazard.about(path)["pid"] == pid


def test_what_nobody_finishes_is_cleared_and_the_rest_is_not(programs, gpu, tmp_path):
    """A process is killed in the middle of a snapshot: the next run, or
    recovery, takes away what it has begun."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_STACKS": "none", "MEMTRACE_FORMAT": "json"}
    env |= {"MEMTRACE_SIGNAL": "USR2", "MEMTRACE_QUIET": "1"}
    parts = lambda: [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")]  # noqa: E731
    client = hazard.start([programs / "client", tmp_path / "ledger", "run"], env)
    hazard.wait_for_calls(client, tmp_path / "ledger")
    time.sleep(0.5)
    client.send_signal(signal.SIGUSR2)
    end = time.monotonic() + 60
    while not parts() and time.monotonic() < end:
        pass
    client.kill()
    client.communicate()
    assert len(parts()) == 1, "killed in the middle of it"
    living, other = tmp_path / ".memtrace-alive.part", tmp_path / "mine.part"
    other.write_text("mine")
    with open(living, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        support.must(support.memtrace("run", "--out", tmp_path, "--", "true"))
        assert sorted(parts()) == [living.name, other.name]
    hazard.recover(tmp_path)
    assert parts() == [other.name]


@pytest.mark.parametrize("quiet", ["0", "1"])
@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_the_list_of_a_run_goes(how, quiet, tmp_path):
    end = "" if how == "ends" else "import signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    code = WAITS.replace("sys.stdin.readline()", "pass") + end
    out = tmp_path / "out"
    done = support.record([support.PYTHON, "-c", code], out, env={"MEMTRACE_QUIET": quiet})
    assert done.returncode == (0 if how == "ends" else -signal.SIGKILL)
    lists = [p for p in out.iterdir() if p.name.endswith(".run")]
    assert len(lists) == (how == "is killed" and quiet == "0") and all(mode(p) == 0o600 for p in lists)
    support.must(support.memtrace("run", "--out", out, "--", "true"))
    assert not [p for p in out.iterdir() if p.name.endswith(".run")]


def test_black_boxes_that_are_left_are_listed(programs, gpu, tmp_path):
    """Whose, how large, alive or dead; and the next run says it when the dead hold much memory."""
    folder = Path(gpu["MEMTRACE_BLACKBOX"])
    for old in folder.iterdir():
        old.unlink()
    env = {"MEMTRACE_BLACKBOX": str(folder), "MEMTRACE_OUT": str(tmp_path)}
    nothing = support.memtrace("recover", env={"MEMTRACE_BLACKBOX": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)})
    dead = killed(programs, gpu, tmp_path)
    client = hazard.start([programs / "client", tmp_path / "ledger", "run"], {**gpu, **env})
    try:
        hazard.wait_for_calls(client, tmp_path / "ledger")
        os.mkfifo(folder / "memtrace-x-1-1.blackbox")
        mine = lambda: {  # noqa: E731
            box["pid"]: box
            for box in json.loads(support.must(support.memtrace("recover", "--json", env=env)).stdout)
            if Path(box["path"]).parent == folder
        }
        found = mine()
        assert {pid: box["state"] for pid, box in found.items()} == {dead: "dead", client.pid: "alive"}
        box = found[dead]
        assert box["command"][0].endswith("/client") and 1 << 16 < box["bytes"] < 1 << 28 and box["started_us"] > 1e15
        listed = support.must(support.memtrace("recover", env=env)).stdout
        assert f"process {dead:>7}" in listed and box["path"] in listed and "memtrace recover --out . " in listed
        assert box["path"] not in nothing.stdout
        command = [support.MEMTRACE, "run", "--out", tmp_path, "--", "true"]
        run = lambda **more: subprocess.run(  # noqa: E731
            command, env=support.environment({**env, **more}), capture_output=True, text=True, check=True
        ).stderr
        assert str(folder) not in run()
        with open(box["path"], "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, 300 << 20)
        (line,) = [line for line in run().splitlines() if str(folder) in line]
        assert "1 black box of processes that have died holds 3" in line and "`memtrace recover` lists them" in line
        assert run(MEMTRACE_QUIET="1") == ""
        support.must(support.memtrace("recover", "--out", tmp_path, box["path"]))
        assert set(mine()) == {client.pid} and str(folder) not in run()
    finally:
        client.kill()
        client.communicate()
        for box in folder.iterdir():
            box.unlink()


def test_recover_and_snapshot_ask_who_may_read(programs, gpu, tmp_path):
    """As `run` does: the option, else the variable, else its owner alone."""
    old = os.umask(0o022)
    client = hazard.start([programs / "client", tmp_path / "ledger", "run"], {**gpu, "MEMTRACE_OUT": str(tmp_path / "run")})
    try:
        hazard.wait_for_calls(client, tmp_path / "ledger")
        cases = ((), {}, 0o600), (("--permissions", "umask"), {}, 0o644), ((), {"MEMTRACE_PERMISSIONS": "umask"}, 0o644)
        cases += ((("--permissions", "private"), {"MEMTRACE_PERMISSIONS": "umask"}, 0o600),)
        for option, env, expect in cases:
            done = support.must(support.memtrace("snapshot", "--out", tmp_path / "living", *option, client.pid, env=env))
            assert mode(done.stdout.strip()) == expect, (option, env)
        client.kill()
        client.communicate()
        for option, env, expect in cases:
            command = ["recover", "--keep", "--out", tmp_path / "dead", *option, tmp_path / "run"]
            done = support.must(support.memtrace(*command, env=env))
            assert mode(done.stdout.strip()) == expect, (option, env)
    finally:
        os.umask(old)
        client.kill()
        client.communicate()


@pytest.mark.parametrize("trap", ["nothing", "file", "link", "dangling", "fifo", "folder", "device"])
def test_what_python_writes(trap, tmp_path):
    """`MemoryTracker.save_stats` wrote through links and waited at FIFOs."""
    victim, path = tmp_path / "victim", tmp_path / "stats"
    victim.write_text("precious")
    refused = trap in ("fifo", "folder", "device")
    if trap == "file":
        path.write_text("old")
        path.chmod(0o640)
    elif trap == "fifo":
        os.mkfifo(path)
    elif trap == "folder":
        path.mkdir()
    elif trap != "nothing":
        path.symlink_to({"link": victim, "dangling": tmp_path / "gone", "device": "/dev/null"}[trap])
    code = "import sys; from memtrace import memory_tracker as m; t = m.MemoryTracker.__new__(m.MemoryTracker)\n"
    code += "for name in ('memories_allocated', 'memories_active', 'memories_reserved', '_markers'): setattr(t, name, {})\n"
    code += "t._num_alloc_retries = 0\nt.save_stats(sys.argv[1])"
    done = support.execute([support.PYTHON, "-c", code, path], env={"PYTHONPATH": str(PACKAGE)}, timeout=60)
    assert victim.read_text() == "precious" and not (tmp_path / "gone").exists()
    assert not list(tmp_path.glob(".memtrace-*"))
    if refused:
        assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("not a plain file; name another one")
    else:
        support.must(done)
        assert path.is_file() and not path.is_symlink() and mode(path) == (0o640 if trap == "file" else 0o600)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
SOMEBODY = 65534


def give_away(path):
    os.chown(path, SOMEBODY, SOMEBODY)
    return path


@needs_root
def test_only_one_s_own_files_are_cleared(tmp_path):
    """Root, who may remove all of them, shares a folder with somebody whose
    writers and runs have died, too."""
    tmp_path.chmod(0o1777)
    command = [support.MEMTRACE, "run", "--virtual", "t4", "--out", tmp_path, "--", "sh", "-c", "echo $MEMTRACE_RUN_LIST"]
    name = Path(subprocess.run(command, env=support.environment(), capture_output=True, text=True, check=True).stdout.strip()).name
    left = {}
    for whose in ("mine", "somebody's"):
        head, pid, start, number = name.rsplit("-", 3)
        left[whose] = [tmp_path / f".memtrace-{len(whose):016}.part", tmp_path / f"{head}-{pid}-{start}-{len(whose)}{number[1:]}"]
        for path in left[whose]:
            path.write_text(whose)
    for path in left["somebody's"]:
        give_away(path)
    support.must(support.memtrace("run", "--out", tmp_path, "--", "true"))
    assert [path.exists() for path in left["mine"]] == [False, False]
    assert [path.read_text() for path in left["somebody's"]] == ["somebody's", "somebody's"]


@needs_root
@pytest.mark.parametrize("whose", ["mine", "somebody's"])
def test_lines_are_added_to_one_s_own_file_alone(whose, programs, gpu, tmp_path):
    """The list of a run: who may write into it may write into the terminal of whoever
    reads it, and reads these paths."""
    path = tmp_path / "list.run"
    path.write_text("before\n")
    if whose == "somebody's":
        give_away(path)
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_RUN_PID": str(os.getpid()), "MEMTRACE_RUN_LIST": str(path)}
    support.must(support.execute([programs / "room", "churn", "10", "1"], env=env))
    made = support.only_file(tmp_path / "out")
    before, *added = path.read_text().splitlines()
    assert before == "before" and any(str(made) in line for line in added) == (whose == "mine"), added
    assert whose == "mine" or not added


@needs_root
@pytest.mark.parametrize("whose", ["mine", "somebody's", "a pipe", "a link"])
def test_a_program_without_memtrace_is_noted_in_one_s_own_file_alone(whose, programs, gpu, tmp_path):
    """The same list, where nothing may be allocated: who starts a program without
    memtrace adds a line."""
    path, elsewhere = tmp_path / "list.run", tmp_path / "elsewhere"
    elsewhere.write_text("")
    if whose == "a pipe":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    elif whose == "a link":
        path.symlink_to(elsewhere)
    else:
        path.write_text("")
        if whose == "somebody's":
            give_away(path)
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_RUN_PID": str(os.getpid()), "MEMTRACE_RUN_LIST": str(path)}
    support.must(support.execute([programs / "space", "start"], env=env, cwd=tmp_path))
    if whose == "a pipe":
        try:
            added = os.read(reader, 4096)
        except BlockingIOError:
            added = b""
        os.close(reader)
    else:
        added = path.read_bytes()
    assert (b" x /bin/true\n" in added) == (whose == "mine") and (added == b"") == (whose != "mine"), added


@needs_root
def test_only_one_s_own_list_is_believed_and_removed(tmp_path):
    """At the end of a run somebody else's file has the name of its list: what it
    says is not shown, and it stays."""
    script = "rm -f $MEMTRACE_RUN_LIST; echo '1 w /tmp/theirs' > $MEMTRACE_RUN_LIST; chown 65534 $MEMTRACE_RUN_LIST; echo $MEMTRACE_RUN_LIST"
    command = ["run", "--virtual", "t4", "--out", tmp_path, "--", "sh", "-c", script + "; exit 0"]
    done = support.must(support.memtrace(*command))
    assert Path(done.stdout.strip()).read_text() == "1 w /tmp/theirs\n" and "theirs" not in done.stderr, done
