"""What keeping and writing a history costs: PyTorch's own recorder and memtrace, side by side,
on the virtual GPU with real PyTorch.

    bench/dump [--rounds N] [--long PAIRS] [--ways WAY,…]

There is one process for each way of recording. The ways are taken in turn, round after round. A
process makes pairs of `torch.empty` and its free at 40 frames of Python until both histories
are full, and then many more. PyTorch's has a million entries, memtrace's 2^20 events, which are
1.4 to 1.6 million entries. Measured:

* host memory: what the process's resident memory grew by, mapped files included, for each entry
  kept. And by how much it grows from there over ten million pairs more (or --long);
* a dump by another thread while one thread goes on with its pairs. Its time and the length of the
  file are measured. So is how long single pairs took meanwhile, against as many seconds without a
  dump. That is the 99.9th percentile and the longest, by the clock and by the thread's own
  processor time. What the clock has more than the processor is due to the GIL and the scheduler.
  Other programs on the machine only ever add to it. So memtrace dumps several times, and the least
  of the longest pauses says more than the median.

Printed are medians over all dumps of all rounds, and of the longest pauses the least, too.
"""

import argparse
import array
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from recorder import ROOT, WAYS
from steady import clean

FRAMES = 40
FILL = 600_000  # pairs: 1.2 million events, 1.8 million entries
WARM = 1_000
DUMPS = 5  # of a memtrace process; PyTorch's take long enough
OUT = ROOT / "memtrace-out"


def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024


def dump(way, path):
    """PyTorch's own, or memtrace's: seconds by the clock, and of this thread's processor time."""
    import ctypes

    import torch

    start, own = time.perf_counter(), time.thread_time()
    if WAYS[way][0]:
        function = ctypes.CDLL(None).memtrace_dump
        function.argtypes = [ctypes.c_char_p]
        assert function(os.fsencode(path)) == 0
    else:
        torch.cuda.memory._dump_snapshot(str(path))
    return time.perf_counter() - start, time.thread_time() - own


def measure(way, long_run, path):
    """In a process of one way."""
    import threading

    import torch

    device = torch.device("cuda")
    if WAYS[way][1]:
        torch.cuda.memory._record_memory_history("all", context="all", stacks=WAYS[way][1], max_entries=10**6)

    def pairs(n):
        empty = torch.empty
        for _ in range(n):
            empty(1000, device=device)

    wall, cpu, done = array.array("q"), array.array("q"), threading.Event()

    def timed(_):
        empty, clock, own = torch.empty, time.perf_counter_ns, time.thread_time_ns
        while not done.is_set():
            a, b = clock(), own()
            empty(1000, device=device)
            cpu.append(own() - b)
            wall.append(clock() - a)

    def at_depth(depth, function, n):
        if depth <= 1:
            function(n)
        else:
            at_depth(depth - 1, function, n)

    def thread(function, n):
        worker = threading.Thread(target=at_depth, args=(FRAMES - 6, function, n))
        worker.start()
        return worker

    thread(pairs, WARM).join()
    empty = resident()
    thread(pairs, FILL).join()
    full = resident()
    thread(pairs, long_run).join()
    later = resident()
    worker = thread(timed, 0)
    time.sleep(0.5)
    times, marks = [], []
    for _ in range(1 if WAYS[way][1] else DUMPS):
        begin = len(wall)
        times.append((0.5, 0) if WAYS[way] == (None, None) else dump(way, path))
        end = len(wall)
        time.sleep(max(times[-1][0], 0.2))
        marks.append((begin, end, len(wall)))
    done.set()
    worker.join()

    def of(first, last):
        # A pause may have begun with the last pair before.
        window = slice(max(0, first - 1), last + 1)
        pairs = [sorted(times[window]) for times in (wall, cpu)]
        return [n for some in pairs for n in ((some[len(some) * 999 // 1000], some[-1]) if some else (0, 0))]

    return {
        "kept": full - empty,
        "grew": later - full,
        "dumps": times,
        "during": [of(begin, end) for begin, end, _ in marks],
        "quiet": [of(end + 1, after) for _, end, after in marks],
    }


def child(way, long_run, path):
    json.dump(measure(way, long_run, path), sys.stdout)
    sys.stdout.flush()
    os.kill(os.getpid(), 9)  # no snapshot at the end


def run(way, options):
    memtrace, _ = WAYS[way]
    path = OUT / "bench.pickle"
    path.unlink(missing_ok=True)
    OUT.mkdir(exist_ok=True)
    command = [str(options.build / "memtrace"), "run", "--virtual", "h100", "--out", str(OUT)]
    command += ["--record", "off"] if memtrace is None else ["--stacks", memtrace]
    command += ["--", sys.executable, __file__, "--child", way, "--long", str(options.long), "--path", str(path)]
    done = subprocess.run(command, env={**os.environ, "MEMTRACE_QUIET": "1"}, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"bench: {way}: no result\n{done.stderr}")
    clean(OUT)
    if path.exists():
        summary = [str(options.build / "memtrace"), "summary", "--json", str(path)]
        said = json.loads(subprocess.run(summary, capture_output=True, text=True, check=True).stdout)
        found["entries"] = sum(device["entries"] for device in said["devices"])
        found["bytes"] = path.stat().st_size
        path.unlink()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=10**7, help="pairs over which memory should stay as it is")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of: " + ", ".join(WAYS))
    parser.add_argument("--build", type=Path, default=ROOT / "target" / "release")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.long, options.path)
    ways, rounds = options.ways.split(","), []
    for i in range(options.rounds):
        print(f"bench: round {i + 1} of {options.rounds}", file=sys.stderr)
        rounds.append({way: run(way, options) for way in ways})
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {options.rounds} rounds\n")
    columns = ["way", "entries", "host bytes an entry", "grew over the long run, KiB"]
    columns += ["dump, s for 10⁶ entries", "its processor time, s for 10⁶ entries", "file bytes an entry"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for way in ways:
        if "entries" not in rounds[0][way]:
            continue

        def middle(value):
            return statistics.median(value(r[way]) for r in rounds)  # noqa: B023

        def of_dumps(which):
            return statistics.median(d[which] / r[way]["entries"] * 1e6 for r in rounds for d in r[way]["dumps"])  # noqa: B023

        print(
            f"| {way} | {middle(lambda f: f['entries']):.0f} | {middle(lambda f: f['kept'] / f['entries']):.0f} "
            f"| {middle(lambda f: f['grew'] / 1024):.0f} | {of_dumps(0):.2f} | {of_dumps(1):.2f} "
            f"| {middle(lambda f: f['bytes'] / f['entries']):.1f} |"
        )
    columns = ["way", "window", "p99.9 pair, µs", "longest pair, µs", "least of these, µs"]
    columns += ["p99.9 own time, µs", "longest own time, µs"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for way in ways:
        for window in ("quiet", "during"):
            if window == "during" and "entries" not in rounds[0][way]:
                continue
            all_dumps = [[n / 1000 for n in dump] for r in rounds for dump in r[way][window]]
            clock99, clock, own99, own = (statistics.median(d[i] for d in all_dumps) for i in range(4))
            least = min(d[1] for d in all_dumps)
            name = "while dumping" if window == "during" else "without a dump"
            print(f"| {way} | {name} | {clock99:.0f} | {clock:.0f} | {least:.0f} | {own99:.0f} | {own:.0f} |")


if __name__ == "__main__":
    main()
