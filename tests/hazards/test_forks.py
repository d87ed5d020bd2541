"""A program forks while its other threads are inside memtrace: no child waits for a
thread that isn't there."""

import pytest
import support


@pytest.mark.parametrize("mode", ["looking", "loading"])
@pytest.mark.parametrize("settings", [{}, {"MEMTRACE_STACKS": "none"}], ids=["usual", "without-stacks"])
def test_no_child_waits_for_a_thread_of_its_parents(settings, mode, programs, tmp_path):
    """Each child makes the same calls as the threads did. The locks that those held were held in it
    for ever, and that of glibc's list of libraries."""
    times = 60 if not settings else 20
    out = tmp_path / "out"
    preload = f"{support.LIBRARY}:{programs / 'libsmall.so'}"
    env = {**settings, "LD_PRELOAD": preload, "MEMTRACE_OUT": str(out), "MEMTRACE_BLACKBOX": str(out)}
    done = support.must(support.execute([programs / "forks", mode, str(times), str(tmp_path)], env=env, cwd=tmp_path, timeout=300))
    assert done.stdout == "ok\n", (done.stdout, done.stderr[-2000:])


def test_a_child_has_nothing_looked_for_that_is_not_loaded(programs, tmp_path):
    """glibc maps its cache of names while it looks for a library. A child that was forked between
    the end of that and its being known dies of the next look-up. The parent looks for NVML, which
    isn't there; no child does, as none loads a library itself."""
    preload = f"{support.LIBRARY}:{programs / 'libsmall.so'}"
    env = {"LD_PRELOAD": preload, "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(tmp_path / "looked"), "MEMTRACE_OUT": str(tmp_path / "out")}
    done = support.must(support.execute([programs / "forks", "loading", "11", str(tmp_path)], env=env, cwd=tmp_path, timeout=120))
    assert done.stdout == "ok\n", (done.stdout, done.stderr[-2000:])
    # A line begins with the number of its process.
    lines = [line for path in tmp_path.glob("looked.*") for line in path.read_text(errors="replace").splitlines()]
    looked = {line.split(":")[0].strip() for line in lines if "find library=libnvidia-ml.so.1" in line}
    assert len(looked) == 1, looked
