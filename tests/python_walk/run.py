#!/usr/bin/env python3
"""Is the Python stack that memtrace reads, without the GIL, the one that the interpreter has?

Runs in the interpreter that is to be checked (CPython 3.9 to 3.13; on any other it checks that memtrace says so). Each
check makes calls of one kind, has libmemtrace take the stack in the innermost one, with the GIL held or released at
random, and compares with what `sys._getframe` saw there: names, files and lines, frame by frame. Names are asked for at
the end, when most of the code objects are gone.

    python tests/python_walk/run.py [--library libmemtrace.so] [check ...]
    python tests/python_walk/run.py --all        # every CPython that can be found

Exit code: 0 all equal, 1 not, 2 could not run.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import subprocess
import sys
import traceback
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = [(3, minor) for minor in range(9, 14)]
PYTHON, ALL = 1, 2


class Library:
    """The library, once called with the GIL held and once without."""

    def __init__(self, path):
        self.path = path
        self.held, self.released = ctypes.PyDLL(path), ctypes.CDLL(path)
        for lib in (self.held, self.released):
            lib.memtrace_debug_capture.restype = ctypes.c_uint
            lib.memtrace_debug_names.restype = ctypes.c_size_t
            lib.memtrace_debug_names.argtypes = [ctypes.c_uint, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
            lib.memtrace_debug_cost.restype = ctypes.c_double
            lib.memtrace_debug_refused.restype = ctypes.c_uint64

    def names(self, stack, pytorch=False):
        """The frames of a stack as [name, file, line], innermost first."""
        size = self.released.memtrace_debug_names(stack, int(pytorch), None, 0)
        buf = ctypes.create_string_buffer(size + 1)
        self.released.memtrace_debug_names(stack, int(pytorch), buf, size)
        return [json.loads(row) for row in buf.raw[:size].decode().splitlines()]


class Bench:
    """Takes stacks, remembers the truth about each, and compares at the end."""

    def __init__(self, library):
        self.library = library
        self.taken = []
        self.compared = 0
        self.rng = random.Random(1)

    def here(self, *_):
        """Takes the caller's stack. Returns None, so that it can stand anywhere."""
        lib = self.library.held if self.rng.random() < 0.5 else self.library.released
        stack = lib.memtrace_debug_capture(PYTHON)
        self.taken.append((stack, truth(sys._getframe(1))))

    def compare(self):
        """Compares everything taken since the last time; the first difference is an AssertionError."""
        known = {}
        taken, self.taken = self.taken, []
        for stack, expect in taken:
            frames = known.get(stack)
            if frames is None:
                frames = known[stack] = self.library.names(stack)
            assert frames and frames[0][0] == "here", f"begins with {frames[:1]}"
            same(frames[1:], expect)
            self.compared += 1


def truth(frame):
    """The interpreter's view of a frame and its callers."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append([shown(code.co_name), shown(code.co_filename), frame.f_lineno or 0])
        frame = frame.f_back
    return frames


def shown(text):
    """A name as memtrace writes it: half surrogates, which no UTF-8 has, become U+FFFD."""
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


KEPT = 128  # frames kept of each end of a deep stack


def same(frames, expect):
    if len(expect) + 1 > 2 * KEPT:
        cut = len(frames) - KEPT
        assert frames[cut - 1][0] == "[frames left out]", f"no gap in {len(frames)} of {len(expect)} frames"
        expect = expect[: KEPT - 1] + expect[-KEPT:]
        frames = frames[: cut - 1] + frames[cut:]
    for i, (got, want) in enumerate(zip(frames, expect)):
        assert got == want, f"frame {i} is {got}, should be {want}"
    assert len(frames) == len(expect), f"{len(frames)} frames, should be {len(expect)}"


# The checks. Each takes a Bench.


def recursion(bench):
    def down(n):
        if n == 0:
            return bench.here()
        if n % 3 == 0:
            return down(n - 1)
        return (
            down(
                n - 1
            )
        )

    for n in list(range(40)) + [100, 200, 250, 251, 252, 253, 254, 255, 256, 300, 700]:
        down(n)


def generators(bench):
    def inner(n):
        for i in range(n):
            bench.here()
            yield i

    def outer(n):
        yield from inner(n)
        yield sum(inner(2))
        try:
            yield from (bench.here() or x for x in inner(1))
        finally:
            bench.here()

    def echo():
        got = yield
        while True:
            bench.here()
            got = yield got

    list(outer(3))
    g = outer(3)
    next(g)
    g.close()
    e = echo()
    next(e)
    e.send(1)
    e.send(2)
    e.close()
    try:
        x = outer(1)
        next(x)
        x.throw(KeyError)
    except KeyError:
        bench.here()


def expressions(bench):
    here = bench.here
    (lambda: here())()
    (lambda f: f(lambda: here()))(lambda g: g())
    [here() for _ in range(2)]
    {here() for _ in range(2)}
    {i: here() for i in range(2)}
    list(here() for _ in range(2))
    [[here() for _ in range(2)] for _ in range(2)]
    list(map(lambda _: here(), [1, 2]))
    list(filter(lambda _: here(), [1]))
    sorted([3, 1, 2], key=lambda x: here() or x)
    max([1, 2], key=lambda x: here() or x)
    __import__("functools").reduce(lambda a, b: here() or a, [1, 2, 3])
    __import__("re").sub("a", lambda m: here() or "b", "banana")
    here() if here() is None else 0
    assert here() is None, here()
    f"{here()} {here()!r}"
    here(), [here(), (here(), here(

    ))], *[here(
    )]


def exceptions(bench):
    def fails(depth):
        if depth == 0:
            try:
                raise ValueError
            except ValueError:
                bench.here()
                raise
            finally:
                bench.here()
        try:
            fails(depth - 1)
        except ValueError as e:
            bench.here()
            raise RuntimeError from e
        except RuntimeError:
            bench.here()
            raise

    class Context:
        def __enter__(self):
            bench.here()

        def __exit__(self, *_):
            bench.here()
            return True

    class Odd(Exception):
        def __init__(self):
            bench.here()
            super().__init__()

        def __str__(self):
            bench.here()
            return "odd"

    with Context():
        fails(4)
    try:
        raise Odd
    except Odd as e:
        str(e)
    try:
        fails(2)
    except RuntimeError as e:
        traceback.format_exception(type(e), e, e.__traceback__)
        bench.here()


def objects(bench):
    import functools

    def decorate(f):
        @functools.wraps(f)
        def wrapper(*a, **k):
            bench.here()
            return f(*a, **k)

        return wrapper

    def with_argument(n):
        bench.here()
        return decorate

    class Meta(type):
        def __new__(mcs, *a):
            bench.here()
            return super().__new__(mcs, *a)

        def __call__(cls, *a):
            bench.here()
            return super().__call__(*a)

        def __instancecheck__(cls, x):
            bench.here()
            return False

    class Thing(metaclass=Meta):
        bench.here()
        nested = type("Inner", (), {"f": lambda self: bench.here()})

        class Deeper:
            bench.here()

        def __init__(self):
            bench.here()

        @decorate
        @with_argument(1)
        def method(self):
            bench.here()

        @property
        def prop(self):
            bench.here()

        @staticmethod
        def static():
            bench.here()

        @classmethod
        def clsm(cls):
            bench.here()

        def __getattr__(self, name):
            bench.here()
            return 1

        def __eq__(self, o):
            bench.here()
            return True

        def __hash__(self):
            bench.here()
            return 1

        def __iter__(self):
            bench.here()
            return iter([1])

        def __del__(self):
            bench.here()

        def __add__(self, o):
            bench.here()
            return self

    t = Thing()
    t.method()
    t.prop
    Thing.static()
    Thing.clsm()
    t.missing
    assert t == 1
    {t: 1}
    list(t)
    t + 1
    t.nested().f()
    isinstance(1, Thing)
    functools.partial(t.method)()
    functools.lru_cache(None)(lambda x: bench.here())(1)
    del t


def executed(bench):
    scope = {"here": bench.here}
    exec("here()\nfor i in range(2):\n    here()\n\n\ndef f():\n    return here()\nf()", scope)
    eval("[here() for _ in range(2)]", scope)
    exec(compile("\n\n\nclass C:\n    here()\n    def m(self):\n        here()\nC().m()", "made up.py", "exec"), scope)
    eval(compile("here()", "", "eval"), scope)
    exec(compile("here()\n", "x" * 5000, "exec"), {"here": lambda: None})
    code = compile("def g():\n    here()\ng()", "one.py", "exec")
    exec(code, scope)
    exec(code.replace(co_filename="another.py"), scope)
    scope["g"].__code__ = scope["g"].__code__.replace(co_name="renamed", co_firstlineno=100)
    scope["g"]()


def coroutines(bench):
    import asyncio

    async def leaf(n):
        bench.here()
        await asyncio.sleep(0)
        bench.here()
        return n

    async def gen():
        for i in range(2):
            bench.here()
            yield await leaf(i)

    class Manager:
        async def __aenter__(self):
            bench.here()

        async def __aexit__(self, *_):
            bench.here()

    class Awaitable:
        def __await__(self):
            bench.here()
            yield from leaf(3).__await__()

    async def main():
        await asyncio.gather(*(leaf(i) for i in range(5)))
        async for _ in gen():
            bench.here()
        [x async for x in gen()]
        async with Manager():
            await Awaitable()
        loop = asyncio.get_running_loop()
        loop.call_soon(bench.here)
        await loop.run_in_executor(None, bench.here)

    asyncio.run(main())
    c = leaf(1)
    c.send(None)
    c.close()


def callbacks(bench):
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None)

    def order(a, b):
        bench.here()
        return 0

    def nested(a, b):
        libc.qsort((ctypes.c_int * 2)(2, 1), 2, 4, compare(order))
        return 0

    libc.qsort((ctypes.c_int * 3)(3, 1, 2), 3, 4, compare(nested))


def traced(bench):
    def work():
        for i in range(3):
            bench.here()
        return [bench.here() for _ in range(2)]

    def tracer(frame, event, arg):
        if frame.f_code is work.__code__:
            bench.here()
        return tracer

    def profiler(frame, event, arg):
        if frame.f_code is work.__code__:
            bench.here()

    sys.settrace(tracer)
    try:
        work()
    finally:
        sys.settrace(None)
    sys.setprofile(profiler)
    try:
        work()
    finally:
        sys.setprofile(None)
    if sys.version_info >= (3, 12):
        monitoring = sys.monitoring
        monitoring.use_tool_id(3, "walk")
        events = monitoring.events
        monitoring.register_callback(3, events.LINE, lambda code, line: bench.here() if code is work.__code__ else None)
        monitoring.set_events(3, events.LINE)
        try:
            work()
        finally:
            monitoring.set_events(3, 0)
            monitoring.free_tool_id(3)


def names(bench):
    odd = ["função", "名前", "имя", "x\u0301y", "aͤ", "𐐀𐐨", "ß" * 300, "n" * 3000]
    files = ["módulo.py", "ファイル.py", "\U0001f600.py", "a\udc80b.py", "tab\tnew\nline\"quote'.py", "é" * 1500]
    for n in odd:
        for f in files:
            scope = {"here": bench.here}
            exec(compile(f"def {n}():\n  here()\n{n}()", f, "exec"), scope)
    code = compile("def f():\n  here()", "f", "exec").co_consts[0].replace(co_filename="\0 in it")
    types.FunctionType(code, {"here": bench.here})()
    bench.compare()
    # Names that are too long are cut, at a whole character.
    exec(compile("def f():\n  here()\nf()", "é" * 3000, "exec"), {"here": bench.here})
    stack, expect = bench.taken.pop()
    frames = bench.library.names(stack)
    assert frames[1][1] == "é" * 2048, len(frames[1][1])
    assert expect[0][1] == "é" * 3000
    bench.compared += 1


def long_functions(bench):
    rng = random.Random(2)
    for size in (300, 3000, 12000):
        body = []
        for i in range(size):
            body.append(f"    x = {i % 7}" + "\n" * rng.choice([0, 0, 0, 1, 5, 130, 300]))
            if rng.random() < 200 / size:
                body.append("    " + rng.choice(["here()", "here(\n\n 1,\n 2)", "[here(\n) for _ in [1,\n2]]", "(\n\nhere(\n),\n1)[0]"]))
        body.append("    for i in range(2):\n" + "\n" * 40 + "        here()\n    here()")
        exec(compile("def long():\n" + "\n".join(body) + "\nlong()", f"long{size}.py", "exec"), {"here": bench.here})


def reused_addresses(bench):
    """Twenty thousand functions that live for a moment each, many of them at one address."""
    addresses = set()
    here = bench.here
    for i in range(20_000):
        kind = i % 4
        if kind == 0:  # differ in the name only, all of one length
            source, name, file = f"def f{i:05}():\n here()\n", f"f{i:05}", "<string>"
        elif kind == 1:  # differ in the file only
            source, name, file = "def f():\n here()\n", "f", f"/generated/{i:05}.py"
        elif kind == 2:  # differ in the lines, at the end of a function
            source, name, file = "def f():\n" + " x = 1\n" * 40 + "\n" * (i % 100) + " here()\n", "f", "<string>"
        else:  # differ in the first line only
            source, name, file = "\n" * (i % 500) + "def f():\n here()\n", "f", "<string>"
        scope = {"here": here}
        code = compile(source, file, "exec")
        exec(code, scope)
        addresses.add(id(scope[name].__code__))
        scope[name]()
        if i % 16 == 0:
            clone = scope[name].__code__.replace(co_name=f"clone{i:05}")
            types.FunctionType(clone, scope)()
            addresses.add(id(clone))
        del scope, code
    assert len(addresses) < 15_000, f"{len(addresses)} addresses: they were not used again, nothing was checked"
    assert bench.library.held.memtrace_debug_refused() == 0


def threads(bench):
    """Random call trees in many threads, while others collect garbage and look at everybody's frames."""
    import gc
    import threading

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


def forked(bench):
    import threading

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


def in_thread(f):
    import threading

    thread = threading.Thread(target=f)
    thread.start()
    thread.join()


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
    """Takes each stack twice from one place: going by what the thread remembers, and from nothing."""

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


MAIN_LOOP = "_PyEval_EvalFrameDefault"


def among_native(bench):
    """Each Python frame stands inside the main loop that runs it."""
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
        # From the outermost frame inwards: a main loop, then the frames it runs; never frames without a loop.
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


SHUTDOWN = """
import os, sys, atexit
sys.path.insert(0, {here!r})
import run
bench = run.Bench(run.Library({library!r}))
def at_exit():
    run.tree(bench, 5)
    bench.compare()
    os.write(1, b"atexit %d\\n" % bench.compared)
atexit.register(at_exit)
class Last:
    def __init__(self):
        self.names, self.capture = bench.library.held.memtrace_debug_names, bench.library.held.memtrace_debug_capture
        self.buf, self.write = run.ctypes.create_string_buffer(4096), os.write
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
import run
library = run.Library({library!r})
def forever():
    while True:
        library.released.memtrace_debug_capture(run.PYTHON)
        library.released.memtrace_debug_capture(run.ALL)
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


CHECKS = [
    recursion, generators, expressions, exceptions, objects, executed, coroutines, callbacks, traced, names,
    long_functions, reused_addresses, call_trees, threads, forked, without_state, unchanged, remembered, among_native,
    shutdown, daemons,
]


def unsupported(library):
    """On any other Python: no frames, and the reason."""
    frames = library.names(library.held.memtrace_debug_capture(PYTHON))
    reasons = {
        "[this version of Python is not known to memtrace]",
        "[this build of Python lays its objects out in another way]",
        "[free-threaded Python is not supported]",
    }
    assert len(frames) == 1 and frames[0][0] in reasons, frames
    return frames[0][0]


def find_library():
    if os.environ.get("MEMTRACE_LIBRARY"):
        return os.environ["MEMTRACE_LIBRARY"]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [p for p in (target / kind / "libmemtrace.so" for kind in ("release", "debug")) if p.exists()]
    if not built:
        die(f"no libmemtrace.so in {target}/release or {target}/debug: run cargo build, or name one with --library")
    return str(max(built, key=lambda p: p.stat().st_mtime))


def find_pythons():
    """Every CPython of a supported version: from MEMTRACE_PYTHON3_<minor>, pyenv, or the search path."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in SUPPORTED:
        name = "python%d.%d" % version
        candidates = [os.environ.get("MEMTRACE_PYTHON%d_%d" % version)]
        candidates += sorted(str(p) for p in pyenv.glob(f"*/bin/{name}"))
        candidates.append(shutil.which(name))
        works = [c for c in candidates if c and subprocess.run([c, "-c", "import ctypes"], capture_output=True).returncode == 0]
        if works:
            found[version] = works[0]
    return found


def run_all(library):
    found, failed = find_pythons(), []
    for version in SUPPORTED:
        if version not in found:
            print("python walk: 3.%d not found, skipped (set MEMTRACE_PYTHON3_%d to its path)" % (version[1], version[1]))
        elif subprocess.run([found[version], __file__, "--library", library]).returncode != 0:
            failed.append(version)
    print(f"python walk: {len(found) - len(failed)} of {len(found)} versions of CPython agree")
    return 1 if failed or not found else 0


def die(text):
    print(f"run.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", help="the libmemtrace.so to check (default: the newest one that cargo built)")
    parser.add_argument("--all", action="store_true", help="run on every supported CPython that can be found")
    parser.add_argument("checks", nargs="*", help="run only these checks")
    args = parser.parse_args()
    path = str(Path(args.library or find_library()).resolve())
    if args.all:
        return run_all(path)
    try:
        library = Library(path)
    except (OSError, AttributeError) as e:
        die(f"{path} cannot be used: {e}")
    version = "%d.%d.%d" % sys.version_info[:3]
    if sys.version_info[:2] not in SUPPORTED:
        print(f"python walk on {version}: {unsupported(library)}: ok")
        return 0
    unknown = set(args.checks) - {c.__name__ for c in CHECKS}
    if unknown:
        die(f"no such check: {', '.join(sorted(unknown))}; there are {', '.join(c.__name__ for c in CHECKS)}")
    warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what we check
    bench, failed, count = Bench(library), 0, 0
    for check in CHECKS:
        if args.checks and check.__name__ not in args.checks:
            continue
        count += 1
        before = bench.compared
        try:
            check(bench)
            bench.compare()
            assert bench.compared > before or check is unchanged, "nothing was compared"
        except Exception:
            failed += 1
            bench.taken.clear()
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}", file=sys.stderr)
    refused = library.held.memtrace_debug_refused()
    if refused:
        failed += 1
        print(f"FAILED {refused} stacks or functions found no room", file=sys.stderr)
    word = "ok" if not failed else f"{failed} FAILED"
    print(f"python walk on {version}: {count} checks, {bench.compared:,} stacks compared: {word}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
