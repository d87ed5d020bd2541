"""How programs begin and end: with closed descriptors, without their main thread, on small stacks.
All is as it would be without memtrace."""

import os
import signal
import subprocess

import hazard
import pytest
import support

SOON = 30
WHATS = ["exit", "_exit", "fork", "dump"]


@pytest.fixture
def both(programs, tmp_path):
    """Runs a program without memtrace and with it; returns both, and the
    folder of what was recorded."""

    def run(*arguments, library="libsmall", code=0, prepare=None, **more):
        out = tmp_path / "out"
        runtime = programs / f"{library}.so"
        plain = {"LD_PRELOAD": str(runtime)}
        recorded = {"LD_PRELOAD": f"{support.LIBRARY}:{runtime}", "MEMTRACE_OUT": str(out), "MEMTRACE_BLACKBOX": str(out)}
        results = []
        for env in (plain, {**recorded, **more}):
            kept = [tmp_path / f"{name}-{len(results)}" for name in ("stdout", "stderr")]
            with kept[0].open("w") as stdout, kept[1].open("w") as stderr:
                done = subprocess.run(
                    [str(programs / "exits"), *(str(a).format(len(results)) for a in arguments)],
                    env=support.environment(env),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    preexec_fn=prepare,
                    timeout=SOON,
                    check=False,
                )
            done.stdout, done.stderr = (path.read_text() for path in kept)
            results.append(done)
            support.must(done, code=code)
        return (*results, out)

    return run


def blocks(path):
    support.must(support.memtrace("check", path))
    return len(hazard.driver_blocks(support.load(path)))


@pytest.mark.parametrize("how, count", [("alone", 10), ("worker", 20), ("detached", 30), ("cancelled", 20)])
def test_the_main_thread_leaves(how, count, both):
    """The C library ends the process with its last thread, and counted our
    background thread, which never ended."""
    plain, recorded, out = both("main-leaves", how)
    assert plain.stdout == recorded.stdout == "handler\n"
    assert blocks(support.only_file(out)) == count


def test_the_main_thread_leaves_on_a_busy_machine(programs, tmp_path):
    """At the end, with no thread left, one that memtrace made to open NVML ended the process in
    the middle of the last snapshot."""
    runtime = programs / "libsmall.so"
    processes = []
    for i in range(48):
        out = str(tmp_path / str(i))
        env = {"LD_PRELOAD": f"{support.LIBRARY}:{runtime}", "MEMTRACE_OUT": out, "MEMTRACE_BLACKBOX": out, "MEMTRACE_QUIET": "1"}
        command = [str(programs / "exits"), "main-leaves", "alone"]
        processes.append(subprocess.Popen(command, env=support.environment(env), stdout=subprocess.DEVNULL))
    assert [process.wait(60) for process in processes] == [0] * 48
    assert [len(support.files(tmp_path / str(i))) for i in range(48)] == [1] * 48


def closing(descriptors):
    def close():
        for descriptor in descriptors:
            os.close(descriptor)

    return close


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_closed_descriptors(which, both, tmp_path):
    """A new descriptor is the lowest free one: the black box was the
    program's input, or got its output."""
    plain, recorded, out = both("closed", f"{tmp_path}/own-{{}}", code=5, prepare=closing(which))
    assert plain.stdout == recorded.stdout
    assert (tmp_path / "own-0").read_bytes() == (tmp_path / "own-1").read_bytes()
    assert [blocks(path) for path in support.files(out)] == [1000, 1000, 2000]


@pytest.mark.parametrize("which", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("record", ["on", "off"])
def test_the_command_leaves_them_closed(record, which, programs, tmp_path):
    """Rust's runtime opens `/dev/null` in their place, and forgets signals
    that are ignored or blocked."""
    look = ["sh", "-c", 'for i in 0 1 2; do [ -e /proc/self/fd/$i ] && echo $i; done; grep -E "SigBlk|SigIgn" /proc/self/status']
    script = tmp_path / "look"
    script.write_text(f"#!/bin/sh\n( {look[2]} ) > $1\n")
    script.chmod(0o755)

    def prepare():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN if which else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        closing(which)()

    def run(*command, to):
        where = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        done = subprocess.run([*command, script, to], env=support.environment(), preexec_fn=prepare, restore_signals=False, **where)
        assert done.returncode == 0
        return to.read_text()

    plain = run(to=tmp_path / "plain")
    assert plain == run(support.MEMTRACE, "run", "--record", record, "--out", tmp_path, "--", to=tmp_path / "run")


def test_a_snapshot_is_written_out_of_the_way(both):
    both("polled")


@pytest.mark.parametrize("text", ["x", "of", "line", "a program's output"])
@pytest.mark.parametrize("at", [0, 4096, 100_000, 64 << 20])
def test_a_black_box_that_somebody_writes_into(at, text, both):
    """What it says is wrong then; the program ends as it would, and soon."""
    _, recorded, _ = both("scribble", at, 0, text, code=5)
    lines = recorded.stderr.splitlines()
    assert len(lines) < 10 and (at > 0 or any("somebody has written into the black box" in line for line in lines)), lines


@pytest.mark.parametrize(
    "where, size, what",
    [
        *((where, size, what) for where, size in (("thread", 16384), ("fiber", 8192), ("signal", 8192)) for what in WHATS),
        ("crash", 8192, "exit"),
        ("crash", 8192, "_exit"),
    ],
)
def test_an_end_on_a_small_stack(where, size, what, both):
    """A snapshot takes more stack than the caller may have."""
    _, recorded, out = both("small", where, size, what, code=5)
    assert {blocks(path) for path in support.files(out)} == ({21, 1} if what == "fork" else {21}), recorded


@pytest.mark.parametrize("size", [4096, 8192])
def test_fibers_on_the_heap(size, both):
    """No guard is below: the heap would be written over."""
    _, _, out = both("heap", size, code=5)
    assert blocks(support.files(out)[-1]) == 201


# Names of functions that take a deep recursion to read.
LONG = [
    "_Z1f" + "P" * 20000 + "i",
    "_Z1fI" + "1XI" * 10000 + "i" + "E" * 10001 + "vv",
    "_Z1f" + "PFv" * 15000 + "v" + "E" * 15000,
    "_R" + "NvC" * 20000 + "1a",
    "_RI" + "RR" * 20000,
    "_Z1fX" + "ps" * 20000 + "E",
    "_Z1f" + "A_" * 20000 + "i",
    "_ZZ" * 10000 + "1fvE1gv",
]


def test_names_that_are_deep(both, programs, tmp_path):
    text = ".text\n"
    for i, name in enumerate(LONG):
        text += f'.globl "{name}"\n.type "{name}",@function\n"{name}": .cfi_startproc\nsub $8,%rsp\n.cfi_def_cfa_offset 16\n'
        text += f'call *%rdi\nadd $8,%rsp\nret\n.cfi_endproc\n.size "{name}",.-"{name}"\n.globl e{i}\ne{i}: jmp "{name}"\n'
    source, library = tmp_path / "long.s", tmp_path / "liblong.so"
    source.write_text(text + '.section .note.GNU-stack,"",@progbits\n')
    support.must(support.execute([os.environ.get("CC", "cc"), "-shared", "-o", library, source]))
    _, _, out = both("long", library, 65536, code=5)
    assert blocks(support.only_file(out)) == len(LONG)
