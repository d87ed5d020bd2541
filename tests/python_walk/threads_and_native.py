"""Checks of what surrounds the Python frames: the thread and what it
remembers, the native frames, the program."""

import ctypes
import functools
import random
import sys
import weakref

from calls import callbacks, coroutines, exceptions, executed, expressions, generators, objects, recursion
from harness import ALL, PYTHON, Bench, in_thread, same, truth
from trees import call_trees, tree


def without_state(bench):
    """A thread that Python has never seen, and no stack at all."""
    libc = ctypes.CDLL(None)
    capture = ctypes.cast(bench.library.released.memtrace_debug_capture, ctypes.c_void_p)
    for mode in (PYTHON, ALL):
        thread, result = ctypes.c_ulong(), ctypes.c_void_p()
        assert libc.pthread_create(ctypes.byref(thread), None, capture, ctypes.c_void_p(mode)) == 0
        assert libc.pthread_join(thread, ctypes.byref(result)) == 0
        frames = bench.library.names(result.value & 0xFFFFFFFF)
        if mode == PYTHON:
            assert frames == [["[the thread runs no Python]", "memtrace", 0]], frames
        else:
            assert frames and all(f[1] != "memtrace" and not f[1].endswith(".py") for f in frames), frames
        bench.compared += 1
    assert bench.library.held.memtrace_debug_capture(0) == 0
    assert bench.library.names(0) == []
    assert bench.library.names(123_456_789) == []


def unchanged(bench):
    """Nothing that Python can see changes."""
    import gc

    def f():
        return sys.getrefcount(f.__code__), len(gc.get_objects())

    def g():
        for _ in range(100):
            bench.library.held.memtrace_debug_capture(ALL)
            bench.library.released.memtrace_debug_capture(PYTHON)

    g()
    gc.collect()
    gc.disable()
    before = f()
    g()
    after = f()
    gc.enable()
    assert after[0] == before[0] and abs(after[1] - before[1]) < 5, (before, after)


class Twice(Bench):
    """Takes each stack twice from one place: going by what the thread
    remembers, and from nothing."""

    def __init__(self, library):
        super().__init__(library)
        self.warm = False
        for _ in range(100):
            self.here()  # until the interpreter has specialised the call, which then comes from one place only
        self.warm = True

    def here(self, *_):
        lib = self.library.held if self.rng.random() < 0.5 else self.library.released
        mode = ALL if self.rng.random() < 0.9 else PYTHON
        ids = []
        for _ in (1, 2):
            ids.append(lib.memtrace_debug_capture(mode))
            lib.memtrace_debug_forget()
        if ids[0] != ids[1] and self.warm:
            known, fresh = (self.library.names(i) for i in ids)
            raise AssertionError(f"remembered {known}\nfrom nothing {fresh}")
        lib.memtrace_debug_capture(mode)  # something to remember
        self.compared += 1


def remembered(bench):
    """What a thread remembers of its last stack makes no difference to the next."""
    twice = Twice(bench.library)
    for check in (recursion, generators, expressions, exceptions, objects, executed, coroutines, callbacks, call_trees):
        check(twice)

    def work():
        other = Twice(bench.library)
        other.rng = random.Random(id(other))
        for _ in range(300):
            tree(other, other.rng.randrange(1, 12))
        twice.compared += other.compared

    in_thread(work)
    bench.compared += twice.compared


def evaluations(bench):
    """The same frames at the same places, of which now one and now the
    other begins a main loop of its own."""
    twice = Twice(bench.library)

    def inner():
        twice.here()

    def middle(f):
        f()

    def outer(f, g):
        f(g)

    def called(f):
        return functools.partial(f) if twice.rng.random() < 0.5 else f

    for _ in range(3000):
        outer(called(middle), called(inner))
    bench.compared += twice.compared


def resumed(bench):
    """A generator's frame stays where it is, and so does all that it is resumed
    from, but for one frame in between."""
    twice = Twice(bench.library)

    def generator():
        while True:
            twice.here()
            yield

    running = generator()

    def between():
        next(running)

    def outer(f):
        f()

    for _ in range(1000):
        outer(functools.partial(next, running) if twice.rng.random() < 0.5 else functools.partial(between))
    bench.compared += twice.compared


def shorter(bench):
    """A function that returns drops what it held, and that is its caller's stack,
    where it was while the function ran."""
    taken, kept = [], []
    prototype = ctypes.PYFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.py_object)
    capture = prototype(("memtrace_debug_capture", bench.library.held))
    # Called when the stack has been taken, with the frame on top that it was taken in.
    capture.errcheck = lambda stack, *_: taken.append((stack, truth(sys._getframe(1))))

    class Thing:
        pass

    def callee(depth):
        thing = Thing()
        kept.append(weakref.ref(thing, functools.partial(capture, PYTHON)))
        if depth:
            callee(depth - 1)
        capture(PYTHON, None)

    for depth in range(20):
        callee(depth)
    assert len(taken) == 2 * sum(range(21)), len(taken)
    for stack, expect in taken:
        same(bench.library.names(stack), expect)
    bench.compared += len(taken)


MAIN_LOOP = "_PyEval_EvalFrameDefault"


def among_native(bench):
    """Each Python frame is inside the main loop that runs it."""
    results = []

    def take():
        stack = bench.library.released.memtrace_debug_capture(ALL)
        results.append((stack, truth(sys._getframe(0))))

    def chain(depth):
        kind = depth % 4
        if depth == 0:
            take()
        elif kind == 0:
            sorted([1], key=lambda _: chain(depth - 1))
        elif kind == 1:
            chain(depth - 1)
        elif kind == 2:
            list(x for x in [chain(depth - 1)])
        else:
            compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
            once = [chain]
            callback = compare(lambda a, b: (once.pop()(depth - 1) if once else 0) or 0)
            ctypes.CDLL(None).qsort((ctypes.c_int * 2)(2, 1), 2, 4, callback)

    for depth in range(30):
        chain(depth)
    in_thread(lambda: chain(9))
    for stack, expect in results:
        frames = bench.library.names(stack)
        python = [f for f in frames if f[1].endswith(".py") or f[1].startswith("<")]
        same(python, [expect[0][:2] + [python[0][2]]] + expect[1:])
        # From the outermost frame inwards: a main loop, then the frames it
        # runs; never frames without a loop.
        loops = running = 0
        for name, file, _ in reversed(frames):
            if name.startswith(MAIN_LOOP):
                assert loops == 0 or running > 0, "a main loop that runs nothing"
                loops, running = loops + 1, 0
            elif [name, file] in [f[:2] for f in expect] and file.endswith((".py", ">")):
                assert loops > 0, f"{name} stands outside of every main loop"
                running += 1
                if sys.version_info < (3, 11):
                    assert running == 1, "before 3.11 a main loop runs one frame"
        assert loops > 0 and running > 0
        # A callback through C begins a main loop of its own, with qsort's frame further out.
        pytorch = bench.library.names(stack, pytorch=True)
        assert sorted(map(str, pytorch)) == sorted(map(str, frames)), "both orders have the same frames"
        native = [f for f in pytorch if f not in python]
        assert native == [f for f in frames if f not in python]
        for i, f in enumerate(native):
            if f[0] == MAIN_LOOP:
                break
        first = pytorch.index(native[i])
        assert pytorch[first - 1] == python[0], "PyTorch puts one frame before each main loop"
        bench.compared += 1
    deepest = bench.library.names(results[29][0])
    order = [f[0] for f in deepest]
    assert order.count("qsort") + order.count("qsort_r") >= 7, order
