"""What the tests share: C programs, the environment that `memtrace run`
would set, and running in it."""

import os
import resource
import subprocess
import time
from pathlib import Path

import support

PROGRAMS = Path(__file__).resolve().parent / "programs"
# See programs/cuda.h.
LINK = ["-Wl,-z,dynamic-undefined-weak", "-pthread", "-ldl"]
# Programs whose functions can be found by name, as those of an interpreter that is linked into
# its program.
EXPORTING = {"interpreter"}
# Libraries that go by another name.
SONAMES = {"liblockfree": "libcudart.so.12", "libover": "libcudart.so.12", "libunder": "libcuda.so.1"}


def compile(source, target, *options):
    """Compiles one C file; what is called `*.so` is a library."""
    compiler = os.environ.get("CC", "cc")
    kind = ["-shared", "-fPIC"] if target.suffix == ".so" else []
    command = [compiler, "-O1", "-g", "-Wall", "-D_GNU_SOURCE", *kind, *options, "-o", target, source, *LINK]
    support.must(support.execute(command))
    return target


def build(folder):
    """Every program `NAME.c` as `NAME`, every `libNAME.c` as `libNAME.so`."""
    for source in sorted(PROGRAMS.glob("*.c")):
        target = folder / (source.stem + (".so" if source.stem.startswith("lib") else ""))
        soname = SONAMES.get(source.stem)
        options = [f"-Wl,-soname,{soname}"] if soname else []
        options += ["-rdynamic"] if source.stem in EXPORTING else []
        compile(source, target, *options)
    return folder


def virtual_environment(spec="h100"):
    """What `memtrace run --virtual` adds to an environment, with the recorder in front."""
    command = ["run", "--virtual", spec, "--record", "off", "--", "env", "-0"]
    printed = support.must(support.memtrace(*command)).stdout
    wanted = dict(line.split("=", 1) for line in printed.split("\0") if "=" in line)
    before = support.environment()
    added = {k: v for k, v in wanted.items() if before.get(k) != v}
    # Every program of a test is alone on its card.
    del added["MEMTRACE_VIRTUAL_CARDS"]
    added["LD_PRELOAD"] = f"{support.LIBRARY}:{added['LD_PRELOAD']}"
    return added


def start(command, env, **options):
    """Starts a program and returns at once."""
    # A core dump of each killed process would take most of the time.
    options.setdefault("preexec_fn", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
    return subprocess.Popen(
        [str(c) for c in command],
        env=support.environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def wait_for_calls(client, ledger):
    """Until a client (`programs/client.c`) has made calls and written down that they returned."""
    end = time.monotonic() + 60
    # A quarter for each thread, which begins with the number of its calls.
    while not (ledger.exists() and (said := ledger.read_bytes()) and any(said[n * len(said) // 4] for n in range(4))):
        assert time.monotonic() < end and client.poll() is None, client.communicate()
        time.sleep(0.01)


def recover(path, *options, code=0):
    """Runs `memtrace recover`; returns the paths that it printed."""
    done = support.must(support.memtrace("recover", path, *options), code=code)
    return [Path(line) for line in done.stdout.splitlines()]


def driver_blocks(snapshot):
    """What the program holds from the driver: address -> size."""
    blocks = support.live_blocks(snapshot)
    found = {b["address"]: b["size"] for b in blocks}
    assert len(found) == len(blocks), "an address twice"
    return found


def about(path):
    return support.load(path)["memtrace"]
