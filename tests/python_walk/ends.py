"""Checks of the end of the interpreter."""

import subprocess
import sys
from pathlib import Path


SHUTDOWN = """
import os, sys, atexit
sys.path.insert(0, {here!r})
import ctypes, harness, trees
bench = harness.Bench(harness.Library({library!r}))
def at_exit():
    trees.tree(bench, 5)
    bench.compare()
    os.write(1, b"atexit %d\\n" % bench.compared)
atexit.register(at_exit)
class Last:
    def __init__(self):
        self.names, self.capture = bench.library.held.memtrace_debug_names, bench.library.held.memtrace_debug_capture
        self.buf, self.write = ctypes.create_string_buffer(4096), os.write
    def __del__(self):
        size = self.names(self.capture(1), 0, self.buf, 4096)
        self.write(1, self.buf.raw[:size])
sys.last_of_all = Last()
"""


def shutdown(bench):
    source = SHUTDOWN.format(here=str(Path(__file__).parent), library=bench.library.path)
    out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    first, rest = out.stdout.split("\n", 1)
    assert first.startswith("atexit ") and int(first.split()[1]) > 0, out.stdout
    assert rest == '["[Python is shutting down]","memtrace",0]\n', out.stdout + out.stderr
    bench.compared += 2


DAEMONS = """
import sys, threading, time
sys.path.insert(0, {here!r})
import harness
library = harness.Library({library!r})
def forever():
    while True:
        library.released.memtrace_debug_capture(harness.PYTHON)
        library.released.memtrace_debug_capture(harness.ALL)
for _ in range(4):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.05)
"""


def daemons(bench):
    """Daemon threads that take stacks while the interpreter goes away."""
    source = DAEMONS.format(here=str(Path(__file__).parent), library=bench.library.path)
    for _ in range(15):
        out = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
        assert out.returncode == 0, f"exit {out.returncode}: {out.stderr}"
        bench.compared += 1
