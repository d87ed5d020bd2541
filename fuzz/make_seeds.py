#!/usr/bin/env python3
"""Writes what each fuzz target begins with, made from our own data: make_seeds.py FOLDER."""

import gzip
import json
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A line, an inlined function and a loop, so that there are lines, ranges and scopes.
LIBRARY = """
static inline int twice(int n) { return n * 2; }
int sum(const int *of, int n) { int all = 0; for (int i = 0; i < n; i++) all += twice(of[i]); return all; }
"""


def short(snapshot, entries=4):
    """The same snapshot with a short history: small files are changed faster."""
    traces = [trace[:entries] for trace in snapshot["device_traces"]]
    return {**snapshot, "segments": snapshot["segments"][:2], "device_traces": traces}


def snapshots():
    for path in sorted((ROOT / "tests/data/golden").glob("*.pickle.gz")):
        yield path.name.split(".")[0], pickle.loads(gzip.decompress(path.read_bytes()))


def shared(snapshot):
    """As JSON has it when stacks are in tables."""
    frames, stacks = [], []

    def number(table, item):
        if item not in table:
            table.append(item)
        return table.index(item)

    def walk(value):
        if isinstance(value, dict):
            return {k: stack(v) if k == "frames" else walk(v) for k, v in value.items()}
        return [walk(v) for v in value] if isinstance(value, (list, tuple)) else value

    def stack(of):
        return number(stacks, [number(frames, walk(frame)) for frame in of])

    return {**walk(snapshot), "stacks": stacks, "frames": frames}


def pickles():
    for name, snapshot in snapshots():
        yield name, pickle.dumps(short(snapshot), 4)
        yield name + "-2", pickle.dumps(short(snapshot), 2)
    yield "several", pickle.dumps([short(s, 1) for _, s in list(snapshots())[:2]], 4)


def texts():
    for name, snapshot in snapshots():
        yield name, json.dumps(short(snapshot)).encode()
        yield name + "-shared", json.dumps(shared(short(snapshot))).encode()


def line_tables():
    code = compile(pathlib.Path(__file__).read_text(), "x.py", "exec")
    minor = sys.version_info.minor
    for i, inner in enumerate(c for c in code.co_consts if hasattr(c, "co_code")):
        table = inner.co_linetable if minor >= 10 else inner.co_lnotab
        yield f"function-{i}", struct.pack("<Bi?I", minor, inner.co_firstlineno, True, 9) + table
    for old, table in ((9, b"\x06\x01\x08\xff\x04\x7f"), (10, b"\x02\x01\x02\x80\x04\x03")):
        yield f"3.{old}", struct.pack("<Bi?I", old, 7, True, 3) + table


def libraries():
    with tempfile.TemporaryDirectory() as folder:
        source, built = pathlib.Path(folder, "a.c"), pathlib.Path(folder, "a.so")
        source.write_text(LIBRARY)
        for version in (4, 5):
            flags = [f"-gdwarf-{version}", "-O2", "-shared", "-fPIC", "-nostdlib", "-Wl,--build-id=none"]
            subprocess.run(["cc", *flags, "-o", built, source], check=True)
            yield f"dwarf-{version}", built.read_bytes()


def unwind_tables():
    """An index of one entry, a part that entries have in common, and the
    entry, whose code is the page behind."""
    def entry(body):
        body += bytes(-(len(body) + 4) % 8)
        return struct.pack("<I", len(body)) + body

    common = entry(struct.pack("<I", 0) + b"\x01zR\0\x01\x78\x10\x01\0" + b"\x0c\x07\x08\x90\x01")
    codes = {
        "plain": b"\x0e\x10",
        "frame-pointer": b"\x0e\x10\x86\x02\x0d\x06",
        "realigned": b"\x0f\x03\x76\x78\x06\x10\x06\x02\x76\0",
        "remembered": b"\x41\x0e\x20\x0a\x41\x0e\x08\x0b\x42\x0e\x30",
        "registers": b"\x83\x03\x8c\x04\x09\x03\x0c\x14\x06\x01\x16\x0d\x02\x77\x08",
    }
    for name, code in codes.items():
        place = 32 + len(common)
        own = entry(struct.pack("<IQQB", place + 4 - 32, 0x101000, 0x1000, 0) + code)
        head = struct.pack("<4BiIii", 1, 0x1B, 3, 0x3B, 28, 1, 0x1000, place)
        yield name, head.ljust(32, b"\0") + common + own


def nothing():
    yield "sound", b""


SEEDS = {
    "pickle": pickles,
    "json": texts,
    "python_lines": line_tables,
    "dwarf": libraries,
    "unwind_tables": unwind_tables,
    "black_box": nothing,
}

for target, make in SEEDS.items():
    folder = pathlib.Path(sys.argv[1], target)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, seed in make():
        (folder / name).write_bytes(seed)
