"""What memtrace costs as PyTorch's allocator, recording, against PyTorch's
own that records nothing.

    bench/allocator [--rounds N] [--pairs N]

There is one process for each way. The ways are taken in turn, round after round, so that a slow
minute of the machine hits all of them. A process measures each kind of sizes with each number of
threads. What is measured is the time of one pair of a request and its free, in batches of 50. The
allocator is asked as C++ asks it (`caching_allocator_alloc`, without the making of a tensor) and
as Python programs do (`torch.empty`). A request comes while 200 other blocks of its kind are
held, so that the allocator has something to look through. It is the thread's own processor time.
Printed is the median of a stretch of ten batches, the least of all stretches and rounds. Other
load only adds to it (see `steady.py`). Beside it is the ratio to PyTorch's own. Ratios are what
counts; the times belong to the machine.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import steady

ROOT = Path(__file__).resolve().parent.parent
THREADS = (1, 2, 4, 8)
HELD = 200

# name → memtrace's stacks, or None for PyTorch's allocator
WAYS = {"pytorch, not recording": None, "memtrace, no stacks": "none", "memtrace, python": "python", "memtrace, all": "all"}
BASELINE = "pytorch, not recording"
SIZES = {
    "small": lambda r: r.randrange(1, 1 << 18),
    "large": lambda r: r.randrange(1 << 20, 32 << 20),
    "mixed": lambda r: int(2 ** r.uniform(0, 25)),
}


def measure(pairs):
    """In a process of one way: {call: {sizes: {threads: nanoseconds a pair}}}."""
    import torch

    device = torch.device("cuda")
    torch.cuda.init()
    alloc, delete = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
    clock = time.thread_time_ns

    def raw(sizes, n, out):
        for _ in range(n):
            start = clock()
            for size in sizes:
                delete(alloc(size, 0))
            out.append((clock() - start) / steady.BATCH)

    def tensors(sizes, n, out):
        empty, kind = torch.empty, torch.uint8
        for _ in range(n):
            start = clock()
            for size in sizes:
                empty(size, dtype=kind, device=device)
            out.append((clock() - start) / steady.BATCH)

    result = {}
    for name, call in (("raw", raw), ("torch.empty", tensors)):
        for kind, size in SIZES.items():
            r = random.Random(0)
            held = [torch.empty(size(r), dtype=torch.uint8, device=device) for _ in range(2 * HELD)]
            del held[::2]  # every other one is a gap
            sizes = [size(r) for _ in range(steady.BATCH)]
            for threads in THREADS:
                call(sizes, 20, [])
                outs = steady.run(threads, max(20, pairs // steady.BATCH // threads), partial(call, sizes))
                result.setdefault(name, {}).setdefault(kind, {})[threads] = min(map(steady.least, outs))
            del held
            torch.cuda.empty_cache()
    return result


def child(way, pairs):
    if WAYS[way]:
        import memtrace

        memtrace.install(stacks=WAYS[way])
    json.dump(measure(pairs), sys.stdout)
    sys.stdout.flush()
    os.kill(os.getpid(), 9)  # no snapshot at the end: that is another bench


def run(way, pairs, build):
    out = ROOT / "memtrace-out"
    command = [str(build / "memtrace"), "run", "--virtual", "h100", "--record", "off", "--out", str(out)]
    command += ["--", sys.executable, __file__, "--child", way, "--pairs", str(pairs)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MEMTRACE_", "PYTORCH_"))}
    env |= {"MEMTRACE_QUIET": "1", "MEMTRACE_OUT": str(out), "MEMTRACE_LIBRARY": str(build / "libmemtrace.so")}
    env["PYTHONPATH"] = str(ROOT / "python")
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"bench: {way}: no result\n{done.stderr}")
    steady.clean(out)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--build", type=Path, default=ROOT / "target" / "release")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.pairs)
    rounds = []
    for i in range(options.rounds):
        print(f"bench: round {i + 1} of {options.rounds}", file=sys.stderr)
        rounds.append({way: run(way, options.pairs, options.build) for way in options.ways})

    def least(way, call, kind, threads):
        return min(r[way][call][kind][str(threads)] for r in rounds)

    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.rounds} rounds\n")
    print("| call | sizes | threads | " + " | ".join(f"{way}, ns (ratio)" for way in options.ways) + " |")
    print("|---|---|---|" + "---|" * len(options.ways))
    for call in rounds[0][options.ways[0]]:
        for kind in SIZES:
            for threads in THREADS:
                cells = []
                for way in options.ways:
                    ns = least(way, call, kind, threads)
                    ratio = f" ({ns / least(BASELINE, call, kind, threads):.2f})" if way != BASELINE and BASELINE in options.ways else ""
                    cells.append(f"{ns:.0f}{ratio}")
                print(f"| {call} | {kind} | {threads} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
