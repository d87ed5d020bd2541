"""Snapshots of a full ring of a million events: in little memory, and beside a
program that goes on as fast as it can."""

import re
import resource
import signal
import subprocess
import time

import hazard
import pytest
import support
import test_kill

RING = 1 << 20
# The history alone would be 64 MiB as it is recorded, and several times that as entries.
LITTLE = 16 << 10  # KiB
ADDRESSES = 128 << 20  # bytes; the command itself and its libraries are some 30 MiB of them


def whole(counters):
    return counters["events"] == counters["events_kept"] + counters["events_retired"] + counters["unpublished"]


@pytest.mark.parametrize(("extension", "rest"), [("pickle", 150), ("json", 150), ("pickle", 0)])
def test_a_dump_takes_little_memory_and_stops_nobody(extension, rest, programs, gpu, tmp_path):
    """The process's memory doesn't grow with its history. Its threads meanwhile make more events
    than the free part of the ring has room for, and nobody waits for the dump's end. Of a program
    that makes half a million events a second, the whole history is there. Of one that does nothing
    else, what it has not overwritten is there."""
    path = tmp_path / f"snapshot.{extension}"
    # JSON is large: a smaller history shows the same.
    ring = RING if extension == "pickle" else RING // 4
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_STACKS": "none", "MEMTRACE_EVENTS": str(ring)}
    # The larger of JSON's two forms, and the one that viewers read.
    env["MEMTRACE_FORMAT"] = "json-expanded" if extension == "json" else extension
    done = support.must(support.execute([programs / "dump", ring, path, rest], env={**env, "MEMTRACE_QUIET": "1"}))
    grew, meanwhile = map(int, re.search(r"grew (-?\d+) KiB, (\d+) pairs", done.stdout).groups())
    assert grew < LITTLE, done.stdout
    assert 2 * meanwhile > ring // 8, done.stdout
    support.must(support.memtrace("check", path))
    counters = hazard.about(path)["counters"]
    assert whole(counters) and counters["anomalies"] == 0 and counters["unpublished"] <= 2, counters
    lost = counters["overwritten"] if rest == 0 else 0
    assert counters["events_kept"] + lost >= ring * 3 // 4, counters
    assert counters["late"] == 0 or rest == 0 and counters["events_kept"] == 0, counters
    names = sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".blackbox"))
    assert names[-1] == path.name and not [n for n in names if n.startswith(".")], "scratch is left"


def within_addresses(*args):
    """Runs the command where no more addresses can be had than its history would take."""
    return subprocess.run(
        [str(support.MEMTRACE), *map(str, args)],
        env=support.environment(),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, ADDRESSES)),
        capture_output=True,
        text=True,
        timeout=support.TIMEOUT,
    )


def test_a_black_box_is_read_in_little_memory(programs, gpu, tmp_path):
    """Of a process that lives and goes on, and after it was killed."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_STACKS": "none"}
    ledger = tmp_path / "ledger"
    client = hazard.start([programs / "client", ledger, "run"], env)
    try:
        end = time.monotonic() + 60
        while not ledger.exists() or test_kill.Acknowledged(ledger).done < 2 * RING:
            assert time.monotonic() < end
            time.sleep(0.01)
        live = support.must(within_addresses("snapshot", client.pid, "--out", tmp_path / "live")).stdout.strip()
    finally:
        client.kill()
        client.communicate()
    assert client.returncode == -signal.SIGKILL
    dead = support.must(within_addresses("recover", tmp_path)).stdout.strip()
    for path in (live, dead):
        support.must(support.memtrace("check", path))
        counters = hazard.about(path)["counters"]
        assert whole(counters) and counters["anomalies"] == 0, counters
    assert counters["events_kept"] > RING * 3 // 4
