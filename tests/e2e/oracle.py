"""PyTorch's recorder as the oracle: one process, two recorders, the same history.

    memtrace run --virtual h100 --stacks python -- python oracle.py SCRIPT [ARGS…]

PyTorch's own recorder (`torch.cuda.memory._record_memory_history`) is switched on before
the first allocation. Then SCRIPT runs in this process. Then both are asked for a snapshot
at the same point. They must agree:

* the trace of each device, entry for entry: action, addr, size, stream
  (for `oom`: device_free and size);
* the Python frames of each entry: name, filename, line, innermost first. Lines that were
  on no stack are left out: next to a frame of code that inductor generated, PyTorch
  writes the user's lines it was made from;
* with --native (and `--stacks all`) the C++ frames, too, in one list with the Python ones:
  library, offset in it, and the name where PyTorch knows one. (It knows exported names only.)
  Taken off before are the innermost frames, of the two recorders and of the allocator, inside
  which each takes the stack at another place;
* the segments and blocks at the end: addresses, sizes, states, sums, stream, kind;
* the shape of the file: every key that PyTorch of this version writes is there.

Left out on both sides is only what the other can't know. That is PyTorch's own `snapshot`
entries, and memtrace's entries of the device layer, which are counted instead. (Their
`user_metadata` begins with "driver: ".)

Exit code 0: they agree. 1: they don't; the first difference of each kind is printed with
what surrounds it. 2: nothing could be compared. The last line printed is the verdict.
SCRIPT's own failure passes through.
"""

import argparse
import ctypes
import json
import os
import pickle
import re
import runpy
import statistics
import sys
import tempfile
import time
from itertools import zip_longest

DRIVER = "driver: "
BLOCK_KEYS = ("address", "size", "state")
SEGMENT_KEYS = (
    "device",
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "is_expandable",
)
CONTEXT = 4  # entries shown before and after a difference
NATIVE_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inc", ".rs")


class Comparison:
    """What two snapshots have in common, and the first difference of each kind."""

    def __init__(self):
        self.counts = {"entries": 0, "frames": 0, "native": 0, "segments": 0, "blocks": 0, "driver": 0}
        self.differences = {}

    def differ(self, kind, text):
        """Notes a difference; only the first of a kind is kept in words."""
        first = self.differences.setdefault(kind, {"count": 0, "text": text})
        first["count"] += 1

    def as_dict(self):
        return {**self.counts, "differences": self.differences}


def trace_row(entry):
    """What must be equal in an entry of the trace."""
    where = entry["device_free"] if entry["action"] == "oom" else entry["addr"]
    return entry["action"], where, entry["size"], entry["stream"], entry.get("pool_id")


def show_row(entry):
    if entry is None:
        return "(no entry)"
    action, where, size, stream, pool = trace_row(entry)
    return f"{action:15} {where:#x} size {size} stream {stream:#x} pool {pool}"


def show_frames(frames):
    return "\n".join(f"        {f['name']} {f['filename']}:{f['line']}" for f in frames) or "        (none)"


def python_frames(frames, native):
    """The Python part of a stack; with `native`, C++ frames are among
    the Python ones and are taken out.

    Where memtrace has no frame it says why, as a frame of the file
    "memtrace"; PyTorch leaves the stack empty.
    """
    frames = [f for f in frames or [] if f["filename"] != "memtrace"]
    if native:
        frames = [f for f in frames if is_python_file(f["filename"])]
    # An instruction without a line is −1 to PyTorch, written as 2^64 − 1, which no
    # viewer can read; memtrace writes 0.
    return [(f["name"], f["filename"], f["line"] if f["line"] < 1 << 63 else 0) for f in frames]


def without_inductors_lines(frames):
    """PyTorch's frames as they were captured."""
    codecache = sys.modules.get("torch._inductor.codecache")
    if not frames or codecache is None:
        return frames
    captured, skip = [], 0
    for frame in frames:
        if skip:
            skip -= 1
            continue
        captured.append(frame)
        skip = len(codecache.PyCodeCache.stack_frames_for_code(frame["filename"], frame["line"]) or ())
    return captured


def whole_stack(frames):
    """A stack with its C++ frames, without those of whoever took it. Rows
    as [`python_frames`] has them."""
    frames = [f for f in frames or [] if f["filename"] != "memtrace"]
    at = 0
    if frames and frames[0]["name"] == "torch::unwind::unwind()":
        gather = [f["name"].startswith("torch::CapturedTraceback::gather(") for f in frames[:3]]
        at = gather.index(True) + 2  # and who calls it: the function in libtorch_cuda.so that the allocator was given
    own = ("libc10_cuda.so", "libmemtrace.so") if at else ("libc10_cuda.so",)
    while at < len(frames) and os.path.basename(frames[at]["filename"]) in own:
        at += 1
    return python_frames(frames[at:], False)


def same_stacks(theirs, ours):
    """Equal, but for names that only memtrace knows."""
    pairs = zip_longest(theirs, ours, fillvalue=("", "", 0))
    return all(a[1:] == b[1:] and (a[0] == "??" or plain(a[0]) == plain(b[0])) for a, b in pairs)


def plain(name):
    """A C++ name without what decoders write in different ways: blanks, and the types of
    numbers (`2ul`, `(unsigned long)2`)."""
    name = re.sub(r"\((?:bool|(?:unsigned )?(?:char|int|long))\)(-?\d+)", r"\1", name)
    return re.sub(r"\b(\d+)u?l{0,2}\b", r"\1", name).replace(" ", "")


def is_python_file(filename):
    if filename.endswith(NATIVE_SUFFIXES) or ".so" in os.path.basename(filename):
        return False
    return filename.endswith(".py") or filename.startswith("<")


def around(theirs, ours, at):
    """The entries on both sides of a difference, for a person."""
    lines = []
    for i in range(max(0, at - CONTEXT), at + CONTEXT + 1):
        a = theirs[i] if i < len(theirs) else None
        b = ours[i] if i < len(ours) else None
        if a is None and b is None:
            break
        lines.append(f"    {'>' if i == at else ' '} {i:7} PyTorch  {show_row(a)}")
        lines.append(f"    {'>' if i == at else ' '} {'':7} memtrace {show_row(b)}")
    return "\n".join(lines)


def show_difference(what, theirs, ours):
    """Two stacks side by side, one row a frame, innermost first."""
    rows = [what]
    for a, b in zip_longest(theirs, ours, fillvalue=("", "", 0)):
        same = same_stacks([a], [b])
        rows += [f"    {' ' if same else '>'} {'' if same else who:9}{name} {file}:{line}"
                 for who, (name, file, line) in ([("", b)] if same else [("PyTorch", a), ("memtrace", b)])]
    return "\n".join(rows)


def compare_traces(theirs, ours, native, result):
    """The histories of all devices."""
    times = []
    for device, (a, b) in enumerate(zip_longest(theirs, ours, fillvalue=[])):
        a = [e for e in a if e["action"] != "snapshot"]
        driver = [e for e in b if str(e.get("user_metadata", "")).startswith(DRIVER)]
        result.counts["driver"] += len(driver)
        b = [e for e in b if not str(e.get("user_metadata", "")).startswith(DRIVER)]
        for i, (x, y) in enumerate(zip_longest(a, b)):
            if x is not None and y is not None and "pool_id" not in x:
                y = {key: value for key, value in y.items() if key != "pool_id"}  # before PyTorch 2.12
            if x is None or y is None or trace_row(x) != trace_row(y):
                result.differ("trace", f"device {device}, entry {i} of {len(a)} / {len(b)}:\n{around(a, b, i)}")
                break  # what follows is shifted and would say nothing
            result.counts["entries"] += 1
            captured = without_inductors_lines(x.get("frames"))
            fx, fy = python_frames(captured, native), python_frames(y.get("frames"), native)
            if fx != fy:
                result.differ(
                    "frames",
                    f"device {device}, entry {i}, {show_row(x)}\n    PyTorch:\n{show_frames(x.get('frames', []))}"
                    f"\n    memtrace:\n{show_frames(y.get('frames', []))}",
                )
            result.counts["frames"] += len(fx)
            if native:
                nx, ny = whole_stack(captured), whole_stack(y.get("frames"))
                if not nx or not same_stacks(nx, ny):
                    result.differ("native frames", show_difference(f"device {device}, entry {i}, {show_row(x)}", nx, ny))
                result.counts["native"] += len(nx) - len(fx)
            if "time_us" in x:
                times.append(abs(x["time_us"] - y["time_us"]))
    if times and statistics.median(times) > 100_000:
        result.differ("time", f"the clocks are {statistics.median(times):.0f} µs apart (median)")


def driver_segments(snapshot):
    """Addresses of segments that belong to memtrace's device layer."""
    return {
        entry["addr"]
        for trace in snapshot["device_traces"]
        for entry in trace
        if entry["action"].startswith("segment_") and str(entry.get("user_metadata", "")).startswith(DRIVER)
    }


def segment_row(segment):
    """What must be equal in a segment: itself, and all its blocks."""
    blocks, address = [], segment["address"]
    for block in segment["blocks"]:
        blocks.append(tuple({"address": address, **block}[key] for key in BLOCK_KEYS))
        address += block["size"]
    return {key: segment[key] for key in SEGMENT_KEYS if key in segment}, blocks


def compare_segments(theirs, ours, device_layer, result):
    """What is there at the end."""
    known = {(s["device"], s["address"]) for s in theirs}
    ours = [s for s in ours if (s["device"], s["address"]) in known or s["address"] not in device_layer]
    for x, y in zip_longest(theirs, ours):
        if x is None or y is None:
            result.differ("segments", f"PyTorch has {len(theirs)} segments, memtrace {len(ours)}")
            break
        (head_x, blocks_x), (head_y, blocks_y) = segment_row(x), segment_row(y)
        if head_x != head_y:
            wrong = {k: (head_x[k], head_y.get(k)) for k in head_x if head_x[k] != head_y.get(k)}
            result.differ("segments", f"segment {x['address']:#x}: (PyTorch, memtrace) differ in {wrong}")
            continue
        result.counts["segments"] += 1
        for i, (p, q) in enumerate(zip_longest(blocks_x, blocks_y)):
            if p != q:
                result.differ("blocks", f"segment {x['address']:#x}, block {i}: PyTorch {p}, memtrace {q}")
                break
            result.counts["blocks"] += 1


def compare_shape(theirs, ours, result):
    """Every key of PyTorch's is there with a value of the same kind; `frames`
    may be missing where no stack is."""

    def look(where, x, y):
        for key, value in x.items():
            if key == "frames":
                continue
            if key not in y:
                result.differ("shape", f"{where} has no {key!r}")
            elif type(value) is not type(y[key]):
                result.differ("shape", f"{where}[{key!r}] is {type(y[key]).__name__}, not {type(value).__name__}")

    look("the snapshot", theirs, ours)
    if "memtrace" not in ours:
        result.differ("shape", "the snapshot has no 'memtrace'")
    for x, y in zip(theirs["segments"][:50], ours["segments"]):
        look("a segment", x, y)
        for p, q in zip(x["blocks"], y["blocks"]):
            look("a block", p, q)
    for a, b in zip(theirs["device_traces"], ours["device_traces"]):
        samples = {e["action"]: e for e in a}
        for y in b[:5000]:
            if y["action"] in samples:
                look(f"an entry ({y['action']})", samples.pop(y["action"]), y)


def compare(theirs, ours, native=False):
    """Compares PyTorch's snapshot with memtrace's."""
    result = Comparison()
    compare_traces(theirs["device_traces"], ours["device_traces"], native, result)
    compare_segments(theirs["segments"], ours["segments"], driver_segments(ours), result)
    compare_shape(theirs, ours, result)
    return result


def memtrace_dump(path):
    """Asks the preloaded library for a snapshot of now."""
    try:
        dump = ctypes.CDLL(None).memtrace_dump
    except AttributeError:
        stop("memtrace is not in this process: start me with `memtrace run --stacks python -- python oracle.py …`")
    dump.argtypes, dump.restype = [ctypes.c_char_p], ctypes.c_int
    code = dump(os.fsencode(path))
    if code != 0:
        stop(f"memtrace_dump({path}) answered {code}")


def activity(torch):
    """How often PyTorch's allocator has been asked for anything."""
    stats = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    return [{k: v for k, v in s.items() if k.endswith((".allocated", ".freed"))} for s in stats]


def both_at_once(torch, path):
    """Both snapshots, with nothing between them: a thread of autograd's may
    still be letting go of what it held."""
    for _ in range(20):
        before = activity(torch)
        theirs = torch.cuda.memory._snapshot()
        memtrace_dump(path)
        if activity(torch) == before:
            return theirs
        time.sleep(0.5)
    return stop("the program doesn't come to rest, so no two snapshots are of the same moment")


def stop(message):
    print(f"oracle: {message}", file=sys.stderr)
    sys.exit(2)


def main():
    parser = argparse.ArgumentParser(description="compare memtrace with PyTorch's own recorder")
    parser.add_argument("--native", action="store_true", help="compare C++ frames too")
    parser.add_argument("--results", metavar="DIR", help="write the verdict as JSON, one file a process")
    parser.add_argument("--keep", metavar="DIR", help="keep both snapshots there")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        stop(f"torch {torch.__version__} sees no CUDA device")
    record = torch.cuda.memory._record_memory_history
    record("all", context="all", stacks="all" if options.native else "python", max_entries=sys.maxsize)

    sys.argv = [options.script, *options.args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
    script_globals = runpy.run_path(options.script, run_name="__main__")  # keeps what the script left alive

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or scratch
        path = os.path.join(folder, f"ours-{os.getpid()}.pickle")
        theirs = both_at_once(torch, path)
        with open(path, "rb") as file:
            ours = pickle.load(file)
        if options.keep:
            with open(os.path.join(folder, f"theirs-{os.getpid()}.pickle"), "wb") as file:
                pickle.dump(theirs, file, protocol=4)
    del script_globals

    result = compare(theirs, ours, options.native)
    verdict = {"script": os.path.basename(options.script), "torch": torch.__version__, **result.as_dict()}
    for kind, difference in result.differences.items():
        print(f"oracle: {kind} ({difference['count']}): {difference['text']}", file=sys.stderr)
    if options.results:
        with open(os.path.join(options.results, f"verdict-{os.getpid()}.json"), "w") as file:
            json.dump(verdict, file)
    c = result.counts
    print(
        f"oracle: {verdict['script']}: {'DIFFERENT' if result.differences else 'equal'}: {c['entries']} entries, "
        f"{c['frames']} Python and {c['native']} native frames, {c['segments']} segments, {c['blocks']} blocks; {c['driver']} of the driver's",
        flush=True,
    )
    sys.exit(1 if result.differences else 0)


if __name__ == "__main__":
    main()
