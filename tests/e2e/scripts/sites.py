"""Places in a program from which memory is asked for, as odd as they come: each allocates and frees a little.

For the stacks, not for the sizes: frames of Python and of C in every order, from every kind of thread, of functions that are
suspended, generated, or on their way out.
"""

import asyncio
import contextlib
import ctypes
import functools
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.utils.data import DataLoader, Dataset

here = Path(__file__).parent
folder = tempfile.TemporaryDirectory()
built = f"{folder.name}/callbacks.so"
subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", built, here / "callbacks.c", "-pthread"], check=True)
free_gil, keep_gil = ctypes.CDLL(built), ctypes.PyDLL(built)
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
kept = []


def take(n=1):
    """The leaf of all: two blocks, one of which goes at once."""
    torch.empty(100 * n, device="cuda")
    kept.append(torch.empty(10 * n + 1, device="cuda"))
    return n


def expressions():
    (lambda: take())()
    [take(i) for i in range(1, 3)]
    list(map(take, [1, 2]))
    sorted([3, 1, 2], key=take)
    functools.reduce(lambda a, b: take(), [1, 2, 3])
    functools.partial(take, 3)()
    exec("take()\nfor i in range(2):\n    take()", {"take": take})
    eval("[take() for _ in range(2)]", {"take": take})

    class Body:
        take()

        def __del__(self):
            take()

    Body()


def recursion(n):
    return take() if n == 0 else recursion(n - 1) if n % 3 else (lambda: recursion(n - 1))()


def generators():
    def inner(n):
        for i in range(1, n):
            take(i)
            got = yield i
            if got:
                take(got)

    def outer(n):
        try:
            yield from inner(n)
            yield from (take(x) for x in inner(3))
        finally:
            take()

    list(outer(4))
    g = outer(4)
    next(g)
    g.send(7)
    g.close()
    thrown = outer(3)
    next(thrown)
    with contextlib.suppress(KeyError):
        thrown.throw(KeyError())
    # One that is resumed by another thread than the one that began it.
    passed_on = outer(4)
    next(passed_on)
    in_thread(lambda: list(passed_on))


def coroutines():
    async def leaf(n):
        take(n)
        await asyncio.sleep(0)
        take(n)
        return n

    async def numbers():
        for i in range(1, 3):
            yield await leaf(i)

    @contextlib.asynccontextmanager
    async def around():
        take()
        yield
        take()

    async def main():
        await asyncio.gather(*(leaf(i) for i in range(1, 4)))
        async for n in numbers():
            take(n)
        async with around():
            await leaf(2)
        asyncio.get_running_loop().call_soon(take)
        await asyncio.get_running_loop().run_in_executor(None, take)

    asyncio.run(main())


def exceptions():
    class Around:
        def __enter__(self):
            take()

        def __exit__(self, *_):
            return take() == 1

    def fails(n):
        if n == 0:
            torch.empty(3, device="cuda") @ torch.empty(4, device="cuda")  # raised in C++
        try:
            fails(n - 1)
        except RuntimeError as e:
            take()
            raise ValueError from e
        finally:
            take()

    with Around():
        raise KeyError
    with contextlib.suppress(ValueError, RuntimeError):
        fails(3)
    try:
        fails(1)
    except ValueError:
        in_callback(take)


def in_callback(f):
    free_gil.through(CALLBACK(lambda n: f() or 0), 1)


def in_thread(f):
    thread = threading.Thread(target=f)
    thread.start()
    thread.join()


def callbacks():
    for library in (free_gil, keep_gil):
        for name in ("through", "through_alloca", "after_longjmp"):
            function = getattr(library, name)
            for n in (1, 2, 3):
                function(CALLBACK(take), n)
        library.sort_of_three(CALLBACK(lambda n: take() and n))
    nested = CALLBACK(lambda n: free_gil.through(CALLBACK(lambda m: keep_gil.through_alloca(CALLBACK(take), m)), n))
    free_gil.through(nested, 2)


def c_threads():
    """Threads that Python meets only when they call it."""
    for n in (1, 2):
        assert free_gil.in_thread(CALLBACK(take), n) == n
    free_gil.in_thread(CALLBACK(lambda n: free_gil.in_thread(CALLBACK(take), n)), 2)
    free_gil.in_thread(CALLBACK(lambda n: generators() or 1), 1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        take()
        return 3 * x * x * grad


def autograd():
    w = torch.randn(16, 16, device="cuda", requires_grad=True)
    w.register_hook(lambda grad: take() and None)
    w.register_post_accumulate_grad_hook(lambda w: take() and None)
    (Cube.apply(w) @ w).relu().sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        y = (w * w).exp().sum()
    y.backward()
    z = torch.randn(4, device="cuda", requires_grad=True)
    torch.autograd.functional.jacobian(lambda v: v * v, torch.randn(3, device="cuda"))
    (grad,) = torch.autograd.grad((z**3).sum(), z, create_graph=True)
    grad.sum().backward()

    # A backward inside another one, on the same thread of autograd's.
    torch.utils.checkpoint.checkpoint(lambda x: Cube.apply(x).tanh(), w, use_reentrant=True).sum().backward()
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)).cuda()
    net[0].register_full_backward_hook(lambda *_: take() and None)
    net[1].register_forward_hook(lambda *_: take() and None)
    net(w).sum().backward()


def futures():
    future = torch.futures.Future()
    chained = future.then(lambda f: take(f.wait()))
    in_thread(lambda: future.set_result(2))
    chained.wait()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take, range(1, 4)))


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((4,), float(i))


def on_the_card(items):
    return torch.stack(items).cuda()


def loaders():
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=0, collate_fn=on_the_card):
        kept.append(batch * 2)
    for batch in DataLoader(Numbers(), batch_size=2, num_workers=1, pin_memory=True):
        kept.append(batch.cuda(non_blocking=True))
    # A thread that fetches ahead.
    ready = queue.Queue()
    in_thread(lambda: [ready.put(batch.cuda()) for batch in DataLoader(Numbers(), batch_size=3)])
    kept.extend(ready.queue)


@torch.library.custom_op("memtrace_sites::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    take()
    return x * 2


def dispatch():
    """Python between PyTorch's dispatcher and its kernels."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    w = torch.randn(8, 8, device="cuda", requires_grad=True)
    with Functions():
        take()
    with Operators():
        take()
        (w @ w).sum().backward()
    kept.append(torch.func.vmap(lambda v: v * 2)(w.detach()))
    kept.append(torch.func.grad(lambda v: (v * v).sum())(w.detach()))
    kept.append(twice(w.detach()))


def traced():
    def tracer(frame, event, arg):
        if event == "return":
            torch.empty(3, device="cuda")
        return tracer

    sys.settrace(tracer)
    try:
        take()
    finally:
        sys.settrace(None)
    sys.setprofile(lambda *_: None)
    try:
        take()
    finally:
        sys.setprofile(None)


SITES = (
    expressions, generators, coroutines, exceptions, callbacks, c_threads, autograd, futures, loaders, dispatch, traced,
)  # fmt: skip
for n in (0, 1, 10, 60):
    recursion(n)
for site in SITES:
    for run in (lambda f: f(), in_thread, in_callback):
        run(site)
    del kept[::2]
print("allocated at", len(SITES), "kinds of sites")
