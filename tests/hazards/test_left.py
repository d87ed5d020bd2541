"""Calls that are left otherwise than by their return: by a throw, a cancellation or a jump.

The real call may throw, end its thread or be cancelled, and a signal handler may jump out
of anything. The program sees what it would see without memtrace, and what it does
afterwards is recorded. (A thread that may be cancelled at any instruction must call nothing
but what POSIX lists, which CUDA is not among.)
"""

import shutil
import subprocess

import hazard
import pytest
import support

AFTERWARDS = 7777


@pytest.fixture
def leave(programs, tmp_path):
    """Runs `left`; returns its snapshot."""

    def run(how, count, *, leaves=None, **env):
        out = tmp_path / "out"
        out.mkdir()
        runtime = programs / "libleaves.so"
        common = {"LEAVES": leaves or how, **env}
        alone = support.execute([programs / "left", how, count], env={**common, "LD_PRELOAD": str(runtime)})
        support.must(alone)
        both = {"LD_PRELOAD": f"{support.LIBRARY}:{runtime}", "MEMTRACE_OUT": str(out)}
        done = support.must(support.execute([programs / "left", how, count], env={**common, **both}, timeout=120))
        assert done.stdout == alone.stdout
        return support.load(support.only_file(out))

    return run


def afterwards(snapshot):
    return sum(size == AFTERWARDS for size in hazard.driver_blocks(snapshot).values())


@pytest.mark.parametrize("how", ["cancel", "exit"])
def test_a_thread_that_ends_in_the_real_call(leave, how):
    """Its clean-up handlers run, and it ends with its own result: this was SIGABRT."""
    assert afterwards(leave(how, 50)) == 1000


def test_a_jump_out_of_the_real_call(leave):
    assert afterwards(leave("jump", 100)) == 1000


@pytest.mark.parametrize("stacks", ["none", "all"])
def test_a_jump_out_of_anything(leave, stacks):
    """The thread goes on recording: this ended its record, and the rest was
    said to come from signal handlers."""
    snapshot = leave("alarm", 2000, MEMTRACE_STACKS=stacks)
    assert afterwards(snapshot) == 1000
    assert snapshot["memtrace"]["counters"]["interrupted"] < 2000


def test_an_exception_of_c_plus_plus(programs, tmp_path):
    """Thrown by what is behind us, caught by who calls."""
    if not (compiler := shutil.which("g++")):
        pytest.skip("no C++ compiler")
    (tmp_path / "behind.cc").write_text(
        'extern "C" int cudaMalloc(void **at, unsigned long size) { if (size == 1) throw 7; *at = (void *)0x700000000000; return 0; }\n'
        'extern "C" int cudaFree(void *) { return 0; }\n'
        'extern "C" int cudaGetDevice(int *device) { return *device = 0; }\n'
        'extern "C" int cuInit(unsigned) { return 0; }\n'
        'extern "C" int cuCtxGetDevice(int *device) { return *device = 0; }\n'
        'extern "C" int cuCtxGetCurrent(void **context) { *context = (void *)0x1000; return 0; }\n'
    )
    (tmp_path / "program.cc").write_text(
        'extern "C" int cudaMalloc(void **, unsigned long);\n'
        "int main() { void *at; int caught = 0;\n"
        "  for (int i = 0; i < 100; i++) try { cudaMalloc(&at, 1); } catch (int seven) { caught += seven == 7; }\n"
        f"  cudaMalloc(&at, {AFTERWARDS}); return caught == 100 ? 0 : 1; }}\n"
    )
    library = tmp_path / "libbehind.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "behind.cc"], check=True)
    subprocess.run([compiler, "-o", tmp_path / "program", tmp_path / "program.cc", library], check=True)
    env = {"LD_PRELOAD": f"{support.LIBRARY}:{library}", "MEMTRACE_OUT": str(tmp_path / "out")}
    support.must(support.execute([tmp_path / "program"], env=env))
    assert afterwards(support.load(support.only_file(tmp_path / "out"))) == 1
