"""When a snapshot is written: at a peak, on a signal, by the clock; and what
nonsense in the environment does."""

import pytest
import support

PREAMBLE = "import os, signal, time, torch\nempty = lambda mib: torch.empty(mib << 20, dtype=torch.uint8, device='cuda')\n"


def recorded(code, out, **env):
    """Runs code with these variables; its snapshots and what it printed."""
    done = support.must(support.record([support.PYTHON, "-c", PREAMBLE + code], out, env=env))
    return [support.load(path) for path in support.files(out)], done


def reasons(snapshots):
    return [s["memtrace"]["reason"] for s in snapshots]


def live_bytes(snapshot):
    return sum(b["requested_size"] for b in support.live_blocks(snapshot))


def test_a_peak(tmp_path):
    """One at each step up that is large enough, with the peak alive in it;
    none on the way down or for less."""
    code = "a = empty(300); time.sleep(0.5); b = empty(50); time.sleep(0.5); c = empty(400); time.sleep(0.5); del a, b, c"
    snapshots, _ = recorded(code, tmp_path, MEMTRACE_PEAK_STEP="200MiB")
    peaks = [live_bytes(s) >> 20 for s in snapshots if s["memtrace"]["reason"] == "peak"]
    assert peaks == [300, 750] and reasons(snapshots)[-1] == "exit"


def test_a_signal(tmp_path):
    """As often as it comes; the program is neither ended nor woken from its work by it."""
    code = (
        "x = empty(7)\n"
        "for _ in range(2): os.kill(os.getpid(), signal.SIGUSR2); time.sleep(0.7)\n"
        "print('went on')"
    )
    snapshots, done = recorded(code, tmp_path, MEMTRACE_SIGNAL="USR2")
    assert reasons(snapshots) == ["signal", "signal", "exit"] and done.stdout == "went on\n"
    assert [live_bytes(s) for s in snapshots[:2]] == [7 << 20] * 2


def test_the_clock(tmp_path):
    snapshots, _ = recorded("x = empty(7); time.sleep(2.6)", tmp_path, MEMTRACE_EVERY="1")
    by_clock = [s for s in snapshots if s["memtrace"]["reason"] == "clock"]
    assert reasons(snapshots).count("exit") == 1 == len(snapshots) - len(by_clock)
    times = [s["memtrace"]["written_us"] for s in by_clock]
    assert len(times) >= 2 and all(b - a > 900_000 for a, b in zip(times, times[1:])), times
    assert 7 << 20 in map(live_bytes, by_clock)


def test_stacks_of_allocations_only(tmp_path):
    snapshots, _ = recorded("x = empty(7); del x", tmp_path, MEMTRACE_CONTEXT="alloc")
    trace = support.history(snapshots[0])
    assert all(e["frames"] for e in trace if e["action"] == "alloc")
    assert [e["action"] for e in trace] == ["segment_alloc", "alloc", "free_requested", "free_completed"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("MEMTRACE_EVENTS", "many"),
        ("MEMTRACE_EVENTS", "99999999999999"),
        ("MEMTRACE_STACKS", "some"),
        ("MEMTRACE_FORMAT", "xml"),
        ("MEMTRACE_SIGNAL", "KILL"),
        ("MEMTRACE_EVERY", "-1"),
        ("MEMTRACE_PEAK_STEP", "a lot"),
        ("MEMTRACE_CONTEXT", "nothing"),
    ],
)
def test_nonsense_is_named_and_does_no_harm(name, value, tmp_path):
    """One line that names the variable; the default is used and the program runs on."""
    code = [support.PYTHON, "-c", PREAMBLE + "x = empty(7); print('fine')"]
    run = ["run", "--virtual", "h100", "--out", tmp_path, "--", *code]
    done = support.must(support.memtrace(*run, env={name: value}))
    said = [line for line in done.stderr.splitlines() if name in line]
    assert done.stdout == "fine\n" and len(said) == 1 and value in said[0], done.stderr
    assert len(support.history(support.load(support.only_file(tmp_path)))) >= 2


def test_a_folder_that_vanishes(tmp_path):
    """Preloaded by hand into a folder that is not there: one line, and the program runs on."""
    import test_life

    env = test_life.virtual_environment()
    env["LD_PRELOAD"] = f"{support.LIBRARY}:{env['LD_PRELOAD']}"
    env["MEMTRACE_OUT"] = str(tmp_path / "not" / "there")
    done = support.must(support.execute([support.PYTHON, "-c", PREAMBLE + "x = empty(7); print('fine')"], env=env))
    said = [line for line in done.stderr.splitlines() if line.startswith("memtrace: ")]
    assert done.stdout == "fine\n" and len(said) == 1 and "not/there" in said[0], done.stderr
