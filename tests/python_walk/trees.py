"""Checks with random trees of calls: alone, in many threads, in forked children."""

import os
import random
import sys
import threading
import traceback

from harness import Bench, in_thread


def tree(bench, depth):
    """A chain of calls, each of a random kind."""
    if depth == 0:
        return bench.here()
    rng = bench.rng
    kind = rng.randrange(12)
    if kind == 0:
        return tree(bench, depth - 1)
    if kind == 1:
        return (lambda: tree(bench, depth - 1))()
    if kind == 2:
        [tree(bench, depth - 1) for _ in range(1)]
        return None
    if kind == 3:
        return next(x for x in (tree(bench, d) for d in [depth - 1]))
    if kind == 4:
        try:
            raise KeyError
        except KeyError:
            return tree(bench, depth - 1)
    if kind == 5:
        sorted([1], key=lambda _: tree(bench, depth - 1))
        return None
    if kind == 6:
        return exec("tree(bench, d)", {"tree": tree, "bench": bench, "d": depth - 1})
    if kind == 7:
        class Body:
            tree(bench, depth - 1)

        return None
    if kind == 8:
        async def run():
            tree(bench, depth - 1)

        try:
            run().send(None)
        except StopIteration:
            return None
    if kind == 9:
        def gen():
            yield tree(bench, depth - 1)

        def via():
            yield from gen()

        list(via())
        return None
    if kind == 10:
        with Closing(bench, depth - 1):
            return None
    max(
        [
            1
        ],
        key=lambda x: tree(
            bench,
            depth - 1
        )
    )


class Closing:
    def __init__(self, bench, depth):
        self.args = bench, depth

    def __enter__(self):
        pass

    def __exit__(self, *_):
        tree(*self.args)


def call_trees(bench):
    for _ in range(3000):
        tree(bench, bench.rng.randrange(1, 25))


def threads(bench):
    """Random call trees in many threads, while others collect garbage and
    look at everybody's frames."""
    import gc

    stop = threading.Event()
    failures = []

    def noise(what):
        while not stop.is_set():
            what()

    def look():
        for frame in list(sys._current_frames().values()):
            while frame is not None:
                frame.f_lineno
                frame = frame.f_back

    def work(seed):
        try:
            mine = Bench(bench.library)
            mine.rng = random.Random(seed)
            for _ in range(250):
                tree(mine, mine.rng.randrange(1, 14))
            mine.compare()
            bench.compared += mine.compared
        except BaseException:
            failures.append(traceback.format_exc())

    noises = [threading.Thread(target=noise, args=(f,), daemon=True) for f in (gc.collect, look)]
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    for t in noises + workers:
        t.start()
    for t in workers:
        t.join()
    stop.set()
    sys.setswitchinterval(old)
    for t in noises:
        t.join()
    assert not failures, failures[0]


def forked(bench):

    def child():
        tree(bench, 6)
        bench.compare()
        thread = threading.Thread(target=lambda: tree(bench, 5))
        thread.start()
        thread.join()
        bench.compare()
        if os.fork() == 0:
            tree(bench, 6)
            bench.compare()
            os._exit(0)
        assert os.wait()[1] == 0

    # From a thread, too, which is then the child's only one.
    for run in (lambda f: f(), in_thread):
        bench.compare()
        status = []

        def fork():
            pid = os.fork()
            if pid == 0:
                try:
                    child()
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            status.append(os.waitpid(pid, 0)[1])

        run(fork)
        assert status == [0], f"the child ended with {status}"
        bench.compared += 3
