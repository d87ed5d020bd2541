"""How much of the program's stack a hook takes, wherever its end is, and that what is on a stack
for signals stays."""

import subprocess

import pytest
import support


@pytest.fixture
def run(programs, tmp_path):
    """Runs a program with all stacks; returns the numbers that it printed."""

    def run(*command):
        env = {
            "LD_PRELOAD": f"{support.LIBRARY}:{programs / 'libsmall.so'}",
            "MEMTRACE_OUT": str(tmp_path / "out"),
            "MEMTRACE_STACKS": "all",
        }
        done = support.must(support.execute(command, env=env, timeout=60))
        word, *numbers = done.stdout.split()
        assert word == "ok", done
        return [int(n) for n in numbers]

    return run


def test_a_second_signal_while_a_handlers_hook_works(programs, run):
    """A hook leaves the stack for signals; for the kernel that is free then, and
    the next handler begins at its top."""
    run(programs / "bounds", "second_signal")


def test_no_descriptor_is_needed_to_know_the_stack(programs, run):
    """The bounds of the first thread's stack are not in a file that must
    be opened: hooks stay on it."""
    assert run(programs / "bounds", "without_descriptors") == run(programs / "bounds", "usual")


def test_a_stack_without_a_limit(programs, run):
    """Where the first thread's stack may grow for ever, the heap below it grows
    into what looked like its stack."""
    unlimited = ["bash", "-c", 'ulimit -s unlimited && exec "$@"', "bash"]
    if subprocess.run([*unlimited, "true"], check=False).returncode != 0:
        pytest.skip("the hard limit forbids it")
    alone = support.execute([programs / "stacks", "fiber_in_grown_heap", 4096], env={"LD_PRELOAD": str(programs / "libsmall.so")})
    before = int(support.must(alone).stdout.split()[2])
    for size in (1024, 4096, 16384):
        _, used = run(*unlimited, programs / "stacks", "fiber_in_grown_heap", size)
        assert used - before < 768, (used, before)
