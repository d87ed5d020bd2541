"""Checks of every kind of call that Python has: each makes some, and takes
the stack in the innermost one."""

import ctypes
import random
import sys
import traceback
import types


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
