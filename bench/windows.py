"""Ways of recording that are measured in turn, window by window: one process for
each, of which only one works at a time.

What is compared is then never a minute apart, and each window finds the processor as
the last process left it. Two kinds:

* `python`: Python frames that call each other without C between, as a program's
  own code does, window after window;
* `cold`: the same with other work between the windows: tensors that are larger than the caches, and
  objects that come and go. That is what a step does between two allocations. The first pair of a
  window pays for what it finds cold.
"""

import gc
import json
import statistics
import subprocess
import sys
import time

import steady

FRAMES = 60
KINDS = ("python", "cold")


def calls(depth, innermost):
    """A chain of so many functions, each another one; the interpreter
    enters all of them by itself."""
    source = "\n".join(f"def f{i}(n):\n    return f{i - 1}(n)" for i in range(1, depth))
    scope = {"f0": innermost}
    exec(compile(source, "chain.py", "exec"), scope)
    return scope[f"f{depth - 1}"]


def worker(kind):
    """Answers each line with the nanoseconds that a pair took in a window."""
    import torch

    device, empty, clock = torch.device("cuda"), torch.empty, time.thread_time_ns
    large = torch.ones(4 << 20)

    def window(n):
        start = clock()
        for _ in range(n):
            empty(1000, device=device)
        return (clock() - start) / n

    def other_work():
        large.add_(1)
        large.sum()
        return [{"name": str(i), "values": [i, i + 1]} for i in range(5000)]

    chain = calls(FRAMES - 3, window)
    gc.disable()  # when it runs is chance
    for _ in range(20):
        chain(50)
    for _ in sys.stdin:
        if kind == "cold":
            other_work()
        print(chain(steady.BATCH), flush=True)


class Process:
    """A process that measures in one way."""

    def __init__(self, command, env):
        self.times = []
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def window(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"bench: no result\n{self.process.stderr.read()}")
        self.times.append(json.loads(line))

    def end(self):
        self.process.kill()  # no snapshot at the end: that is another bench
        self.process.communicate()


def measure(processes, windows):
    """The median pair of each way over so many windows in turn."""
    for process in processes.values():
        process.window()  # until it is ready
    order = list(processes.values())
    for i in range(windows):
        # Not always the same one after the same other.
        first = i % len(order)
        for process in order[first:] + order[:first]:
            process.window()
    for process in order:
        process.end()
    return {way: statistics.median(process.times[1:]) for way, process in processes.items()}


def table(rounds):
    """The rows of the printed table, from {kind: {way: {way or its baseline
    or "off": pair}}} of each round."""
    for kind in KINDS:
        for way in rounds[0][kind]:
            every = [r[kind][way] for r in rounds]
            off, baseline, pair = (statistics.median(found[w] for found in every) for w in every[0])
            # Round by round, because what a round measured belongs together.
            added = [[found[w] - found["off"] for w in found] for found in every]
            ratio = statistics.median(ours / theirs if theirs > 0 else 9 for _, theirs, ours in added)
            yield f"| {way} | {FRAMES}, {kind} | {off:.0f} | {baseline - off:.0f} | {pair - off:.0f} | {ratio:.3f} |"
