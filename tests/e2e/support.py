"""What the tests share: where the built things are, and how to run a program under memtrace."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SETTLE = HERE.parent / "settle"  # what every Python program begins with
ORACLE = HERE / "oracle.py"
PYTHON = sys.executable  # the interpreter that runs the tests is the one with PyTorch
TIMEOUT = 300
LEFT = re.compile(r"(?m)^memtrace: \d+ black box.* lists them\n")


def build_dir():
    """The folder with the release build: `MEMTRACE_BUILD`, or cargo's own place."""
    named = os.environ.get("MEMTRACE_BUILD")
    if named:
        return Path(named)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


MEMTRACE = build_dir() / "memtrace"
LIBRARY = build_dir() / "libmemtrace.so"


def example(name):
    """A client program in Rust, built if it has not been."""
    profile = ["--release"] if build_dir().name == "release" else []
    command = ["cargo", "build", "--quiet", "--locked", "--package", "memtrace", "--example", name, *profile]
    subprocess.run(command, cwd=ROOT, check=True)
    target = subprocess.run(
        ["cargo", "metadata", "--no-deps", "--format-version", "1"], cwd=ROOT, check=True, capture_output=True
    )
    folder = Path(json.loads(target.stdout)["target_directory"])
    return folder / ("release" if profile else "debug") / "examples" / name


def environment(extra=None):
    """A quiet and repeatable environment, without what the caller may have set for memtrace."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMTRACE_", "PYTORCH_", "LD_"))}
    env.update(PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", **(extra or {}))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SETTLE), env.get("PYTHONPATH")]))
    return env


def execute(command, env=None, cwd=None, timeout=TIMEOUT, stdin=subprocess.DEVNULL):
    """Runs a command to its end; what it printed is text."""
    done = subprocess.run(
        [str(c) for c in command],
        env=environment(env),
        cwd=cwd,
        timeout=timeout,
        stdin=stdin,
        capture_output=True,
        text=True,
        errors="replace",
    )
    # What killed processes of others have left on this machine is mentioned by any run.
    done.stderr = re.sub(LEFT, "", done.stderr)
    return done


def memtrace(*args, **options):
    """Runs the command line tool."""
    return execute([MEMTRACE, *args], **options)


def record(command, out, spec="h100", stacks="python", run=(), **options):
    """Runs `command` under `memtrace run`, recording into `out`."""
    virtual = ["--virtual", spec] if spec else []
    return memtrace("run", *virtual, "--out", out, "--stacks", stacks, *run, "--", *command, **options)


def record_alive(script, out, *args, **options):
    """Runs a script of the corpus; its snapshot of the moment when it
    ended and still held its memory."""
    folder = HERE / "scripts"
    done = must(record([PYTHON, folder / "with_snapshot.py", folder / script, *args], out, **options))
    written = files(out, suffix=".json" if "json" in options.get("run", ()) else ".pickle")
    by_reason = {load(path)["memtrace"]["reason"]: path for path in written}
    return by_reason["request"], by_reason["exit"], done


def must(done, code=0):
    """The same result, if it ended with `code`; else an error that shows everything."""
    assert done.returncode == code, (
        f"exit code {done.returncode}, not {code}: {' '.join(map(str, done.args))}\n"
        f"--- stdout\n{done.stdout[-6000:]}\n--- stderr\n{done.stderr[-6000:]}"
    )
    return done


def files(out, suffix=".pickle"):
    """The snapshots in a folder, by process and in the order in which they were written."""

    def order(path):
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]

    return sorted(Path(out).glob(f"memtrace-*{suffix}"), key=order)


def only_file(out, suffix=".pickle"):
    """The one snapshot in a folder."""
    found = files(out, suffix)
    names = [p.name for p in Path(out).iterdir()] if Path(out).is_dir() else "no folder"
    assert len(found) == 1, f"one snapshot expected in {out}, there are {names}"
    return found[0]


def load(path):
    """Reads a snapshot as any tool would: with Python's own pickle or JSON."""
    path = Path(path)
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with path.open("rb") as file:
        return pickle.load(file)


def history(snapshot, device=0):
    """PyTorch's part of a device's trace: what memtrace's device layer adds is left out."""
    return [
        e for e in snapshot["device_traces"][device] if not str(e.get("user_metadata", "")).startswith("driver: ")
    ]


def live_blocks(snapshot):
    """All blocks that the program holds."""
    return [b for s in snapshot["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
