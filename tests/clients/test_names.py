"""Functions of CUDA's names that aren't CUDA's. A caller gets what the loader would have given
without memtrace, and what doesn't reach CUDA is no event."""

import client
import pytest
import support


def same(command, programs, env, out):
    """Runs a program with memtrace and without; returns what it printed, which is the
    same, and the run with memtrace."""
    env = {**env, "LD_LIBRARY_PATH": f"{programs}:{env.get('LD_LIBRARY_PATH', '')}", "MEMTRACE_OUT": str(out)}
    preload = env["LD_PRELOAD"].split(":")
    others = ":".join(p for p in preload if p != str(support.LIBRARY))
    without = support.execute(command, env={**env, "LD_PRELOAD": others})
    done = support.execute(command, env=env)
    # What stands for a function of CUDA's is ours.
    assert done.stdout.replace("libmemtrace.so", "libcuda.so.1") == without.stdout
    assert done.returncode == without.returncode
    return support.must(without).stdout, done


def alone(command, programs, out):
    """The same on a machine without CUDA: nothing that these programs call
    is CUDA's, so nothing is recorded."""
    printed, done = same(command, programs, {"LD_PRELOAD": str(support.LIBRARY)}, out)
    assert done.stderr == "" and not out.exists()
    return printed


@pytest.mark.parametrize("more", [[], ["deep"]], ids=["plain", "deep"])
@pytest.mark.parametrize("how", ["lazy", "now"])
def test_two_plugins_are_each_their_own(how, more, programs, tmp_path):
    """By handle, by symbol, by a jump at a function's end, by a table; with arguments
    in any register and on the stack."""
    env = {"LD_BIND_NOW": "1"} if how == "now" else {}
    printed = alone(["env", *(f"{k}={v}" for k, v in env.items()), programs / "names", "plugins", *more], programs, tmp_path / "out")
    a = "a: by name 101, by a table 102, jumps 104 calls 360 others 200.5"
    b = "b: by name 20001, by a table 20002, jumps 20004 calls 60060 others 40000.5"
    assert printed.splitlines()[:4] == [a, b] * 2
    assert "a's cuMemAlloc_v2: libplugin_a.so\n" in printed
    assert "default cuMemAlloc_v2: none, as dlerror says\nnext" not in printed and "next cudaMalloc: none, as dlerror says\n" in printed


def test_one_that_is_there_for_everybody(programs, tmp_path):
    printed = alone([programs / "names", "global"], programs, tmp_path / "out")
    assert "default cuMemAlloc_v2: libplugin_a.so\n" in printed and "next ncclGroupStart: libplugin_a.so\n" in printed


def test_one_that_the_program_needs(programs, tmp_path):
    """Linked to the program, or preloaded behind memtrace: called through memtrace's
    symbol, without harm to any register."""
    source = tmp_path / "uses.c"
    source.write_text(
        "#include <stdio.h>\ndouble cuMemAlloc_v2(double, double, const char *); double calls(void), jumps(void);\n"
        'int main(void) { for (int i = 0; i < 3; i++) printf("%g %g %g\\n", cuMemAlloc_v2(1, 2, "D"), calls(), jumps()); return 0; }'
    )
    program = client.compile(source, tmp_path / "uses", f"-L{programs}", "-l:libplugin_a.so", f"-Wl,-rpath,{programs}")
    assert alone([program], programs, tmp_path / "out") == "105 360 104\n" * 3
    env = {"LD_PRELOAD": f"{support.LIBRARY}:{programs / 'libplugin_a.so'}"}
    printed, _ = same([programs / "names", "plugins"], programs, env, tmp_path / "out")
    assert printed.startswith("a: by name 101, by a table 102, jumps 104") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["needed", "preloaded"])
def test_one_that_also_asks_for_functions_by_name(place, programs, tmp_path):
    """There for everybody, it would stand for CUDA's if it asked for this
    function; it asks for others."""
    source = tmp_path / "asks.c"
    asks = 'void *asks(void) { return dlsym(RTLD_DEFAULT, "getpid") ? dlvsym(RTLD_DEFAULT, "getpid", "GLIBC_2.2.5") : 0; }\n'
    source.write_text(f'#include <dlfcn.h>\n#include "{client.PROGRAMS}/libplugin_a.c"\n{asks}')
    library = client.compile(source, tmp_path / "libasks.so")
    source = tmp_path / "uses.c"
    source.write_text(
        "#include <stdio.h>\ndouble cuMemAlloc_v2(double, double, const char *); double calls(void), jumps(void); void *asks(void);\n"
        'int main(void) { for (int i = 0; i < 3; i++) printf("%g %g %g %d\\n", cuMemAlloc_v2(1, 2, "D"), calls(), jumps(), !asks()); }'
    )
    program = client.compile(source, tmp_path / "uses", library, f"-Wl,-rpath,{tmp_path}")
    env = {"LD_PRELOAD": f"{support.LIBRARY}:{library}" if place == "preloaded" else str(support.LIBRARY)}
    printed, done = same([program], programs, env, tmp_path / "out")
    assert printed == "105 360 104 0\n" * 3 and not (tmp_path / "out").exists()


def test_one_in_a_namespace_of_its_own(programs, tmp_path):
    command = [programs / "names", "apart", programs / "libplugin_b.so"]
    assert alone(command, programs, tmp_path / "out") == "apart: by name 20001, by a table 20002, jumps 20004 calls 60060 others 40000.5\n"


def test_what_is_not_there_is_not_found(programs, tmp_path):
    """Programs ask so whether there is CUDA."""
    printed = alone([programs / "names", "none"], programs, tmp_path / "out")
    assert printed.count(": none, as dlerror says\n") == 14


def test_what_is_not_there_and_called_says_so_in_its_own_codes(programs, tmp_path):
    """By weak symbols, which memtrace's own fill: cudaErrorSymbolNotFound,
    ncclSystemError, CUBLAS_STATUS_NOT_INITIALIZED."""
    env = {"LD_PRELOAD": str(support.LIBRARY), "MEMTRACE_OUT": str(tmp_path / "out")}
    done = support.must(support.execute([programs / "names", "none", "called"], env=env))
    assert done.stdout.splitlines()[-1] == "500 2 1"
    assert done.stderr.count("the call fails as if memtrace were not there") == 3


@pytest.mark.parametrize("file", ["libwraps.so", "libopens.so"])
@pytest.mark.parametrize("preload", ["nowhere", "before", "after"])
def test_a_wrapper_is_called_once_and_what_it_passes_on_is_recorded(preload, file, programs, gpu, tmp_path):
    """Opened by the program and asked for its function, and also in front
    of memtrace or behind it."""
    ours, rest = gpu["LD_PRELOAD"].split(":", 1)
    wraps = str(programs / file)
    places = {"nowhere": [ours, rest], "before": [wraps, ours, rest], "after": [ours, wraps, rest]}
    env = {**gpu, "LD_PRELOAD": ":".join(places[preload])}
    printed, _ = same([programs / "names", "wrapper", file], programs, env, tmp_path)
    assert printed.startswith("0 0, wrapped 1\n") and f"{file} cuMemAlloc_v2: {file}\n" in printed
    snapshot = support.load(support.only_file(tmp_path))
    sizes = [e["size"] for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    # Who is next to a library behind memtrace is not for memtrace to say; by
    # symbol, that library's calls have come by.
    assert sizes == [1001, 2000] if (preload, file) != ("after", "libwraps.so") else [2000]


def test_a_program_that_defines_one_itself(programs, gpu, tmp_path):
    program = client.compile(client.PROGRAMS / "defines.c", tmp_path / "defines", "-rdynamic")
    printed, _ = same([program], programs, gpu, tmp_path / "out")
    assert printed == "0 0, 2 calls\n"
    snapshot = support.load(support.only_file(tmp_path / "out"))
    events = [(e["size"], e["user_metadata"]) for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert events == [(n, "driver: cudaMalloc by defines") for n in (1000, 2000)]
    assert alone([program], programs, tmp_path / "none") == "-1 -1, 2 calls\n"


def test_libraries_that_come_and_go(programs, tmp_path):
    """More often than there are places for their functions, one where the other was."""
    files = [programs / "libplugin_a.so", programs / "libplugin_b.so"]
    command = [programs / "names", "again", *files, "ncclGroupStart"]
    assert alone(command, programs, tmp_path / "out") == f"{200 * 100 + 100 * 20000}\n"
    runtimes = []
    for answer in (3, 5):
        folder = tmp_path / str(answer)
        folder.mkdir()
        source = folder / "runtime.c"
        source.write_text(f"int cudaMalloc(void **at, unsigned long size) {{ return at || size ? -1 : {answer}; }}")
        runtimes.append(client.compile(source, folder / "libcudart.so.13", "-shared", "-fPIC"))
    printed, done = same([programs / "names", "again", *runtimes, "cudaMalloc"], programs, {"LD_PRELOAD": str(support.LIBRARY)}, tmp_path)
    assert printed == f"{200 * 3 + 100 * 5}\n" and client.complaints(done) == []
