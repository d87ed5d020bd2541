"""A program prints the same and ends the same with and without memtrace. That holds where another
tool has put itself between the program and CUDA, too, before memtrace or behind it. The other tool
sees the same calls, and memtrace's ledger stays right."""

import ctypes
import re

import client
import pytest
import support

SCRIPTS = support.HERE / "scripts"
PLACES = ["nobody", "before", "after"]


def preload(programs, gpu, spy, memtrace):
    """The environment with the other tool before or after memtrace, or memtrace's place empty."""
    ours, rest = gpu["LD_PRELOAD"].split(":", 1)
    spy_at = str(programs / "libspy.so")
    parts = {"nobody": [ours, rest], "before": [spy_at, ours, rest], "after": [ours, spy_at, rest]}[spy]
    return {**gpu, "LD_PRELOAD": ":".join(p for p in parts if memtrace or p != ours)}


def both(command, programs, gpu, spy, tmp_path, **env):
    """The program with memtrace and without: what it printed, how it ended,
    and what the other tool counted."""
    seen = []
    for memtrace in (False, True):
        counts = tmp_path / f"counts-{memtrace}"
        out = tmp_path / "out"
        mine = {**preload(programs, gpu, spy, memtrace), **env, "SPY": str(counts), "MEMTRACE_OUT": str(out)}
        done = support.execute(command, env=mine)
        own = [line for line in done.stderr.splitlines() if not line.startswith("memtrace: ")]
        own = [re.sub(r"0x[0-9a-f]+|\b\d{3,}\b", "N", line) for line in own]  # addresses and numbers of processes
        counted = sorted(counts.read_text().split("\n")) if counts.exists() else None
        seen.append((done.returncode, done.stdout, own, counted))
    assert (seen[0][3] is None) == (spy == "nobody"), "the other tool saw nothing"
    return seen, tmp_path / "out"


@pytest.mark.parametrize("spy", PLACES)
@pytest.mark.parametrize("program", ["driver", "runtime"])
def test_a_client(program, spy, programs, gpu, tmp_path):
    """T35: either order works. The clients print what the ledger should be,
    which are compared call by call."""
    env = {"CLIENT_CUDART": "libcudart.so.13", "CLIENT_OUT": str(tmp_path)}
    mine = {**preload(programs, gpu, spy, True), **env, "SPY": str(tmp_path / "counts")}
    done, said = client.run([programs / program, "symbol"], mine, tmp_path)
    assert len(client.check_steps(said)) > 20 and client.complaints(done) == []
    assert (tmp_path / "counts").exists() == (spy != "nobody")


@pytest.mark.parametrize("spy", PLACES)
@pytest.mark.parametrize("script", ["mlp.py", "stream_events.py", "oom.py"])
def test_a_training(script, spy, programs, gpu, tmp_path):
    (without, recorded), out = both([support.PYTHON, SCRIPTS / script], programs, gpu, spy, tmp_path)
    assert recorded == without and without[0] == 0


@pytest.mark.parametrize("spy", PLACES)
def test_a_program_that_fails(spy, programs, gpu, tmp_path):
    program = 'import torch, sys\nkept = torch.zeros(1 << 20, device="cuda")\nprint("so far", flush=True)\ntorch.empty(99 << 30, dtype=torch.uint8, device="cuda")'
    (without, recorded), _ = both([support.PYTHON, "-c", program], programs, gpu, spy, tmp_path)
    assert recorded == without and without[0] == 1 and without[1] == "so far\n"


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("env", [{}, EXPANDABLE], ids=["segments", "expandable"])
@pytest.mark.parametrize("spy", PLACES)
def test_the_oracle_finds_the_same(spy, env, programs, gpu, tmp_path):
    """PyTorch's allocator is known behind another tool, too: its segments and its
    deferred frees are equal to its own."""
    env = {**preload(programs, gpu, spy, True), **env, "MEMTRACE_OUT": str(tmp_path), "MEMTRACE_STACKS": "python"}
    script = ["expandable.py"] if "PYTORCH_CUDA_ALLOC_CONF" in env else ["random_program.py", "1", "3000"]
    done = support.must(support.execute([support.PYTHON, support.ORACLE, SCRIPTS / script[0], *script[1:]], env=env))
    assert done.stdout.rstrip().endswith("; 0 of the driver's"), done.stdout


def test_each_of_two_cublas_is_called_by_its_own_user(tmp_path):
    """A handle is good for the library that made it. There is a framework with CUDA 12
    beside one with CUDA 13, which may be there for everybody. And there are two NCCLs. Their
    symbols have versions, as NVIDIA's. Calls at a function's end are jumps. Nor does
    memtrace keep open what the program closes."""
    header = "int cublasSetWorkspace_v2(void *, void *, unsigned long), ncclGroupStart(void);\n"
    header += "int cublasLtMatmul(" + ", ".join(["void *"] * 14 + ["unsigned long", "void *"]) + ");\n"
    named = [f"void *p{i}" for i in range(14)] + ["unsigned long size", "void *stream"]
    for version in (12, 13):
        sets = f"int cublasSetWorkspace_v2(void *of, void *at, unsigned long size) {{ return {version} * 1000 + size; }}\n"
        multiplies = f"int cublasLtMatmul({', '.join(named)}) {{ return {version} * 1000 + size + (long)stream + (p13 == (void *)7); }}\n"
        groups = f"int ncclGroupStart(void) {{ return {version}; }}\n"
        user = "int sets(void) { return cublasSetWorkspace_v2(0, 0, 5); }\n"
        user += f"int multiplies(void) {{ return cublasLtMatmul({'0, ' * 13}(void *)7, 20, (void *)300); }}\n"
        user += "int groups(void) { return ncclGroupStart(); }\n"
        libraries = {"libcublas": sets, "libcublasLt": multiplies, "libnccl": groups}
        for name, text in {**libraries, "user": user}.items():
            (tmp_path / f"{name}.c").write_text(header + text)
        for name in libraries:
            file, script = f"{name}.so.{version}", tmp_path / f"{name}.map"
            script.write_text(f"{file} {{ global: *; }};")
            shared = ["-shared", "-fPIC", f"-Wl,-soname,{file}", f"-Wl,--version-script={script}"]
            client.compile(tmp_path / f"{name}.c", tmp_path / file, *shared)
        needs = [f"-l:{name}.so.{version}" for name in libraries]
        found = ["-O2", f"-L{tmp_path}", "-Wl,-rpath,$ORIGIN"]
        client.compile(tmp_path / "user.c", tmp_path / f"user{version}.so", *found, *needs)
    program = f"""
import _ctypes, ctypes, sys
users = [ctypes.CDLL("{tmp_path}/user13.so", int(sys.argv[1])), ctypes.CDLL("{tmp_path}/user12.so")]
for user in users * 2: print(user.sets(), user.multiplies(), user.groups())
other = ctypes.CDLL("{tmp_path}/libcublas.so.12").cublasSetWorkspace_v2
print(other(None, None, ctypes.c_ulong(6)))
_ctypes.dlclose(users[1]._handle)
print("user12" in open("/proc/self/maps").read())
"""
    for mode in (ctypes.RTLD_LOCAL, ctypes.RTLD_GLOBAL):
        command = [support.PYTHON, "-c", program, mode]
        done = support.must(support.execute(command, env={"LD_PRELOAD": str(support.LIBRARY)}))
        assert done.stdout == "13005 13321 13\n12005 12321 12\n" * 2 + "12006\nFalse\n"


def test_what_a_tool_behind_calls_in_a_call_is_part_of_that_call(programs, gpu, tmp_path):
    """A runtime's function that calls another one by symbol comes to
    memtrace's hook a second time."""
    source = tmp_path / "calls.c"
    source.write_text("""
#include "client.h"
int main(void) {
    void *at;
    return cudaMallocManaged(&at, 3000, 1) || cudaMalloc(&at, 4000);
}
""")
    program = client.compile(source, tmp_path / "calls", f"-I{client.PROGRAMS}")
    ours, rest = gpu["LD_PRELOAD"].split(":", 1)
    env = {**gpu, "LD_PRELOAD": f"{ours}:{programs / 'libinside.so'}:{rest}", "MEMTRACE_OUT": str(tmp_path / "out")}
    support.must(support.execute([program], env=env))
    snapshot = support.load(support.only_file(tmp_path / "out"))
    events = [(e["size"], e["user_metadata"]) for e in snapshot["device_traces"][0] if e["action"] == "alloc"]
    assert events == [(3000, "driver: cudaMallocManaged by calls"), (4000, "driver: cudaMalloc by calls")]
