"""Little room: for the black box, for files, for memory. What is alive stays exact as long as
there is room anywhere. The program never waits for room that doesn't come, and no limit of its own
kills it. What is missing is said."""

import os
import re
import resource
import subprocess

import hazard
import pytest
import support

CALLS, KEEP = 300_000, 3


def mounts():
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_mounts = pytest.mark.skipif(not mounts(), reason="mount namespaces need root")


@pytest.fixture
def room(programs, gpu, tmp_path):
    """Runs the program, with its box in a file system of so many megabytes (none: where it would
    go). Returns how it ended, its snapshots, and how much processor time it took."""

    def run(*arguments, megabytes=None, code=0, virtual=False, runtime=("liblockfree",), **more):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        command = [programs / "room", *map(str, arguments)]
        env = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_STACKS": "none", **more}
        if not virtual:
            env["LD_PRELOAD"] = ":".join(map(str, [support.LIBRARY, *(programs / f"{name}.so" for name in runtime)]))
        if megabytes:
            box = tmp_path / "box"
            box.mkdir(exist_ok=True)
            env["MEMTRACE_BLACKBOX"] = str(box)
            # The box outlives the mount only as a copy, with its holes.
            script = f"mount -t tmpfs -o size={megabytes}m tmpfs '{box}'; \"$@\"; rc=$?; "
            script += f"cp --remove-destination --sparse=always '{box}'/*.blackbox '{out}' 2>/dev/null; exit $rc"
            command = ["unshare", "-m", "bash", "-c", script, "run", *command]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = support.execute(command, env=env, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == code, done
        assert done.stdout.splitlines()[-1:] == ([] if code else ["ok"])
        found = support.files(out)
        if found:
            support.must(support.memtrace("check", *found))
        said = [line for line in done.stderr.splitlines() if "wrote " not in line]
        return said, [support.load(p) for p in found], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, out

    return run


def live(snapshot):
    return len(hazard.driver_blocks(snapshot))


@needs_mounts
@pytest.mark.parametrize("megabytes", [4, 16, 64])
def test_more_is_alive_than_fits(megabytes, room):
    """The set of what is alive is exact, and nobody waits. With a table full of what has gone,
    this took a hundred times as long."""
    _, [plain], least, _ = room("churn", CALLS, KEEP, MEMTRACE_EVENTS="16384")
    said, [small], took, _ = room("churn", CALLS, KEEP, MEMTRACE_EVENTS="16384", megabytes=megabytes)
    assert live(plain) == live(small) == CALLS // KEEP + 1
    counters = small["memtrace"]["counters"]
    assert (counters["anomalies"], counters["live_refused"], counters["live_outside"]) == (0, 0, 0), counters
    assert counters["events_retired"] > 0
    assert took < 4 * least + 1, f"{took:.1f} s of a processor, and {least:.1f} s with room"
    assert len(said) <= (megabytes == 4) and all("MEMTRACE_BLACKBOX" in line for line in said), said


@needs_mounts
def test_a_history_that_does_not_fit_is_said_once(room):
    said, [snapshot], _, _ = room("churn", 100_000, 100, megabytes=8)
    counters = snapshot["memtrace"]["counters"]
    [line] = said
    assert "history" in line and "MEMTRACE_BLACKBOX" in line
    assert 1 << 12 <= counters["events_kept"] <= 1 << 16 and live(snapshot) == 1001


@needs_mounts
def test_what_was_outside_is_missing_after_a_kill_and_said(room, tmp_path):
    said, none, _, out = room("churn", CALLS, 1, "kill", megabytes=6, code=137)
    assert none == [] and sum("killed" in line for line in said) == 1, said
    [path] = hazard.recover(out)
    snapshot = support.load(path)
    counters = snapshot["memtrace"]["counters"]
    assert counters["live_outside"] > 0 and counters["live_outside_bytes"] == 100 * counters["live_outside"]
    assert live(snapshot) + counters["live_outside"] == CALLS + 1
    assert counters["live_refused"] == counters["anomalies"] == 0
    summary = support.must(support.memtrace("summary", path)).stdout
    assert re.search(rf"{counters['live_outside']} live allocations were kept outside", summary), summary


@pytest.mark.parametrize("when", ["close-first", "close-later"])
@pytest.mark.parametrize("megabytes", [None, 24])
def test_every_descriptor_is_closed(when, megabytes, room):
    """Before the first call or after it: the box grows all the same."""
    if megabytes and not mounts():
        pytest.skip("mount namespaces need root")
    _, [snapshot], _, _ = room("churn", 60_000, 3, when, megabytes=megabytes)
    assert live(snapshot) == 20_001
    counters = snapshot["memtrace"]["counters"]
    assert counters["anomalies"] == counters["live_refused"] == 0, counters
    assert counters["events_retired"] == 0 or megabytes and counters["events_kept"] > 1 << 15, counters


MIB = 1 << 20


# What a limit leaves: a snapshot with all of its history or the last of it; only a
# box, from which one is made; neither, which is said; or "either" of those two, as
# it depends on how large a program is.
NO_BOX = "no black box file could be made"
REFUSED = "cannot write a snapshot"
NOTHING = "nothing is recorded"
SAYS = {"said": [NO_BOX, REFUSED], "a box": [REFUSED], "nothing": [NOTHING], "nothing at all": [NO_BOX, NOTHING]}


@pytest.mark.parametrize(
    "name, value, leaves",
    [
        *(("fsize", n, "said") for n in (0, 4096, MIB)),
        *(("fsize", n, what) for n, what in ((8 * MIB, "the last"), (100 * MIB, "all"))),
        *(("as", n * MIB, what) for n, what in ((24, "a box"), (32, "either"))),
        # At 100 MiB it depends on where an arena of 64 MiB of the C library's is placed.
        # There is room for a snapshot or not.
        *(("as", n * MIB, what) for n, what in ((64, "the last"), (100, "either"), (200, "all"), (400, "all"), (1000, "all"))),
        *(("data", n * MIB, what) for n, what in ((4, "nothing"), (8, "nothing"), (24, "a box"), (32, "either"))),
        *(("data", n * MIB, what) for n, what in ((64, "the last"), (200, "all"))),
        *(("nofile", n, what) for n, what in ((0, "said"), (3, "said"), (4, "a box"), (5, "a box"), (8, "all"), (16, "all"))),
        *(("memlock", n, what) for n, what in ((0, "all"), (1 << 16, "nothing at all"))),
    ],
)
def test_limits(name, value, leaves, room):
    """The program ends as it would without us, and soon. It has its snapshot, or
    there is a line that says why not."""
    said, found, _, out = room("limit", name, value, 20_000, MEMTRACE_STACKS="all")
    assert len(said) <= 3 and all(line.startswith("memtrace: ") for line in said), said
    says = [word for word in (NO_BOX, REFUSED, NOTHING) if any(word in line for line in said)]
    if leaves == "either":
        leaves = "the last" if found else "a box"
    assert says == SAYS.get(leaves, []), said
    assert len(found) == (leaves in ("all", "the last"))
    if leaves == "a box":
        found = [support.load(path) for path in hazard.recover(out)]
    for snapshot in found:
        counters = snapshot["memtrace"]["counters"]
        assert live(snapshot) == 2000 and counters["live_refused"] == 0
        is_short = counters["events_kept"] < 38_000
        assert is_short == any("of history fit" in line for line in said) == (leaves != "all" and name != "nofile")
    advised = [line for line in said if "of history fit" in line or NO_BOX in line or REFUSED in line and name == "nofile"]
    assert all(OPTIONS[name] in line and "to a folder" not in line for line in advised), advised


OPTIONS = {"fsize": "ulimit -f", "as": "ulimit -v", "data": "ulimit -d", "nofile": "ulimit -n", "memlock": "ulimit -l"}


@pytest.mark.parametrize("name, value, leaves", [("as", 100 * MIB, "the last"), ("data", 64 * MIB, "the last"), ("as", 1000 * MIB, "all")])
def test_a_limit_of_which_much_is_taken(name, value, leaves, room):
    """What counts is what is left of it. An eighth of the whole was more than that: no
    box could be made."""
    taken = 4 << 30
    said, [snapshot], _, _ = room("limit", name, taken + value, 20_000, 10, taken, MEMTRACE_STACKS="all")
    assert live(snapshot) == 2000
    assert [OPTIONS[name] in line for line in said if "of history fit" in line] == [True] * (leaves == "the last"), said
    assert len(said) == (leaves == "the last"), said


def test_no_thread_of_ours_takes_an_arena(room):
    """The C library reserves 64 MiB of addresses for each thread that takes memory or gives some
    back, if a suitable piece is free. With one thread that happens in one of fifteen runs. Where
    addresses are limited they are the program's."""
    for _ in range(60):
        said, found, _, _ = room("limit", "as", (4 << 30) + 100 * MIB, 20_000, 10, 4 << 30, MEMTRACE_STACKS="all")
        assert len(found) == 1, said


@pytest.mark.parametrize("name, value", [*(("as", n) for n in (50, 60, 70)), *(("data", n) for n in (40, 48, 56))])
def test_more_is_alive_than_a_snapshot_has_memory_for(name, value, room):
    """None is begun, which would end the program. What had no room anywhere is counted."""
    calls = 100_000
    said, found, _, out = room("limit", name, value * MIB, calls, 1, MEMTRACE_STACKS="all")
    assert not found and any(REFUSED in line and "limit on memory" in line for line in said), said
    [path] = hazard.recover(out)
    snapshot = support.load(path)
    counters = snapshot["memtrace"]["counters"]
    # The process may end just between counting one of them and taking it out of the history.
    assert 0 <= live(snapshot) + counters["live_outside"] + counters["live_refused"] - calls <= 1, counters


@pytest.mark.parametrize("allocations", [0, 8192])
def test_memory_that_ends_while_a_snapshot_is_written(allocations, room):
    """Somebody else has taken it: what has been begun goes on in the reserve
    as far as it must, and no further."""
    runtime = ("liblockfree", "libstarve")
    said, found, _, out = room("churn", 10_000, 200, runtime=runtime, STARVE=str(allocations), MEMTRACE_STACKS="all")
    assert not found and any(REFUSED in line and "out of memory" in line for line in said), said
    [path] = hazard.recover(out)
    assert live(support.load(path)) == 51


def test_a_pipe_that_nobody_reads(programs, gpu, tmp_path):
    """What is said goes nowhere, without a signal."""
    read, write = os.pipe()
    os.close(read)
    env = support.environment({**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_EVENTS": "many"})
    done = subprocess.run([programs / "room", "churn", "10", "1"], env=env, stdout=subprocess.PIPE, stderr=write, timeout=60)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"ok\n")
    assert live(support.load(support.only_file(tmp_path))) == 11


def test_a_short_program_has_a_small_box(room, gpu, tmp_path):
    """As large as what it used: this was 21 MB."""
    _, _, _, out = room("churn", 10, 1, "kill", code=-9, MEMTRACE_STACKS="all")
    [box] = out.glob("*.blackbox")
    assert box.stat().st_blocks * 512 < 1.5 * MIB
    [path] = hazard.recover(out)
    assert live(support.load(path)) == 11


@pytest.mark.parametrize("by", ["runtime", "driver"])
def test_a_handler_that_allocates(by, room):
    """A signal interrupts a thread anywhere, also inside the recorder: each allocation of its
    handler's is recorded, or counted as one that is not. Half of the driver's were neither."""
    calls = 2000
    how, more = ((), {}) if by == "runtime" else (("driver",), {"runtime": ("libover", "libunder")})
    _, [snapshot], _, _ = room("handler", calls, *how, MEMTRACE_STACKS="all", **more)
    recorded = sum(size == 7777 for size in hazard.driver_blocks(snapshot).values())
    counters = snapshot["memtrace"]["counters"]
    handled = recorded + counters["interrupted"]
    assert calls <= handled <= calls + 5, (recorded, counters)
    assert recorded > 0.05 * calls and counters["anomalies"] == 0, (recorded, counters)


@pytest.mark.parametrize("stacks", ["none", "all"])
def test_a_handler_inside_a_call_of_the_runtime(stacks, room):
    """The driver call that the runtime makes is part of the program's own call; that of a handler
    is one more, whatever it interrupts."""
    calls = 1000
    _, [snapshot], _, _ = room("inside", calls, MEMTRACE_STACKS=stacks, runtime=("libover", "libunder"))
    blocks = list(hazard.driver_blocks(snapshot).values())
    counters = snapshot["memtrace"]["counters"]
    assert counters["interrupted"] == counters["anomalies"] == 0, counters
    found = {size: blocks.count(size) for size in (7777, 8888, 9999)}
    assert found == {7777: calls // 5, 8888: calls // 5, 9999: 0}, found
    ledger = snapshot["memtrace"]["ledger"]
    assert ledger["host"]["physical"] == ledger["reserved_addresses"] == calls // 5 * (2 << 20), ledger
    # Each round is three calls that take and one that gives back, and two signals come in each.
    assert blocks.count(100) == calls // 8 * 2 and len(blocks) == 2 * (calls // 5) + blocks.count(100)
