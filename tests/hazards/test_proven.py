"""A tracer follows no pointer that it has not proven: stacks and
tables that are wrong, gone or too small.

`programs/stacks.c` allocates where a walk has nothing to hold on to; `programs/tables.c` changes
bytes of a library's unwind tables in memory; and programs whose tables were changed in their file
run. None may end otherwise than alone; what could not be proven is cut, with its reason. Runtime is
`programs/libsmall.c`, which needs next to no stack itself.

With --extended 10,000 changed tables and 400 changed programs. Last run
whole on 2026-11-28: 0 deaths.
"""

import random
import struct

import hazard
import pytest
import support

CUT = "[the outer frames could not be read]"


@pytest.fixture
def traced(programs, tmp_path):
    """Runs a program with all stacks; returns what it printed and the
    stacks of its allocations, as names."""

    def run(*command, code=0, snapshot=True, timeout=300):
        env = {
            "LD_PRELOAD": f"{support.LIBRARY}:{programs / 'libsmall.so'}",
            "MEMTRACE_OUT": str(tmp_path / "out"),
            "MEMTRACE_QUIET": "1",
            "MEMTRACE_STACKS": "all",
        }
        done = support.must(support.execute(command, env=env, timeout=timeout), code=code)
        assert done.stdout.startswith("ok "), done.stdout
        if not snapshot:
            return done.stdout.split()[1:], []
        found = support.load(support.only_file(tmp_path / "out"))
        allocations = [e for e in found["device_traces"][0] if e["action"] == "segment_alloc"]
        stacks = [[f["name"] for f in e["frames"]] for e in allocations]
        return [int(n) for n in done.stdout.split()[1:]], stacks

    return run


@pytest.mark.parametrize(
    "what",
    ["jit", "jit_at_end", "jit_last", "jit_fp", "jit_unmapped", "jit_unreadable", "pushing", "restorer_unreadable"],
)
def test_what_cannot_be_proven_is_cut(traced, programs, what):
    """Generated code without tables, also at the edge of what is mapped, or
    gone; a table that forgot a push."""
    (calls, _), stacks = traced(programs / "stacks", what)
    assert len(stacks) == calls
    whole = [names for names in stacks if names[-1] != CUT]
    assert len(whole) == 1, "the first allocation alone is not under it"
    assert any("main" in name for name in whole[0])
    assert all("allocate" in names[0] for names in stacks)


@pytest.mark.parametrize("what", ["registered", "restorer"])
def test_what_can_be_proven_is_whole(traced, programs, what):
    """Generated code whose tables were registered; a signal's frame that is known by its code."""
    (calls, _), stacks = traced(programs / "stacks", what)
    assert len(stacks) == calls
    if what == "registered":
        assert stacks.pop()[-1] == CUT, "once its tables are taken back nobody knows it"
    for names in stacks:
        assert "allocate" in names[0] and any("main" in name for name in names) and names[-1] != CUT


@pytest.mark.parametrize("what", ["astray", "unsteady", "registered_unmapped"])
def test_pointers_that_lead_astray(traced, programs, what):
    """Frames whose table puts them where the program can't read: also
    one that comes and goes meanwhile."""
    (calls, _), stacks = traced(programs / "stacks", what)
    assert len(stacks) == calls and any(names[-1] == CUT for names in stacks)


def test_registered_tables_that_change_or_go(traced, programs):
    """The C runtime's list of tables is as good as the program that filled
    it: it is never asked."""
    (calls, _), stacks = traced(programs / "stacks", "registered_changed")
    assert len(stacks) == calls and all("allocate" in names[0] for names in stacks)


def test_a_handler_interrupts_the_registering_of_tables(traced, programs):
    """Whoever registers holds a lock of the C runtime's."""
    traced(programs / "stacks", "registering", snapshot=False, timeout=60)


def test_tables_that_never_end_cost_a_bounded_time(traced, programs):
    """3,000 frames with 15 endless expressions each: the walk is cut when it has had its share."""
    (calls, milliseconds), stacks = traced(programs / "stacks", "looping")
    assert len(stacks) == calls == 6 and all(names[-1] == CUT for names in stacks[1:])
    assert milliseconds < 500, milliseconds


@pytest.mark.parametrize("size", [1024, 2048, 4096, 8192, 16384])
def test_fibers(traced, programs, size):
    """ucontext, on memory of any kind: between guard pages, in the heap with
    something beside it, on the stack itself."""
    (calls, _), stacks = traced(programs / "stacks", "fiber", size)
    assert len(stacks) == calls == 5
    assert all("allocate" in names[0] and "fiber" in names[1] for names in stacks[1:])


def test_a_hook_takes_little_of_the_programs_stack(traced, programs):
    """What is around a fiber's stack stays as it was. Of the stack itself a hook takes little (704
    bytes when this was written), at its first call as later."""
    alone = support.execute([programs / "stacks", "fiber_in_heap", 4096], env={"LD_PRELOAD": str(programs / "libsmall.so")})
    before = int(support.must(alone).stdout.split()[2])
    for size in (1024, 4096, 16384):
        (_, used), _ = traced(programs / "stacks", "fiber_in_heap", size, snapshot=False)
        assert int(used) - before < 768, (used, before)
    for size in (4096, 16384):
        traced(programs / "stacks", "fiber_on_stack", size, snapshot=False)


@pytest.mark.parametrize("what", ["thread", "thread_on_ours"])
@pytest.mark.parametrize("size", [16384, 20480, 65536])
def test_threads_with_small_stacks(traced, programs, what, size):
    (calls, _), stacks = traced(programs / "stacks", what, size)
    assert len(stacks) == calls == 21
    assert all("allocate" in names[0] and "on_thread" in names[1] and names[-1] != CUT for names in stacks[1:])


def test_signal_stacks(traced, programs, tmp_path):
    """On a stack for signals whatever works without memtrace works with it, but for what a hook
    takes. Where the handler interrupted the program is part of the stack."""
    small = {"LD_PRELOAD": str(programs / "libsmall.so")}
    for size in range(1024, 16 << 10, 512):
        if support.execute([programs / "stacks", "alternate", size], env=small).returncode == 0:
            break
    (calls, _), stacks = traced(programs / "stacks", "alternate", size + 1024)
    assert len(stacks) == calls == 21
    for names in stacks[1:]:
        assert "handler" in names[1] and any("main" in name for name in names) and names[-1] != CUT


def test_libraries_that_go(traced, programs):
    """Protected and unmapped behind the loader's back while their functions are on the stack, and
    again as the snapshot is written."""
    (calls, _), stacks = traced(programs / "stacks", "library", 0, programs / "libframes.so")
    assert len(stacks) == calls


def test_libraries_that_come_and_go(traced, programs, tmp_path):
    """Three threads, each with a library of its own: what one unloads, another asks about."""
    copies = [tmp_path / f"lib{i}.so" for i in range(3)]
    for copy in copies:
        copy.write_bytes((programs / "libframes.so").read_bytes())
    traced(programs / "stacks", "libraries", 0, *copies, snapshot=False)


def test_one_library_where_another_was(traced, programs, tmp_path):
    """An address means another function each time: the one of the library that
    was there when the stack was taken."""
    source = hazard.PROGRAMS / "libframes.c"
    files = [hazard.compile(source, tmp_path / f"lib{i}.so", f"-Dplain=plain{i}") for i in range(3)]
    (calls, same), stacks = traced(programs / "stacks", "in_turn", 0, *files)
    assert len(stacks) == calls == 13 and same == 11
    for n, names in enumerate(stacks[1:]):
        assert f"plain{n % 3}" in names and names[-1] != CUT, (n, names)


def test_changed_tables(traced, programs, pytestconfig, tmp_path):
    """Some bytes of `.eh_frame` and `.eh_frame_hdr`, another few for each seed:
    1,000 times (10,000 with --extended)."""
    count = 10_000 if pytestconfig.getoption("--extended") else 1_000
    progress = tmp_path / "seed"
    try:
        traced(programs / "tables", programs / "libframes.so", progress, 1, count, snapshot=False)
    except AssertionError as error:
        raise AssertionError(f"seed {struct.unpack('<Q', progress.read_bytes())[0]}") from error


def sections(elf):
    """Where the unwind tables are in a file: offset and size."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    text = headers[names][4]
    name = lambda h: elf[text + h[0] : elf.index(b"\0", text + h[0])]  # noqa: E731
    return [(h[4], h[5]) for h in headers if name(h) in (b".eh_frame", b".eh_frame_hdr")]


def test_changed_programs(traced, programs, pytestconfig, tmp_path):
    """The same in a program's own file, from its start on: 40 of them (400 with --extended)."""
    count = 400 if pytestconfig.getoption("--extended") else 40
    original = (programs / "stacks").read_bytes()
    places = sections(original)
    assert len(places) == 2
    for seed in range(count):
        rng, changed = random.Random(seed), bytearray(original)
        for _ in range(rng.randint(1, 12)):
            start, size = rng.choice(places)
            changed[start + rng.randrange(size)] = rng.choice([0, 0x0F, 0x10, 0x16, 0x7F, 0xFF, rng.randrange(256)])
        program = tmp_path / "changed"
        program.write_bytes(changed)
        program.chmod(0o755)
        for what in ("pushing", "fiber", "jit"):
            traced(program, what, 8192, snapshot=False)


def test_tables_in_a_section_that_cannot_be_read(traced, programs, tmp_path):
    """A program whose `.eh_frame` is not mapped where the index says: far
    away, or beyond its end."""
    original = (programs / "stacks").read_bytes()
    index, _ = min(sections(original))
    for distance in (0x7FFF0000, -0x7FFF0000, 0x100000, 0):
        changed = bytearray(original)
        struct.pack_into("<i", changed, index + 4, distance)
        program = tmp_path / "changed"
        program.write_bytes(changed)
        program.chmod(0o755)
        traced(program, "jit", snapshot=False)
