"""The table in docs/python.md: PyTorch's trackers and memtrace's on the
same runs, on a virtual GPU.

    .venv/bin/python scripts/trackers_table.py

The programs are those of tests/e2e/test_trackers.py, which holds memtrace's to the
allocator and to PyTorch's own numbers.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"
BUILD = Path(os.environ.get("MEMTRACE_BUILD", ROOT / "target" / "release"))
SCENES = {
    "plain": "forward, backward, `AdamW`, `zero_grad`",
    "single": "the same, `foreach=False`",
    "fused": "the same, `fused=True`",
    "accumulate": "two batches a step",
    "checkpoint": "activation checkpointing",
    "workspaces": "with cuBLAS's workspaces, as they are by default",
}
TABLES = ("memories_allocated", "memories_active", "memories_reserved")


def run(script, *arguments, out):
    command = [BUILD / "memtrace", "run", "--virtual", "h100", "--out", out, "--", sys.executable, SCRIPTS / script, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "MEMTRACE_QUIET": "1"}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]


def by_category(scene, out):
    """How far each of the two is off the allocator's active bytes, at its
    worst: bytes of ours, parts of theirs."""
    said = json.loads(run("mem_tracker.py", scene, out=out))["said"]
    peak = max(moment["peak"] for moment in said)
    ours = max(abs(m[who]["Total"] - m[what]) for m in said for who, what in (("ours", "allocated"), ("our peak", "peak")))
    own = max(abs(m["ours"][c] - m[c]) for m in said for c in ("Parameter", "Buffer", "Gradient", "Optstate"))
    pairs = (("theirs", "allocated"), ("their peak", "peak"))
    theirs = " | ".join(f"{max(abs(m[who]['Total'] - m[what]) / m[what] for m in said):.2%}" for who, what in pairs)
    return f"| {SCENES[scene]} | {len(said)} | {peak:,} | {ours} | {own} | {theirs} |"


def by_operator(scene, out):
    """Lines of the tables of PyTorch's MemoryTracker, and how many of them are others in ours."""
    run("memory_tracker.py", scene, str(out / "ours"), str(out / "theirs"), out=out)
    ours, theirs = (pickle.loads((out / name).read_bytes()) for name in ("ours", "theirs"))
    lines = [(table, n) for table in TABLES for n in theirs[table]]
    other = sum(ours[table].get(n) != theirs[table][n] for table, n in lines)
    return f"| {scene} | {len(lines)} | {other} |"


def main():
    print("| run | moments | most active bytes | memtrace's total is off by | and its parameters, buffers, gradients, optimizer state |"
          " PyTorch's total is off by | PyTorch's peak is off by |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for scene in SCENES:
        with tempfile.TemporaryDirectory() as out:
            print(by_category(scene, Path(out)), flush=True)
    print("\n| run | lines of the three tables | that differ |\n|---|---|---|")
    for scene in ("plain", "single", "autocast", "checkpoint", "streams"):
        with tempfile.TemporaryDirectory() as out:
            print(by_operator(scene, Path(out)), flush=True)


if __name__ == "__main__":
    main()
