"""What these tests share: building the C programs, running one, and
comparing the ledger step by step."""

import json
import os
from pathlib import Path

import support

PROGRAMS = Path(__file__).resolve().parent / "programs"
COLUMNS = (
    "device_bytes pool_used arrays physical mapped managed imported graph_nodes contexts modules graph_executables"
).split()
# What this process holds of a device's memory, each byte once; with a framework's
# allocator it would be in there, too.
HELD = ("device_bytes", "pool_used", "arrays", "physical")


def compile(source, target, *options):
    """Compiles one C file."""
    compiler = os.environ.get("CC", "cc")
    kind = ["-shared", "-fPIC"] if target.suffix == ".so" else []
    # See programs/client.h for the weak symbols.
    link = ["-Wl,-z,dynamic-undefined-weak", "-pthread", "-ldl"]
    command = [compiler, "-O1", "-g", "-Wall", "-Werror", "-D_GNU_SOURCE", *kind, "-o", target, source, *options, *link]
    support.must(support.execute(command))
    return target


def build(folder):
    """Every program `NAME.c` as `NAME`, every `libNAME.c` as `libNAME.so`."""
    for source in sorted(PROGRAMS.glob("*.c")):
        library = source.stem.startswith("lib")
        versions = source.with_suffix(".map")
        script = [f"-Wl,--version-script={versions}"] if versions.exists() else []
        # Libraries that are linked to the driver: their own dependencies come first, or next.
        driver = [support.build_dir() / "libmemtrace_virtual.so"] if source.stem in ("libdeep", "libwraps") else []
        # What stands for a library of NVIDIA's calls itself so, whatever its file is called.
        name = {"libnccl_small": "libnccl.so.2"}.get(source.stem)
        soname = [f"-Wl,-soname,{name}"] if name else []
        compile(source, folder / (source.stem + (".so" if library else "")), *script, *driver, *soname)
    return folder


def run(command, env, out, timeout=60):
    """Runs a client; returns its process, and the ledger that it printed."""
    done = support.must(support.execute(command, env={**env, "CLIENT_OUT": str(out), "MEMTRACE_OUT": str(out)}, timeout=timeout))
    for path in support.files(out):
        support.must(support.memtrace("check", path))
    return done, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ledger(path):
    """The ledger of a snapshot, in the clients' terms."""
    snapshot = json.loads(Path(path).read_text())
    table = snapshot["memtrace"]["ledger"]
    found = {str(d["device"]): [d[c] for c in COLUMNS] for d in table["devices"]}
    for d in table["devices"]:
        assert d["held"] == sum(d[c] for c in HELD) and d["framework"] == 0
    found = {d: found.get(d, [0] * len(COLUMNS)) for d in ("0", "1", "-1")}
    found["host"] = [table["host"]["pinned"], table["host"]["registered"]]
    found["reserved"] = table["reserved_addresses"]
    return found, snapshot


def complaints(done):
    """What memtrace said, but for the files it wrote and the text about a
    failure, which clients provoke."""
    expected = ("memtrace: wrote", "memtrace: (on a virtual GPU)", "memtrace: OUT OF MEMORY", "memtrace:   ")
    return [line for line in done.stderr.splitlines() if line.startswith("memtrace: ") and not line.startswith(expected)]


def events(snapshot):
    """Events that stand for a call of the program's, without memtrace's own measurements."""
    counters = snapshot["memtrace"]["counters"]
    return counters["events"] - counters["measured"]


def held(snapshot, device):
    """Bytes of a device's segments, as a viewer adds them up."""
    return sum(s["total_size"] for s in snapshot["segments"] if s["device"] == device)


def check_steps(said):
    """Compares each step's snapshot with what the client says must be in
    it; returns the names of the steps."""
    steps = [s for s in said if "step" in s]
    for step in steps:
        found, snapshot = ledger(step["path"])
        wanted = {k: step[k] for k in found}
        assert found == wanted, f"after {step['step']}: {dict(zip(('columns', *COLUMNS), ('', *found['0'])))}"
        for device in (0, 1):
            columns = dict(zip(COLUMNS, step[str(device)]))
            # Segments show memory that has an address: no arrays, and
            # physical memory where it is mapped lowest.
            shown = columns["device_bytes"] + columns["pool_used"] + columns["managed"]
            assert shown <= held(snapshot, device) <= shown + columns["physical"], step["step"]
    return [s["step"] for s in steps]
