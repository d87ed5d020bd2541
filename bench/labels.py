"""What it costs a training step to know modules, phases and operators: PyTorch's MemoryTracker and
MemTracker, and memtrace, on the virtual GPU with real PyTorch.

    bench/labels [--rounds N] [--fours N] [--only WAY]...

The step: forward, backward and AdamW of a small transformer (its size is printed). On the virtual
GPU kernels take no time, so a step is all Python and dispatch. That is the worst case for
anything that runs there. On a card a step is longer and each share smaller. There is one process
for each way, in turn, round after round.

A shared machine changes its speed by half within a tenth of a second, so only neighbours are
compared. There are hundreds of groups of four steps: without, with, with and without. The first two
are compared, and the last two. Since these come in either order, a drift favours no side. Beginning
and ending a tracker, and reading from it, is not part of a step. It empties the processor's caches,
so two to four steps after either are not measured. Their number is random, because what comes back
every few steps, such as Python's garbage collector, would always hit the same ones. The ratio is
the median of all. It comes with its interval of 95 % confidence, by rank, which supposes nothing
about how the ratios are spread. It also comes with the ratios of the single processes, because
addresses and page tables differ from process to process. The time of a step is the median of those
without. `MemoryTracker` empties PyTorch's cache when it begins, PyTorch's and ours; here it
doesn't, or steps would pay for that.

- *none*: nothing at all between the same steps, which shows what the measurement is worth;
- *labels*, *memtrace.…*: recorded steps under them, over recorded steps without;
- *MemoryTracker*, *MemTracker*: steps under PyTorch's, over bare steps in the same process.
"""

import argparse
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name → recorded by memtrace?
WAYS = {
    "none": True,
    "memtrace": True,
    "memtrace.MemoryTracker": True,
    "memtrace.MemTracker": True,
    "memtrace.Tracer": True,
    "memtrace.Tracer, no operators": True,
    "memtrace.Tracer, saved tensors": True,
    "MemoryTracker": False,
    "MemTracker": False,
}
SKIPPED = 2  # steps after a beginning or an end, and up to two more
SETTLE = 8  # fours before those that count
THEIRS = 4  # fours under PyTorch's


def training():
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(512, 512), nn.TransformerEncoder(layer, 6), nn.Linear(512, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 64, 512, device="cuda")

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def enter(way, model, optimizer):
    """Begins what is measured; the answers end it, and make it ready for the
    next step (which is not measured)."""
    import torch

    torch.cuda.empty_cache = lambda: None
    if way == "none":
        return lambda: None, lambda: None
    if way == "memtrace":
        import memtrace

        return memtrace.watch(model, optimizer).remove, lambda: None
    if way == "memtrace.MemoryTracker":
        import memtrace

        ours = memtrace.MemoryTracker()
        ours.start_monitor(model)
        return ours.stop, lambda: None
    if way == "memtrace.MemTracker":
        import memtrace

        tracker = memtrace.MemTracker()
        tracker.track_external(model, optimizer)
        tracker.__enter__()
        return lambda: tracker.__exit__(None, None, None), lambda: None
    if way.startswith("memtrace.Tracer"):
        import memtrace

        kind = {"operators": "no operators" not in way, "saved_tensors": "saved" in way}
        tracer = memtrace.Tracer(model, optimizer, **kind)
        tracer.__enter__()
        return lambda: tracer.__exit__(None, None, None), lambda: None
    if way == "MemoryTracker":
        from torch.distributed._tools.memory_tracker import MemoryTracker

        tracker = MemoryTracker()
        tracker.start_monitor(model)
        return tracker.stop, lambda: None
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    tracker.__enter__()
    return lambda: tracker.__exit__(None, None, None), tracker.reset_mod_stats


def measure(way, fours):
    """Milliseconds of the steps of each four: without, with, with,
    without. And the size of the model."""
    model, optimizer, step = training()
    chance = random.Random(0)

    def skipped():
        return [False] * (SKIPPED + chance.randrange(3))

    found = []
    for i in range(SETTLE + (fours if WAYS[way] else THEIRS)):
        four = []
        leave, again = None, lambda: None
        # All steps are called from one place, as in a loop: from another one,
        # stacks would be new to who records them.
        for counts in [True, "begin", *skipped(), True, True, "end", *skipped(), True]:
            if counts == "begin":
                leave, again = enter(way, model, optimizer)
            elif counts == "end":
                leave()
                again = lambda: None  # noqa: E731
            else:
                again()
                start = time.perf_counter_ns()
                step()
                if counts:
                    four.append((time.perf_counter_ns() - start) / 1e6)
        if i == SETTLE:
            gc.collect()
            gc.freeze()  # what is there stays, and need not be looked at again and again
        elif i > SETTLE:
            found.append(four)
    size = sum(p.numel() for p in model.parameters()), len(list(model.parameters())), len(list(model.modules()))
    return found, size


def compared(fours):
    """The ratios of steps with it to their neighbours without."""
    return [ratio for a, b, c, d in fours for ratio in (b / a, c / d)]


def interval(values):
    """The ranks between which the median is with 95 % confidence,
    whatever the values are spread like."""
    n = len(values)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    values = sorted(values)
    return values[low], values[n - 1 - low]


def child(way, fours):
    build = Path(os.environ.get("MEMTRACE_BUILD") or ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release")
    record = ["--record", "on" if WAYS[way] else "off"]
    command = [build / "memtrace", "run", "--virtual", "h100", *record, "--out", os.environ["BENCH_OUT"], "--"]
    command += [sys.executable, __file__, "--way", way, "--fours", fours]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "MEMTRACE_QUIET": "1"}
    done = subprocess.run([str(c) for c in command], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fours", type=int, default=350, help="pairs of steps with it in a process, each between two without")
    parser.add_argument("--only", action="append", choices=WAYS, help="this way alone; several times for several")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.fours)))
        return
    import tempfile

    ways = [way for way in WAYS if way in (given.only or WAYS)]
    found = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as out:
        os.environ["BENCH_OUT"] = out
        for _ in range(given.rounds):
            for way in ways:
                found[way].append(child(way, given.fours))
                for file in Path(out).glob("memtrace-*"):
                    file.unlink()
    numbers, tensors, modules = found[ways[0]][0][1]
    print(f"The model: {numbers / 1e6:.1f} million parameters in {tensors} tensors, {modules} modules.\n")
    print("| what | step without, ms | added, ms | ratio | 95 % | by process | PyTorch's adds, times this |")
    print("|---|---|---|---|---|---|---|")
    without = {way: statistics.median(f[0] for fours, _ in found[way] for f in fours) for way in ways}
    ratios = {way: [ratio for fours, _ in found[way] for ratio in compared(fours)] for way in ways}
    added = {way: (statistics.median(ratios[way]) - 1) * without[way] for way in ways}
    for way in ways:
        low, high = interval(ratios[way])
        single = " ".join(f"{statistics.median(compared(fours)):.3f}" for fours, _ in found[way])
        # At least so many times: by the most that ours may add.
        theirs = added.get(way.removeprefix("memtrace.")) if way.startswith("memtrace.") else None
        times = f"{theirs / max((high - 1) * without[way], 1e-3):.0f}" if theirs else ""
        name = "labels (memtrace.watch)" if way == "memtrace" else way
        print(
            f"| {name} | {without[way]:.2f} | {added[way]:.2f} | {statistics.median(ratios[way]):.3f} "
            f"| {low:.3f}–{high:.3f} | {single} | {times} |"
        )


if __name__ == "__main__":
    main()
