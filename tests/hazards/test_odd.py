"""Odd lives of processes: what memtrace must not disturb, and what it must still write down. T
numbers are public reports about other tools, re-imagined as small programs."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import hazard
import pytest
import support
import test_kill

OLD_BLOCKS, PAIRS = 101, 5000
RING = 1 << 20


@pytest.fixture
def odd(programs, gpu, tmp_path):
    """Runs an odd program, recorded; returns what it printed, and its snapshots by process."""

    def run(what, *more, env=None, code=0):
        env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_QUIET": "1", **(env or {})}
        done = support.must(support.execute([programs / "odd", what, *more], env=env, timeout=120), code=code)
        assert done.stdout.splitlines()[-1:] == ["ok"]
        found = [support.load(p) for p in support.files(tmp_path / "out")]
        support.must(support.memtrace("check", *support.files(tmp_path / "out"))) if found else None
        assert not list((tmp_path / "out").glob("*.blackbox"))
        return done, {s["memtrace"]["pid"]: s for s in found}

    return run


def sizes(snapshot):
    return sorted(hazard.driver_blocks(snapshot).values())


def test_a_child_that_is_first(odd):
    """Each has a file of its own, and the child's names its parent."""
    _, found = odd("fork_child_first")
    of = {tuple(sizes(s)): s["memtrace"] for s in found.values()}
    assert sorted(of) == [(1111,), (2222,)]
    assert of[1111,]["parent"] == of[2222,]["pid"]


def test_a_child_begins_empty(odd):
    """T30: nothing of the parent's is charged to the child, in which CUDA refuses to work."""
    _, found = odd("fork_parent_first")
    assert sorted(map(sizes, found.values())) == [[], [2222, 4444]]


def test_a_context_that_is_retained_twice(odd):
    """T30: released once it lives on, and what a child does is not charged to it."""
    _, found = odd("primary_context")
    assert sorted(map(sizes, found.values())) == [[], [2222, 4444]]


def test_children_that_borrow_our_memory(odd):
    """vfork, and what starts programs by it: the child's `_exit` is not the parent's end."""
    _, found = odd("borrowed_memory")
    assert [sizes(s) for s in found.values()] == [[1111, 2222]]


def test_asleep_until_the_first_call(odd):
    """Nothing is started or opened before; then one thread that stays, and the black box."""
    done, _ = odd("asleep")
    before, after, _ = done.stdout.splitlines()
    assert before == "threads 1 files 3" and after.startswith("threads 2 files "), done.stdout


def test_numbers_of_processes_that_come_again(programs, gpu, tmp_path):
    """T37: two processes with one number leave two files, whether they end or are killed."""
    alone = ["unshare", "-p", "-f", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("numbers of their own need root")
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_QUIET": "1"}
    for i in range(3):
        support.must(support.execute([*alone, programs / "odd", "plain"], env=env))
        client = [*alone, programs / "client", tmp_path / f"ledger-{i}", "segv", "20"]
        support.must(support.execute(client, env=env), code=-signal.SIGSEGV)
    # Where another process has that number now: the one that recovers.
    support.must(support.execute([*alone, support.MEMTRACE, "recover", tmp_path]))
    found = [support.load(p)["memtrace"] for p in support.files(tmp_path)]
    assert [about["pid"] for about in found] == [1] * 6
    assert sorted(about["reason"] for about in found) == ["exit"] * 3 + ["recovered"] * 3


def test_a_process_that_becomes_another_program(programs, gpu, tmp_path):
    """exec ends the old program without a word: its black box is
    recovered, though its number lives on."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path)}
    support.must(support.execute([programs / "odd", "exec"], env=env))
    assert sizes(support.load(support.only_file(tmp_path))) == [7777]
    (recovered,) = hazard.recover(tmp_path)
    assert sizes(support.load(recovered)) == [1111]


@pytest.mark.parametrize("what", ["cancel", "destructors", "exit_handlers"])
def test_ends_of_threads(what, odd):
    _, found = odd(what)
    (snapshot,) = found.values()
    assert sizes(snapshot) == [7777]
    assert snapshot["memtrace"]["counters"]["unpublished"] == 0


def test_exit_in_a_thread(odd):
    _, found = odd("exit_in_thread", code=4)
    assert [sizes(s) for s in found.values()] == [[7777]]


def test_a_million_pairs_take_no_more_memory(odd, pytestconfig):
    """T15 (its ten million with --extended). The small ring has wrapped many times."""
    count = 10_000_000 if pytestconfig.getoption("--extended") else 1_000_000
    done, found = odd("pairs", count, env={"MEMTRACE_EVENTS": "16384"})
    assert int(re.search(r"grew (-?\d+) KiB", done.stdout)[1]) < 1024
    (snapshot,) = found.values()
    counters = snapshot["memtrace"]["counters"]
    assert counters["events"] - counters["measured"] == 2 * (count + 200_000)


def test_the_main_thread_is_no_dearer_than_another(odd):
    """T12: the bounds of a stack are asked for once a thread."""
    done, _ = odd("main_thread")
    main, worker = map(int, re.search(r"main (\d+) worker (\d+)", done.stdout).groups())
    assert main < 5 * worker + 5000, done.stdout


def test_blocks_from_before_the_history(odd):
    """T05, T06: what is older than the history is known as it is, and its free is one."""
    _, found = odd("old_blocks", env={"MEMTRACE_EVENTS": "1024"})
    (snapshot,) = found.values()
    assert sizes(snapshot) == [1000] * 100
    trace = snapshot["device_traces"][0]
    assert len(trace) < 5 * 1024
    last = trace[-3:]
    assert [e["action"] for e in last] == ["free_requested", "free_completed", "segment_free"]
    assert {e["size"] for e in last} == {123456}
    counters = snapshot["memtrace"]["counters"]
    assert counters["anomalies"] == 0 and counters["events"] - counters["measured"] == OLD_BLOCKS + 2 * PAIRS + 1


def test_descriptors_that_are_taken_away(odd, tmp_path):
    """The black box's descriptor may become a file of the program's: nothing is done to that."""
    done, found = odd("close_all", tmp_path / "mine")
    assert "its length is 0\n" in done.stdout
    assert [sizes(s) for s in found.values()] == [[1111]]


def test_a_late_library(programs, gpu, tmp_path):
    """T40: loaded when everything runs already, it interposes nothing and harms nothing."""
    env = {**gpu, "LD_PRELOAD": gpu["LD_PRELOAD"].split(":", 1)[1], "MEMTRACE_OUT": str(tmp_path)}
    done = support.must(support.execute([programs / "odd", "late", support.LIBRARY], env=env))
    assert done.stdout == "ok\n" and not list(tmp_path.iterdir())


def test_many_sites_and_much_debug_information(odd, tmp_path):
    """T11: a snapshot of 2,000 stacks takes less than two seconds, because
    debug information is left for later."""
    source, library = tmp_path / "sites.c", tmp_path / "sites.so"
    count = 2000
    text = ["int cudaMalloc(void **, unsigned long);", "#define T(n) struct s##n { int a##n; long b##n[n + 1]; }"]
    for i in range(count):
        # Types and variables of its own, for the debug information; nothing is inlined.
        locals_of = "".join(f"T({i}{j:02}) v{j}; v{j}.a{i}{j:02} = {j}; (void)v{j}; " for j in range(12))
        text.append(f"__attribute__((noinline)) void site_{i}(void) {{ void *at; {locals_of} cudaMalloc(&at, {i + 1}); }}")
    text += ["void all(void) {", *(f"site_{i}();" for i in range(count)), "}"]
    source.write_text("\n".join(text).replace("[n + 1]", "[2]"))
    compiler = os.environ.get("CC", "cc")
    support.must(support.execute([compiler, "-O0", "-g", "-shared", "-fPIC", "-o", library, source]))
    done, _ = odd("many_sites", library)
    took = int(re.search(r"dump (\d+) ms", done.stdout)[1])
    snapshot = support.load(support.files(tmp_path / "out")[0])
    assert snapshot["memtrace"]["reason"] == "request"
    entries = [e for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert [e["frames"][0]["name"] for e in entries] == [f"site_{i}" for i in range(count)]
    assert {e["frames"][0]["filename"] for e in entries} == {str(library)}
    assert took < 2000, f"{took} ms"


@pytest.mark.parametrize("env", [{}, {"DETACHED": "1"}], ids=["waits", "detached"])
def test_a_constructor_with_a_thread(odd, programs, env):
    """T40: a thread wakes the recorder while another one is inside the loader, and holds its lock
    until the thread is done. This waited for ever."""
    _, found = odd("constructor", programs / "libthread.so", env=env)
    (snapshot,) = found.values()
    assert 7777 in sizes(snapshot)


def test_a_deep_library_asks_for_a_name_of_its_own(programs, gpu, tmp_path):
    """A library that binds to itself first gets its own function, also by
    name: this was NVIDIA's."""
    source, library = tmp_path / "own.c", tmp_path / "libown.so"
    source.write_text(
        "#include <dlfcn.h>\n#include <stddef.h>\n"
        "int cudaMalloc(void **at, size_t size) { return 1037; }\n"
        'int ask(void) { int (*own)(void **, size_t) = dlsym(RTLD_DEFAULT, "cudaMalloc"); void *at; return own(&at, 1000); }\n'
    )
    compiler = os.environ.get("CC", "cc")
    support.must(support.execute([compiler, "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", library, source, "-ldl"]))
    code = f"import ctypes, os; print(ctypes.CDLL({str(library)!r}, mode=os.RTLD_NOW | os.RTLD_DEEPBIND).ask())"
    alone = support.must(support.execute([support.PYTHON, "-S", "-c", code]))
    done = support.must(support.execute([support.PYTHON, "-S", "-c", code], env={**gpu, "MEMTRACE_OUT": str(tmp_path / "out")}))
    assert done.stdout == alone.stdout == "1037\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", [True, False])
def test_another_interposer(first, odd, programs, gpu):
    """T35: before or after us in LD_PRELOAD; each sees every call."""
    ours, rest = gpu["LD_PRELOAD"].split(":", 1)
    other = str(programs / "libother.so")
    preload = [other, ours] if first else [ours, other]
    done, found = odd("plain", env={"LD_PRELOAD": ":".join([*preload, rest])})
    assert done.stderr == "other: 1\n"
    assert [sizes(s) for s in found.values()] == [[7777]]


def test_programs_without_cuda(programs, tmp_path):
    """T33, T34: no CUDA on the machine, a child: nothing is missing,
    nothing is started, nothing is opened."""
    code = "import os; print(len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
    command = ["sh", "-c", f"'{sys.executable}' -c \"{code}\"; exit 7"]
    env = {"LD_PRELOAD": str(support.LIBRARY), "MEMTRACE_OUT": str(tmp_path)}
    plain, preloaded = (support.must(support.execute(command, env=e), code=7) for e in ({}, env))
    assert (plain.stdout, plain.stderr) == (preloaded.stdout, preloaded.stderr) and not list(tmp_path.iterdir())
    needed = subprocess.run(["ldd", support.LIBRARY], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"cuda|nvidia|not found", needed), needed


def test_one_of_eight_is_killed(programs, gpu, tmp_path):
    """T31: nothing is shared between processes, so the others don't notice."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_QUIET": "1"}
    victim = hazard.start([programs / "client", tmp_path / "ledger", "run"], env)
    others = [hazard.start([programs / "odd", "cancel"], env) for _ in range(7)]
    time.sleep(0.05)
    victim.kill()
    for other in others:
        out, err = other.communicate(timeout=60)
        assert (other.returncode, out, err) == (0, "ok\n", "")
    victim.communicate()
    assert len(support.files(tmp_path)) == 7


# The output folder and the values of variables.


def test_a_folder_that_cannot_be_written(programs, gpu, tmp_path):
    """One line that says what to change; the program runs on, and nothing recorded is lost."""
    out = tmp_path / "a file"
    out.write_text("")
    env = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_BLACKBOX": str(tmp_path / "box")}
    done = support.must(support.execute([programs / "odd", "plain"], env=env))
    assert done.stdout == "ok\n"
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and "MEMTRACE_OUT" in lines[0], done.stderr
    (recovered,) = hazard.recover(tmp_path / "box", "--out", tmp_path)
    assert sizes(support.load(recovered)) == [7777]


def test_a_full_disk(programs, gpu, tmp_path):
    """A file system with room for the start of the history: one line, a smaller ring, no SIGBUS."""
    small = tmp_path / "small"
    small.mkdir()
    out = tmp_path / "out"
    script = f"mount -t tmpfs -o size=24m tmpfs '{small}' && exec '{programs / 'client'}' '{tmp_path / 'ledger'}' exit 2000"
    command = ["unshare", "-m", "sh", "-c", script]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces need root")
    env = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_BLACKBOX": str(small), "MEMTRACE_STACKS": "none"}
    done = support.must(support.execute(command, env=env), code=3)
    said = [line for line in done.stderr.splitlines() if "wrote " not in line]
    assert len(said) == 1 and "MEMTRACE_BLACKBOX" in said[0], done.stderr
    counters = hazard.about(support.only_file(out))["counters"]
    assert counters["events_retired"] > 0 and counters["live_refused"] == 0 and counters["anomalies"] == 0


def test_no_room_at_all(programs, gpu, tmp_path):
    """Not even the start fits: plain memory, one line."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces need root")
    script = f"mount -t tmpfs -o size=256k tmpfs '{small}' && exec '{programs / 'odd'}' plain"
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_BLACKBOX": str(small)}
    done = support.must(support.execute(["unshare", "-m", "sh", "-c", script], env=env))
    said = [line for line in done.stderr.splitlines() if "wrote " not in line]
    assert len(said) == 1 and "MEMTRACE_BLACKBOX" in said[0], done.stderr
    assert sizes(support.load(support.only_file(tmp_path / "out"))) == [7777]


@pytest.mark.parametrize(
    "name, value",
    [
        ("MEMTRACE_EVENTS", "many"),
        ("MEMTRACE_EVENTS", "99999999999999999999"),
        ("MEMTRACE_STACKS", "some"),
        ("MEMTRACE_FORMAT", "xml"),
        ("MEMTRACE_SIGNAL", "KILL"),
        ("MEMTRACE_EVERY", "-1"),
        ("MEMTRACE_PEAK_STEP", "lots"),
        ("MEMTRACE_CONTEXT", "none"),
    ],
)
def test_absurd_values(name, value, odd):
    done, found = odd("plain", env={name: value})
    assert len(done.stderr.splitlines()) == 1 and f"{name}={value}" in done.stderr, done.stderr
    assert [sizes(s) for s in found.values()] == [[7777]]


@pytest.mark.parametrize(
    "name, said",
    [("MEMTRACE_STACK", "did you mean MEMTRACE_STACKS?"), ("MEMTRACE_BANANA", "lists those that are"), ("MEMTRACE_TEST_WALKS", None)],
)
def test_absurd_names(name, said, odd):
    """A variable that nobody reads: one line, and the run is as ever."""
    done, found = odd("plain", env={name: "none"})
    lines = done.stderr.splitlines()
    assert len(lines) == bool(said) and all(name in line and line.endswith(said) for line in lines), done.stderr
    assert [sizes(s) for s in found.values()] == [[7777]]


# From outside.


def test_a_snapshot_of_a_running_process(programs, gpu, tmp_path):
    """Taken while four threads allocate as fast as they can, some million calls a second,
    long after their ring is full. The process is not stopped, and its black box stays.
    What the history lacks is counted."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_STACKS": "none", "MEMTRACE_EVENTS": str(RING)}
    ledger = tmp_path / "ledger"
    client = hazard.start([programs / "client", ledger, "run"], env)
    try:
        end = time.monotonic() + 60
        while not ledger.exists() or test_kill.Acknowledged(ledger).done < 2 * RING:
            assert time.monotonic() < end
            time.sleep(0.01)
        for unlink in (False, True):
            if unlink:
                os.unlink(os.path.realpath(next(tmp_path.glob("*.blackbox"))))
            done = support.must(support.memtrace("snapshot", client.pid, "--out", tmp_path))
            path = done.stdout.strip()
            snapshot = support.load(path)
            about = snapshot["memtrace"]
            assert (about["pid"], about["reason"]) == (client.pid, "snapshot")
            counters = about["counters"]
            assert counters["anomalies"] == 0 and counters["unpublished"] <= 4, about
            assert counters["events"] == counters["events_kept"] + counters["events_retired"] + counters["unpublished"]
            assert counters["events"] >= 2 * RING and counters["events_kept"] <= RING
            assert len(done.stderr.splitlines()) == (counters["overwritten"] > 0), done.stderr
            assert len(hazard.driver_blocks(snapshot)) <= 4 * 256 + 4
            support.must(support.memtrace("check", path))
            assert client.poll() is None
    finally:
        client.kill()
        client.communicate()


def test_the_living_are_not_recovered(programs, gpu, tmp_path):
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path)}
    client = hazard.start([programs / "client", tmp_path / "ledger", "run"], env)
    try:
        hazard.wait_for_calls(client, tmp_path / "ledger")
        done = support.must(support.memtrace("recover", tmp_path), code=1)
        assert done.stdout == "" and f"memtrace snapshot {client.pid}" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        # Nor by another path to the same file; a copy under the same name is nobody's.
        box = next(tmp_path.glob("*.blackbox")).resolve()
        with tempfile.TemporaryDirectory(dir=box.parent) as other:
            os.link(box, f"{other}/{box.name}")
            done = support.must(support.memtrace("recover", other), code=1)
            assert done.stdout == "" and f"memtrace snapshot {client.pid}" in done.stderr
        copied = tmp_path / "copied"
        copied.mkdir()
        subprocess.run(["cp", "--sparse=always", box, copied], check=True)
        done = support.must(support.memtrace("recover", copied))
        assert len(done.stdout.splitlines()) == 1 and list(copied.glob("*.blackbox")) == []
    finally:
        client.kill()
        client.communicate()
    hazard.recover(tmp_path)


CONTAINER = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def containers():
    try:
        return subprocess.run([*CONTAINER, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not containers(), reason="this user may make no process namespace")
def test_in_a_container_a_process_has_another_number(programs, gpu, tmp_path):
    """There the program is process 1, which here is somebody else."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_EVENTS": "16384", "MEMTRACE_STACKS": "none"}
    client = hazard.start([*CONTAINER, programs / "client", tmp_path / "ledger", "run"], env)
    try:
        hazard.wait_for_calls(client, tmp_path / "ledger")
        done = support.must(support.memtrace("recover", tmp_path), code=1)
        # Its number here is not that of the command that made the container.
        [pid] = re.findall(r"process (\d+) is alive and writes it; use `memtrace snapshot \1`", done.stderr)
        assert done.stdout == "" and int(pid) not in (1, client.pid)
        written = support.must(support.memtrace("snapshot", pid, "--out", tmp_path / "live")).stdout.strip()
        assert hazard.about(written)["pid"] == 1
    finally:
        client.kill()
        client.communicate()
    # Dead: the snapshot is written, and what can't be known to be dead is kept.
    deadline = time.monotonic() + 30
    while (done := support.memtrace("recover", tmp_path)).stdout == "" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert hazard.about(done.stdout.strip())["pid"] == 1
    assert "kept, since it was written in another container" in done.stderr
    [box] = tmp_path.glob("*.blackbox")
    box.resolve().unlink()


def test_processes_without_a_black_box(tmp_path):
    for pid, words in ((os.getpid(), "not recorded"), (2**31 - 7, "no process")):
        done = support.must(support.memtrace("snapshot", pid), code=2)
        assert len(done.stderr.splitlines()) == 1 and words in done.stderr


def test_files_that_are_no_black_box(programs, gpu, tmp_path):
    """Nonsense, another version, cut short: one clear line each, and nothing is taken away."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path)}
    client = hazard.start([programs / "client", tmp_path / "ledger", "run"], env)
    hazard.wait_for_calls(client, tmp_path / "ledger")
    client.kill()
    client.communicate()
    whole = next(tmp_path.glob("*.blackbox")).read_bytes()
    bad = tmp_path / "bad"
    bad.mkdir()
    for name, content, words in (
        ("nonsense", b"hello" * 2000, "not a memtrace black box"),
        ("version", whole[:8] + b"\x07" + whole[9 : 1 << 20], "another version"),
        ("cut", whole[: 1 << 17], "was the file cut?"),
        ("header", whole[:100], "cut short"),
        ("empty", b"", "the black box is empty"),
    ):
        path = bad / f"{name}.blackbox"
        path.write_bytes(content)
        done = support.must(support.memtrace("recover", path), code=2)
        assert len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr
        assert path.exists()
    (bad / "good.blackbox").write_bytes(whole)
    done = support.must(support.memtrace("recover", bad, "--keep"), code=1)
    assert len(done.stdout.splitlines()) == 1 and len(done.stderr.splitlines()) == 5
    hazard.recover(tmp_path)
