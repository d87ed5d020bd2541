"""What the benches of single calls share. All threads run while any of them is measured, and the
time of a pair is that of their quiet stretches.

A thread may have to wait for the GIL, or find its caches emptied by another one. It then takes two
to five times as long for the same batch, as long as the threads happen to meet in that way. That
happens with every way of recording and without any. So chance would decide a median over all
batches. So batches are taken in stretches, and what counts is the least of the stretches' medians.
No stretch counts in which another thread had already ended.
"""

import statistics
import threading

BATCH = 50
STRETCH = 10


def least(batches):
    """The least of the medians of stretches of ten batches, in the batches' own unit."""
    stretches = [batches[i : i + STRETCH] for i in range(0, len(batches) - STRETCH + 1, STRETCH)]
    return min(statistics.median(s) for s in stretches)


def run(threads, each, work):
    """Calls `work(STRETCH, out)`, which appends the times of so many batches to
    `out`, in so many threads at once until each has at least `each` batches.
    Returns their times, thread by thread."""
    outs = [[] for _ in range(threads)]
    behind = threading.Barrier(threads)
    missing = [threads]
    lock = threading.Lock()

    def loop(out):
        behind.wait()
        reported = False
        while missing[0]:
            work(STRETCH, out)
            if not reported and len(out) >= each:
                reported = True
                with lock:
                    missing[0] -= 1

    workers = [threading.Thread(target=loop, args=(out,)) for out in outs]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    # The last stretch of each may have been without the others.
    return [out[:-STRETCH] or out for out in outs]


def clean(folder):
    """Removes the black boxes of processes that were killed at their end."""
    for box in folder.glob("*.blackbox"):
        box.resolve().unlink(missing_ok=True)
        box.unlink(missing_ok=True)
