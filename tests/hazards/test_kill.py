"""A process that is killed loses nothing: what it held is in the black box, block for block.

Each client (`programs/client.c`) allocates and frees in four threads and notes before and after
each call, in a file of its own, what it holds. Then it ends, at a random moment. For each one
these are checked. Its black box can be read and passes `memtrace check`. The blocks recovered are
those that it had noted, address and size, but for the at most four calls that were under way.
There are as many events as calls returned, and at most four more. No event is missing, none is
torn but those under way, and nothing contradicts anything. There are rings of 1,024, 16,384 and a
million events, with and without stacks, in turn.

With --extended these are 1,000 SIGKILLs, and 100 of each other end. Last run whole on 2026-11-28,
on two busy cores, with all of 1,000 + 500 + 400 processes as they should be, in 26 minutes.
"""

import random
import signal
import struct
import time

import hazard
import pytest
import support

THREADS, SLOTS = 4, 256
EMPTY, ALLOCATING, LIVE, FREEING = range(4)
BATCH = 10


class Acknowledged:
    """What a client said that it holds; see programs/client.c."""

    def __init__(self, path):
        self.live, self.between, self.done = {}, [], 0  # `done`: calls that returned
        count = THREADS * (1 + 3 * SLOTS)
        words = struct.unpack(f"<{count}Q", path.read_bytes() or bytes(8 * count))
        for thread in range(THREADS):
            first = thread * (1 + 3 * SLOTS)
            self.done += words[first]
            for at in range(first + 1, first + 1 + 3 * SLOTS, 3):
                state, addr, size = words[at : at + 3]
                if state == LIVE:
                    self.live[addr] = size
                elif state != EMPTY:
                    self.between.append((state, addr, size))

    def check(self, snapshot):
        """The recovered live set is the acknowledged one; calls in flight
        may have happened or not."""
        assert len(self.between) <= THREADS, "a thread is in one call at a time"
        blocks = hazard.driver_blocks(snapshot)
        missing = {a: s for a, s in self.live.items() if blocks.get(a) != s}
        assert not missing, f"acknowledged and not recovered: {missing}"
        more = {a: s for a, s in blocks.items() if a not in self.live}
        for state, addr, size in self.between:
            if state == FREEING:
                more.pop(addr, None)
            else:
                # The program has not written down the address yet.
                same = [a for a, s in more.items() if s == size and addr in (0, a)]
                if same:
                    more.pop(same[0])
        assert not more, f"recovered, but the program had freed it: {more}"
        counters = snapshot["memtrace"]["counters"]
        # Events of calls that returned are there; each thread may have written one more.
        calls = counters["events"] - counters["measured"]
        assert self.done <= calls <= self.done + THREADS, (self.done, counters)
        assert counters["events"] == counters["events_kept"] + counters["events_retired"] + counters["unpublished"]
        assert counters["unpublished"] <= THREADS
        assert counters["anomalies"] == 0 and counters["live_refused"] == 0, counters
        assert counters["interrupted"] == 0 and counters["live_outside"] == 0, counters


def environments(gpu, out):
    """Large and small rings, with stacks and without, in turn."""
    base = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_QUIET": "1"}
    for i in range(10**6):
        ring = {"MEMTRACE_EVENTS": ("16384", "1024")[i // 2 % 2]} if i % 2 else {}
        yield {**base, **ring, "MEMTRACE_STACKS": ("none", "all", "python")[i % 3]}


def batches(programs, gpu, folder, count, end, seed):
    """Runs clients and ends them, ten at a time; yields the folder of each ten and
    what they acknowledged by process."""
    rng = random.Random(seed)
    for first in range(0, count, BATCH):
        out = folder / f"{first}"
        out.mkdir()
        said = {}
        env = environments(gpu, out)
        for i in range(min(BATCH, count - first)):
            ledger = out / f"ledger-{i}"
            ledger.touch()
            said[end(programs, ledger, next(env), rng)] = ledger
        yield out, {pid: Acknowledged(ledger) for pid, ledger in said.items()}


def wait_for_work(client, ledger):
    """Until a call has returned, so that the clock of the random moment starts there."""
    end = time.monotonic() + 20
    while not Acknowledged(ledger).done:
        assert time.monotonic() < end and client.poll() is None, client.communicate()
        time.sleep(0.001)


def check_batch(out, said):
    """Every client that made an event is recovered and right."""
    paths = hazard.recover(out, code=0 if any(a.done for a in said.values()) else 1)
    snapshots = {}
    for path in paths:
        snapshot = support.load(path)
        about = snapshot["memtrace"]
        assert about["reason"] == "recovered" and about["pid"] not in snapshots
        snapshots[about["pid"]] = snapshot
    for pid, acknowledged in said.items():
        if pid in snapshots:
            acknowledged.check(snapshots[pid])
        else:
            assert acknowledged.done == 0, f"process {pid} left nothing after {acknowledged.done} calls"
    support.must(support.memtrace("check", *paths))
    assert not list(out.glob("*.blackbox")), "a recovered black box is taken away"
    return len(paths)


def test_killed_at_any_moment(programs, gpu, tmp_path, pytestconfig):
    """SIGKILL, 100 times (1,000 with --extended)."""
    count = 1000 if pytestconfig.getoption("--extended") else 100

    def end(programs, ledger, env, rng):
        client = hazard.start([programs / "client", ledger, "run"], env)
        if rng.random() < 0.9:
            wait_for_work(client, ledger)
        time.sleep(rng.expovariate(1 / 0.02))
        client.kill()
        out, err = client.communicate()
        assert client.returncode == -signal.SIGKILL and (out, err) == ("", ""), err
        return client.pid

    recovered = sum(check_batch(*batch) for batch in batches(programs, gpu, tmp_path, count, end, seed=1))
    assert recovered > 0.8 * count


def test_deferred_frees_in_high_pools(gpu, tmp_path, pytestconfig):
    """Frees that wait for events, in pools of any number from 128 on, killed 40 times (1,000
    with --extended). What is recovered of each thread is what its model says, after its last
    event that it has noted or one more."""
    count = 1000 if pytestconfig.getoption("--extended") else 40
    program = support.example("deferred")
    rng = random.Random(3)
    for first in range(0, count, BATCH):
        out = tmp_path / f"{first}"
        out.mkdir()
        said = {}
        for seed in range(first, min(first + BATCH, count)):
            env = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_EVENTS": ("1024", "4096", "65536")[seed % 3]}
            env.pop("LD_PRELOAD")
            ledger = out / f"ledger-{seed}"
            client = hazard.start([program, "run", ledger, seed], env)
            end = time.monotonic() + 60
            while not (ledger.exists() and any(ledger.read_bytes())):
                assert time.monotonic() < end and client.poll() is None, client.communicate()
                time.sleep(0.001)
            time.sleep(rng.expovariate(1 / 0.01))
            client.kill()
            client.communicate()
            said[client.pid] = seed, struct.unpack("<2Q", ledger.read_bytes())
        found = {s["memtrace"]["pid"]: s for s in map(support.load, hazard.recover(out))}
        assert found.keys() == said.keys()
        for pid, (seed, done) in said.items():
            recovered = {}
            for segment in found[pid]["segments"]:
                for block in segment["blocks"]:
                    if block["state"] != "inactive":
                        recovered[block["address"]] = block["state"]
            for thread, n in enumerate(done):
                printed = support.must(support.execute([program, "expect", seed, thread, n])).stdout.splitlines()
                expect = [dict((int(b.split()[0]), b.split()[1]) for b in line.split(",") if b) for line in printed]
                assert len(expect) == 2
                own = {a: s for a, s in recovered.items() if a >> 40 == thread + 1}
                assert own in expect, f"seed {seed}, thread {thread}, after {n} events"
            counters = found[pid]["memtrace"]["counters"]
            assert counters["anomalies"] == 0 and counters["live_refused"] == 0, counters


@pytest.mark.parametrize(
    "how, code",
    [
        ("segv", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
        ("signal", 3),
        ("signal-segv", -signal.SIGSEGV),
        ("signal-kill", -signal.SIGKILL),
    ],
)
def test_other_ends(how, code, programs, gpu, tmp_path, pytestconfig):
    """Faults, and ends in the middle of a snapshot: each 10 times (100 with --extended)."""
    count = 100 if pytestconfig.getoption("--extended") else 10

    def end(programs, ledger, env, rng):
        env["MEMTRACE_SIGNAL"] = "USR2"
        client = hazard.start([programs / "client", ledger, how, rng.randrange(100)], env)
        _, err = client.communicate(timeout=60)
        assert client.returncode == code and err == "", err
        return client.pid

    for out, said in batches(programs, gpu, tmp_path, count, end, seed=2):
        whole = support.files(out)
        assert check_batch(out, said) >= 8
        assert not whole or support.must(support.memtrace("check", *whole))


@pytest.mark.parametrize("how", ["exit", "_exit", "signal-exit", "signal-_exit"])
def test_ends_that_write(how, programs, gpu, tmp_path, pytestconfig):
    """Threads still allocate while the last snapshot is written, also when it must wait for another
    one; nothing is left to recover. Once, or 100 times with --extended."""
    env = environments(gpu, tmp_path)
    for i in range(100 if pytestconfig.getoption("--extended") else 1):
        out = tmp_path / f"{i}"
        client = [programs / "client", tmp_path / f"ledger-{i}", how, "50"]
        env_of_client = {**next(env), "MEMTRACE_OUT": str(out), "MEMTRACE_SIGNAL": "USR2"}
        if how.startswith("signal"):
            env_of_client.setdefault("MEMTRACE_EVENTS", "65536")  # a second's dump is long enough to end in
        support.must(support.execute(client, env=env_of_client), code=3)
        whole = support.files(out)
        assert [hazard.about(p)["reason"] for p in whole][-1] == "exit" and len(whole) <= 1 + how.startswith("signal")
        support.must(support.memtrace("check", *whole))
        assert not list(out.glob("*.blackbox")) and not list(out.glob(".*"))


def test_what_the_device_says_stands_beside_the_ledger_of_that_moment(programs, gpu, tmp_path):
    """A thread asks how much is free while another one takes and gives back. An
    answer counts only where the ledger is that of its moment. What came in between
    was "unexplained"."""
    seen = 0
    for i in range(12):
        out = tmp_path / str(i)
        env = {**gpu, "MEMTRACE_OUT": str(out), "MEMTRACE_STACKS": "none"}
        done = support.execute([programs / "asks", 3000 + 77 * i], env=env)
        assert done.returncode == -signal.SIGKILL, done
        (path,) = hazard.recover(out)
        for device in hazard.about(path)["reconcile"]:
            seen += 1
            assert device["unexplained"] == 0, device
    assert seen, "no answer counted"
