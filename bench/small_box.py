"""What recording costs where the black box has little room, against one that has all it wants.

    bench/small_box [--rounds N] [--calls N] [--windows N]

A program allocates and frees, and keeps one in ten, so that there is soon more alive than fits.
Its box is in a file system in memory of 16, 24, 32 or 64 MB (64 MB is what Docker gives a
container). Other ways have an unlimited one, and one of 64 MB after the program has closed
every descriptor. The ways are taken in turn, round after round. What is measured is the
processor time of a call, all threads together, in windows of so many calls. Printed are the
median window and the slowest one, and their ratio to the unlimited box's. Each is the least of
all rounds, because other load only adds to it.

Needs the right to mount a file system (root, or CAP_SYS_ADMIN), a C compiler, and 1 GB of memory.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in ("tests/e2e", "tests/hazards"):
    sys.path.insert(0, str(ROOT / folder))

import hazard  # noqa: E402
import support  # noqa: E402

WAYS = [("all it wants", None, []), *((f"{n} MB", n, []) for n in (64, 32, 24, 16)), ("64 MB, closed", 64, ["close"])]
AIM = 1.2


def windows(program, gpu, folder, megabytes, arguments):
    box = folder / "box"
    box.mkdir(exist_ok=True)
    size = f"{megabytes}m" if megabytes else "90%"
    script = f"mount -t tmpfs -o size={size} tmpfs '{box}' && exec \"$@\""
    command = ["unshare", "-m", "sh", "-c", script, "run", program, *arguments]
    env = {**gpu, "MEMTRACE_BLACKBOX": str(box), "MEMTRACE_OUT": str(folder / "out"), "MEMTRACE_STACKS": "none"}
    done = support.must(support.execute(command, env=env, timeout=1200))
    return [float(line) for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200_000)
    parser.add_argument("--windows", type=int, default=12)
    args = parser.parse_args()
    gpu = hazard.virtual_environment()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = folder / "small_box"
        source = ROOT / "bench" / "small_box.c"
        compiler = os.environ.get("CC", "cc")
        support.must(support.execute([compiler, "-O2", "-o", program, source, "-Wl,-z,dynamic-undefined-weak"]))
        found = {way: [] for way, _, _ in WAYS}
        for round_ in range(args.rounds):
            for way, megabytes, more in WAYS:
                print(f"round {round_ + 1} of {args.rounds}: {way}", file=sys.stderr)
                arguments = [args.calls, args.windows, *more]
                found[way].append(windows(program, gpu, folder, megabytes, arguments))
    middle = {way: min(map(statistics.median, rounds)) for way, rounds in found.items()}
    worst = {way: min(map(max, rounds)) for way, rounds in found.items()}
    first = WAYS[0][0]
    print(f"\n{args.windows} windows of {args.calls} calls, {os.cpu_count()} processors\n")
    print("| the box | median window, ns a call (ratio) | slowest window, ns a call (ratio) |\n|---|---|---|")
    for way, _, _ in WAYS:
        cells = [f"{of[way]:.0f} ({of[way] / of[first]:.2f})" for of in (middle, worst)]
        print(f"| {way} | {cells[0]} | {cells[1]} |")
    over = [way for way in found if middle[way] > AIM * middle[first] or worst[way] > AIM * worst[first]]
    print(f"\nAbove {AIM}: {', '.join(over) if over else 'none'}")
    return int(bool(over))


if __name__ == "__main__":
    subprocess.run(["unshare", "-m", "true"], check=True)
    sys.exit(main())
