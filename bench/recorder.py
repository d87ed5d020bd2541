"""What recording costs: PyTorch's own recorder and memtrace, side by side,
on the virtual GPU with real PyTorch.

    bench/recorder [--rounds N] [--pairs N] [--only frames|windows]

There is one process for each way of recording, because memtrace is preloaded or it isn't. The ways
are taken in turn, round after round, so that a slow minute of the machine hits all of them. A
process measures each number of Python frames and of threads. What is measured is the time of one
`torch.empty` and the free that follows. Batches are short enough to see a pause and long enough not
to measure the clock. It is the thread's own processor time, because waiting for the GIL is not a
recorder's doing. Printed are the nanoseconds *added* to the unrecorded pair: the median of a
stretch of ten batches, the least of all stretches and rounds. Other load, on the machine and in
other threads, only ever adds to it (see `steady.py`). Beside it are the 99th percentile of a batch
(least of the rounds), and the ratio to PyTorch's own recorder with the same stacks. Ratios are what
counts; the times belong to the machine.

A second table is of three processes at a time: off, PyTorch's recorder, memtrace. They measure in
turn, window by window. One kind has Python frames that call each other without C between, another
has other work between the windows (`windows.py`).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import steady
import windows

ROOT = Path(__file__).resolve().parent.parent
FRAMES = (10, 40, 80)
THREADS = (1, 2, 8)

# name → (memtrace's stacks or None, PyTorch's stacks or None)
WAYS = {
    "off": (None, None),
    "pytorch python": (None, "python"),
    "pytorch all": (None, "all"),
    "memtrace none": ("none", None),
    "memtrace python": ("python", None),
    "memtrace all": ("all", None),
}
BASELINE = {"memtrace none": "pytorch python", "memtrace python": "pytorch python", "memtrace all": "pytorch all"}


def calls(depth, innermost):
    """A chain of so many calls, each of another function, as programs have them. A recursion would
    favour recorders that recognise a function."""
    source = "\n".join(f"def f{i}(*arguments):\n    f{i - 1}(*arguments)" for i in range(1, depth))
    scope = {"f0": innermost}
    exec(compile(source, "chain.py", "exec"), scope)
    return scope[f"f{depth - 1}"]


def measure(pairs):
    """In a process of one way: {frames: {threads: [median in quiet, p99]}}, nanoseconds a pair."""
    import torch

    device = torch.device("cuda")

    def batches(n, out):
        empty, clock = torch.empty, time.thread_time_ns
        for _ in range(n):
            start = clock()
            for _ in range(steady.BATCH):
                empty(1000, device=device)
            out.append((clock() - start) / steady.BATCH)

    here = 6  # frames that stand above `chain` in each thread, about
    result = {}
    for frames in FRAMES:
        chain = calls(frames - here, batches)
        chain(500, [])  # warm
        for threads in THREADS:
            outs = steady.run(threads, max(50, pairs // steady.BATCH // threads), chain)
            every = sorted(t for out in outs for t in out)
            p50 = min(steady.least(out) for out in outs)
            result.setdefault(frames, {})[threads] = [p50, every[len(every) * 99 // 100]]
    return result


def child(way, pairs, kind):
    import torch

    stacks = WAYS[way][1]
    if stacks:
        torch.cuda.memory._record_memory_history("all", context="all", stacks=stacks, max_entries=1 << 20)
    if kind:
        windows.worker(kind)
        sys.exit(0)
    json.dump(measure(pairs), sys.stdout)
    sys.stdout.flush()
    os.kill(os.getpid(), 9)  # no snapshot at the end: that is another bench


def start_of(way, build, *child):
    """The command of a process of one way, and its environment."""
    memtrace, _ = WAYS[way]
    command = [str(build / "memtrace"), "run", "--virtual", "h100", "--out", str(ROOT / "memtrace-out")]
    command += ["--record", "off"] if memtrace is None else ["--stacks", memtrace]
    command += ["--", sys.executable, __file__, "--child", way, *child]
    return command, {**os.environ, "MEMTRACE_QUIET": "1"}


def run(way, pairs, build):
    command, env = start_of(way, build, "--pairs", str(pairs))
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    try:
        found = json.loads(out.stdout)
    except ValueError:
        sys.exit(f"bench: {way}: no result\n{out.stderr}")
    steady.clean(ROOT / "memtrace-out")
    return {int(f): {int(t): v for t, v in by.items()} for f, by in found.items()}


def in_windows(kind, options):
    """{way: {way, its baseline and "off": median}} of ways that measure in turn."""
    found = {}
    for way in ("memtrace python", "memtrace all"):
        three = ("off", BASELINE[way], way)
        processes = {w: windows.Process(*start_of(w, options.build, "--kind", kind)) for w in three}
        found[way] = windows.measure(processes, options.windows)
    steady.clean(ROOT / "memtrace-out")
    return found


def print_windows(options):
    rounds = []
    for i in range(options.rounds):
        print(f"bench: windows, round {i + 1} of {options.rounds}", file=sys.stderr)
        rounds.append({kind: in_windows(kind, options) for kind in windows.KINDS})
    print("\n| way | frames | pair p50, ns | PyTorch adds, ns | added p50, ns | of PyTorch's |")
    print("|---|---|---|---|---|---|")
    for row in windows.table(rounds):
        print(row)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--windows", type=int, default=400, help="windows of each process in a round")
    parser.add_argument("--only", choices=["frames", "windows"])
    parser.add_argument("--build", type=Path, default=ROOT / "target" / "release")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=windows.KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.pairs, options.kind)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.rounds} rounds\n")
    if options.only != "windows":
        print_frames(options)
    if options.only != "frames":
        print_windows(options)


def print_frames(options):
    rounds = []
    for i in range(options.rounds):
        print(f"bench: round {i + 1} of {options.rounds}", file=sys.stderr)
        rounds.append({way: run(way, options.pairs, options.build) for way in WAYS})

    def least(way, frames, threads, which):
        return min(r[way][frames][threads][which] for r in rounds)

    print("| way | frames | threads | pair p50, ns | added p50, ns | added p99, ns | of PyTorch's |")
    print("|---|---|---|---|---|---|---|")
    for way in WAYS:
        for frames in FRAMES:
            for threads in THREADS:
                pair = least(way, frames, threads, 0)
                added = [least(way, frames, threads, i) - least("off", frames, threads, i) for i in (0, 1)]
                ratio = ""
                if way in BASELINE:
                    baseline = least(BASELINE[way], frames, threads, 0) - least("off", frames, threads, 0)
                    ratio = f"{added[0] / baseline:.2f}" if baseline > 0 else "?"
                print(f"| {way} | {frames} | {threads} | {pair:.0f} | {added[0]:.0f} | {added[1]:.0f} | {ratio} |")


if __name__ == "__main__":
    main()
