"""A program forks while its other threads are inside memtrace: no child waits for a
thread that isn't there (issue F, A4)."""

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
