"""Lets autograd's threads come to rest before CPython ends; every Python
program of the tests begins with this.

`backward()` returns before the thread that did the work has let go of what it holds of Python's. If
the program ends right then, CPython up to 3.13 ends such a thread at its next wait for the GIL. The
exception passes through PyTorch's destructors: "terminate called without an active exception", exit
code 134. That is between PyTorch and CPython, the same without memtrace. Programs as short as the
tests', on a GPU where nothing takes time, meet it in most runs.

A thread is at rest when it sleeps at two looks and did not run in between. This must not do
anything else, and nothing at all in a program that has no such thread.
"""

import atexit
import os
import time


def autograd():
    """What each of autograd's threads is doing, and how often each has
    been put to sleep: by thread id."""
    threads = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/status") as file:
                status = dict(line.split(":", 1) for line in file)
        except OSError:  # it ended meanwhile
            continue
        if status["Name"].strip().startswith("pt_autograd"):
            switches = status["voluntary_ctxt_switches"], status["nonvoluntary_ctxt_switches"]
            threads[task] = (status["State"].split()[0], *(s.strip() for s in switches))
    return threads


def rest():
    before, until = None, time.monotonic() + 10
    while time.monotonic() < until:
        now = autograd()
        if not now or (now == before and all(state == "S" for state, *_ in now.values())):
            return
        before = now
        time.sleep(0.02)


atexit.register(rest)
