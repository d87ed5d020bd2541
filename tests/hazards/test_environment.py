"""What is around a program: sanitizers, another C library, an empty environment,
another root folder, limits that move addresses, valgrind, versions of symbols. None of it may end
the program or change what it prints."""

import os
import resource
import shutil
import subprocess

import hazard
import pytest
import support

COMPILER = os.environ.get("CC", "cc")
SOURCE = hazard.PROGRAMS / "around.c"


def compile(target, *options, compiler=COMPILER, source=SOURCE, why=None):
    """Compiles a program; skips the test where the compiler can't do that."""
    command = [compiler, "-O1", "-D_GNU_SOURCE", "-o", target, source, *options]
    done = support.execute(command)
    if done.returncode != 0 and why:
        pytest.skip(why)
    support.must(done)
    return target


def sizes(out):
    return sorted(hazard.driver_blocks(support.load(support.only_file(out))).values())


@pytest.mark.parametrize("preloaded", [False, True], ids=["linked", "preloaded"])
@pytest.mark.parametrize("name", ["address", "thread"])
def test_a_sanitizers_runtime(name, preloaded, tmp_path):
    """Linked to the program, or preloaded by the user, too: it stays
    first, and the program is recorded."""
    program = compile(tmp_path / "around", f"-fsanitize={name}", *hazard.LINK, why=f"no runtime of -fsanitize={name}")
    runtime = support.execute([COMPILER, f"-print-file-name=lib{name[0]}san.so"]).stdout.strip()
    env = {"LD_PRELOAD": os.path.realpath(runtime)} if preloaded else {}
    env |= {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "report_bugs=0"}
    done = support.record([program, "none"], tmp_path / "out", env=env, stacks="all")
    assert support.must(done).stdout == "ok\n" and sizes(tmp_path / "out") == [1111]


@pytest.mark.parametrize("virtual", ["h100", None])
def test_a_child_with_another_c_library(virtual, programs, tmp_path):
    """musl's loader would take a library for glibc for its own, and end the program."""
    if not shutil.which("musl-gcc"):
        pytest.skip("musl-gcc is not installed")
    source = tmp_path / "child.c"
    source.write_text('#include <stdio.h>\n#include <stdlib.h>\nint main(int n, char **v) { puts("musl"); return n > 1 ? system(v[1]) != 0 : 3; }')
    child = compile(tmp_path / "child", compiler="musl-gcc", source=source)
    # What a child with musl starts is recorded again.
    script = f"'{child}'; echo $?; '{child}' \"'{programs / 'around'}' none\"; echo $?"
    done = support.must(support.record(["sh", "-c", script], tmp_path / "out", spec=virtual, run=("--record", "on")))
    lines = done.stdout.splitlines()
    assert lines[:3] == ["musl", "3", "musl"] and "Error" not in done.stderr and "ERROR" not in done.stderr
    if virtual:
        assert lines[3:] == ["ok", "0"] and sizes(tmp_path / "out") == [1111]


@pytest.mark.parametrize("how", ["cleared", "cleared and filled"])
def test_an_environment_that_was_cleared(programs, tmp_path, how):
    """Before the first call: the snapshot goes where the user said, and the
    card is the one that the user named."""
    done = support.record([programs / "around", how], tmp_path / "out", spec="t4", cwd=tmp_path)
    support.must(done)
    snapshot = support.load(support.only_file(tmp_path / "out"))
    assert snapshot["memtrace"]["virtual"]["profile"] == "t4"


def test_another_root_folder(programs, gpu, tmp_path):
    """Nothing is written into it, and nothing is lost."""
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out")}
    (tmp_path / "out").mkdir()
    done = support.must(support.execute([programs / "around", "jail"], env=env, cwd=tmp_path))
    assert done.stdout == "ok\n" and list((tmp_path / "jail").iterdir()) == []
    said = [line for line in done.stderr.splitlines() if line.startswith("memtrace: ")]
    assert len(said) == 1 and "memtrace recover" in said[0], done.stderr
    (recovered,) = hazard.recover(tmp_path / "out")
    assert sorted(hazard.driver_blocks(support.load(recovered)).values()) == [1111, 2222]


def test_a_stack_without_limit(programs, tmp_path):
    """Libraries have low addresses then, in the middle of where the devices' addresses would be."""
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the stack's limit can't be raised here")
    command = ["sh", "-c", f"ulimit -s unlimited && exec '{programs / 'around'}' none"]
    done = support.must(support.record(command, tmp_path / "out"))
    assert "reserved" not in done.stderr and sizes(tmp_path / "out") == [1111]


def test_valgrind_has_little_to_keep_account_of(programs, tmp_path):
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is not installed")
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))  # noqa: E731
    command = [support.MEMTRACE, "run", "--virtual", "h100", "--record", "off", "--", "valgrind", "-q", programs / "around", "none"]
    done = subprocess.run(
        [str(c) for c in command], env=support.environment(), preexec_fn=limit, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert "under valgrind the addresses of device memory are not reserved" in done.stderr


def test_versions_of_symbols_are_there(tmp_path):
    """Who was linked to NVIDIA's libraries asks for a version of each; the loader
    complains if a stand-in has none."""
    library = tmp_path / "libcudart.so.13"
    (tmp_path / "lib.map").write_text("libcudart.so.13 { global: cudaMalloc; };")
    (tmp_path / "lib.c").write_text("int cudaMalloc(void **at, unsigned long size) { return -1; }")
    shared = ["-shared", "-fPIC", "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={tmp_path / 'lib.map'}"]
    compile(library, *shared, source=tmp_path / "lib.c")
    program = compile(tmp_path / "around", "-Wl,--no-as-needed", library)
    assert b"libcudart.so.13" in program.read_bytes()
    done = support.must(support.record([program, "none"], tmp_path / "out"))
    assert done.stdout == "ok\n" and "no version information" not in done.stderr and sizes(tmp_path / "out") == [1111]
