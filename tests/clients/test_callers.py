"""Who calls decides where a call goes: many callers, callers that go and others that come
where they were, and nobody to call."""

import struct

import client
import pytest
import support

ALONE = {"LD_PRELOAD": str(support.LIBRARY)}


def made(folder, name, text, *options):
    """A library from a few lines of C."""
    folder.mkdir(exist_ok=True)
    source = folder / f"{name.split('.')[0]}.c"
    source.write_text(text)
    return client.compile(source, folder / name, "-shared", "-fPIC", *options)


def nccl(folder, answer, other=99, more=""):
    """Something with NCCL's name, of which `ask` of a library beside it gets the answer. Where
    another one's function begins, this one may have another one."""
    functions = [f"int ncclGroupStart(void) {{ return {answer}; }}\n", f"int unrelated(void) {{ return {other}; }}\n"]
    made(folder, "libnccl.so.2", more + "".join(functions if answer % 2 else functions[::-1]), "-Wl,-soname,libnccl.so.2")
    asks = "int ncclGroupStart(void); int ask(void) { return ncclGroupStart() + 0 * ncclGroupStart(); }"
    return made(folder, "asks.so", asks, f"-L{folder}", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN")


@pytest.mark.parametrize("how", ["plain", "libc", "deep", "meanwhile"])
def test_one_that_comes_where_another_was_is_not_taken_for_it(how, programs, tmp_path):
    """However the first is closed, and however soon the second comes:
    `meanwhile`, before `dlclose` has returned."""
    files = [nccl(tmp_path / "a", 3), nccl(tmp_path / "b", 4)]
    preload = str(support.LIBRARY)
    if how == "meanwhile":
        preload += f":{client.compile(client.PROGRAMS / 'libcloses.c', tmp_path / 'interposes.so', '-DINTERPOSES')}"
    env = {"LD_PRELOAD": preload, "LD_LIBRARY_PATH": str(programs), "MEMTRACE_OUT": str(tmp_path / "out")}
    done = support.must(support.execute([programs / "callers", "go", how, *files], env=env))
    assert done.stdout == "3 4 " * 4 + "\n" and client.complaints(done) == []


def test_many_callers_in_turn(programs, tmp_path):
    """More than a row has lines: who calls is known all the same. Looking it up
    would take a hundred times as long."""
    first = nccl(tmp_path / "a", 3)
    files = [first]
    for i in range(8):
        files.append(tmp_path / "a" / f"asks{i}.so")
        files[-1].write_bytes(first.read_bytes())
    env = {**ALONE, "MEMTRACE_OUT": str(tmp_path / "out")}
    took = {}
    for count in (2, 9):
        done = support.must(support.execute([programs / "callers", "turns", *files[:count]], env=env))
        total, took[count] = map(int, done.stdout.split())
        assert total == 3 * count * (1 + 50 * 20)
    assert took[9] < took[2] + 3000, took


def test_what_is_nowhere_is_said_once_and_found_when_it_comes(programs, tmp_path):
    nccl(tmp_path / "a", 3)
    command = [programs / "callers", "weak", tmp_path / "a" / "libnccl.so.2"]
    done = support.must(support.execute(command, env={**ALONE, "MEMTRACE_OUT": str(tmp_path / "out")}))
    assert done.stdout == f"{1000 * 2 + 500 * 500} 3 3 3\n"
    assert done.stderr.count("as if memtrace were not there") == 2


LAZY = """
#include <unistd.h>
int ncclGroupStart(void);
int ask(void) { return ncclGroupStart(); }
int other(void) { return getppid() > 0; }
"""


def test_what_the_loader_leaves_writable_stays_so(programs, tmp_path):
    """Where what is read-only after binding ends within a page, the loader leaves
    that page alone, and binds on in it."""
    nccl(tmp_path / "a", 3)
    link = [f"-L{tmp_path / 'a'}", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-Wl,-z,lazy,-z,relro", "-fplt"]
    lazy = made(tmp_path / "a", "lazy.so", LAZY, *link)
    data = bytearray(lazy.read_bytes())
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    patched = 0
    for at in range(start, start + count * size, size):
        if struct.unpack_from("<I", data, at)[0] == 0x6474E552:  # PT_GNU_RELRO
            (length,) = struct.unpack_from("<Q", data, at + 40)
            struct.pack_into("<Q", data, at + 40, length + 128)
            patched += 1
    assert patched == 1
    lazy.write_bytes(data)
    command = [programs / "callers", "binds", programs / "libplugin_a.so", lazy]
    done = support.must(support.execute(command, env={**ALONE, "MEMTRACE_OUT": str(tmp_path / "out")}))
    assert done.stdout == "3 1\n"


MIDWAY = """
#include <dlfcn.h>
int ncclGroupStart(void);
static int one(void) { return 1; }
static int (*resolve(void))(void) { return dlsym(RTLD_DEFAULT, "whatever") ? 0 : one; }
__attribute__((ifunc("resolve"), visibility("hidden"))) int chosen(void);
int ask(void) { return ncclGroupStart(); }
int other(void) { return chosen(); }
"""


def test_a_library_that_is_being_opened_is_left_to_the_loader(programs, tmp_path):
    """A look-up while the loader is at work on a library's tables: here
    from one of its own resolvers."""
    nccl(tmp_path / "a", 3)
    link = [f"-L{tmp_path / 'a'}", "-l:libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-Wl,-z,now,-z,relro", "-fno-plt"]
    midway = made(tmp_path / "a", "midway.so", MIDWAY, *link)
    command = [programs / "callers", "binds", programs / "libplugin_a.so", midway]
    assert support.must(support.execute(command, env={})).stdout == "3 1\n"
    done = support.must(support.execute(command, env={**ALONE, "MEMTRACE_OUT": str(tmp_path / "out")}))
    assert done.stdout == "3 1\n"


def test_a_driver_that_is_closed_is_not_asked_for_free_memory(programs, tmp_path):
    """At out of memory the driver is asked how much is free: the one that was there when
    that was asked first must still be."""
    driver = "int cuMemAlloc_v2(void **at, unsigned long size) { return 2; }\n"
    driver += "int cuMemGetInfo_v2(unsigned long *free, unsigned long *all) { *free = *all = 7; return 0; }\n"
    files = [made(tmp_path / "a", "libcuda.so.1", driver), made(tmp_path / "b", "libcuda.so.1", driver + "char large[64 << 20];")]
    command = [programs / "callers", "drivers", *files]
    done = support.must(support.execute(command, env={**ALONE, "MEMTRACE_OUT": str(tmp_path / "out")}))
    assert done.stdout == "2\n2\n"
