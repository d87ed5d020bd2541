"""What it costs a training step to know modules, phases and operators: PyTorch's MemoryTracker and MemTracker, and memtrace,
on the virtual GPU with real PyTorch.

    bench/labels [--rounds N] [--steps N]

The step: forward, backward and AdamW of a small transformer (its size is printed). On the virtual GPU kernels take no time, so
a step is all Python and dispatch, which is the worst case for anything that runs there; on a card a step is longer and each share
smaller. One process for each way, in turn, round after round. In a process, short runs of steps with and without what is measured
alternate; each run counts by its median, and the ratio is the median of those of a run with and the runs without before and after it: the
machine changes its speed, but not within a tenth of a second. The step's time is that of the best run without. Under PyTorch's own a
step takes so long that fewer runs do. What begins under a tracker may take long once, so
the first two steps of a run are not measured; memory that is read back (snapshots, tables) isn't either.

- *labels*, *memtrace.MemoryTracker*, *memtrace.MemTracker*: recorded steps under them, over recorded steps without;
- *MemoryTracker*, *MemTracker*: steps under PyTorch's, over bare steps in the same process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name → recorded by memtrace?
WAYS = {
    "memtrace": True,
    "memtrace.MemoryTracker": True,
    "memtrace.MemTracker": True,
    "memtrace.Tracer": True,
    "memtrace.Tracer, no operators": True,
    "memtrace.Tracer, saved tensors": True,
    "MemoryTracker": False,
    "MemTracker": False,
}
RUN, FIRST = 8, 2  # steps at a time, and those before them


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
    """Begins what is measured; the answers end it, and make it ready for the next step (which is not measured)."""
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

        books = memtrace.MemTracker()
        books.track_external(model, optimizer)
        books.__enter__()
        return lambda: books.__exit__(None, None, None), lambda: None
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


def measure(way, steps):
    """Milliseconds of a step in each run, without and with, and the size of the model."""
    model, optimizer, step = training()
    for _ in range(3 * RUN):
        step()
    runs = ([], [])
    for _ in range(-(-steps // RUN) if WAYS[way] else 2):
        for which in (0, 1):
            leave, again = enter(way, model, optimizer) if which else (lambda: None, lambda: None)
            times = []
            for i in range(FIRST + (RUN if WAYS[way] or not which else 2)):
                again()
                start = time.perf_counter_ns()
                step()
                times.append((time.perf_counter_ns() - start) / 1e6)
            leave()
            runs[which].append(statistics.median(times[FIRST:]))
    size = sum(p.numel() for p in model.parameters()), len(list(model.parameters())), len(list(model.modules()))
    return [*runs, size]


def child(way, steps):
    build = Path(os.environ.get("MEMTRACE_BUILD") or ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release")
    record = ["--record", "on" if WAYS[way] else "off"]
    command = [build / "memtrace", "run", "--virtual", "h100", *record, "--out", os.environ["BENCH_OUT"], "--"]
    command += [sys.executable, __file__, "--way", way, "--steps", steps]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "MEMTRACE_QUIET": "1"}
    done = subprocess.run([str(c) for c in command], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=640, help="measured steps of each kind in a process")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.steps)))
        return
    import tempfile

    found = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as out:
        os.environ["BENCH_OUT"] = out
        for _ in range(given.rounds):
            for way in WAYS:
                found[way].append(child(way, given.steps))
                for file in Path(out).glob("memtrace-*"):
                    file.unlink()
    numbers, tensors, modules = found["memtrace"][0][2]
    print(f"The model: {numbers / 1e6:.1f} million parameters in {tensors} tensors, {modules} modules.\n")
    print("| what | step without, ms | added, ms | ratio | PyTorch's adds, times this |")
    print("|---|---|---|---|---|")
    added, ratios = {}, {}
    for way in WAYS:
        pairs = [pair for a, b, _ in found[way] for pair in (*zip(a, b), *zip(a[1:], b))]
        ratios[way] = statistics.median(b / a for a, b in pairs)
        added[way] = (ratios[way] - 1) * min(min(a) for a, _, _ in found[way])
    for way in WAYS:
        without = min(min(a) for a, _, _ in found[way])
        theirs = added.get(way.removeprefix("memtrace.")) if way.startswith("memtrace.") else None
        times = f"{theirs / max(added[way], 1e-6):.0f}" if theirs else ""
        name = "labels (memtrace.watch)" if way == "memtrace" else way
        print(f"| {name} | {without:.2f} | {added[way]:.2f} | {ratios[way]:.3f} | {times} |")


if __name__ == "__main__":
    main()
