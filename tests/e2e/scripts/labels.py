"""A small model, trained and labelled in the ways that the argument names; writes a snapshot to the path given."""

import ctypes
import sys
import threading

import torch
from torch import nn

how, path = sys.argv[1:3]
library = ctypes.CDLL(None)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=256, checkpoint=False):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 8)
        self.checkpoint = checkpoint

    def forward(self, x):
        for layer in self.layers:
            if self.checkpoint:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = layer(x)
        return self.head(x)


def train(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(64, 256, device="cuda", requires_grad=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def nothing():
    train(Net().cuda())


def record_function():
    model = Net().cuda()
    with torch.profiler.record_function("mine"):
        hidden = model.layers[0](torch.randn(64, 256, device="cuda"))
        with torch.profiler.record_function("inner"):
            hidden = model.layers[1](hidden)
    model.head(hidden).sum().backward()


def nvtx():
    model = Net().cuda()
    torch.cuda.nvtx.mark("here")
    with torch.cuda.nvtx.range("from nvtx"):
        hidden = model.layers[0](torch.randn(64, 256, device="cuda"))
    model.head(hidden).sum().backward()


def threads():
    """Two threads in ranges of their own at the same time; one ends a range that it never began."""
    import memtrace

    both = threading.Barrier(2)

    def work(name, size):
        with memtrace.annotate(name):
            both.wait()
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            both.wait()

    torch.empty(1, device="cuda")
    kept = []
    library.memtrace_pop()
    all_threads = [threading.Thread(target=work, args=(f"thread {i}", 4_000_000 + i)) for i in range(2)]
    for thread in all_threads:
        thread.start()
    for thread in all_threads:
        thread.join()
    kept.append(torch.empty(4_000_002, dtype=torch.uint8, device="cuda"))
    library.memtrace_dump(path.encode())


def watched(checkpoint=False):
    import memtrace

    with memtrace.annotate("init"):
        model = Net(checkpoint=checkpoint).cuda()
    memtrace.watch(model)
    for number in range(2):
        memtrace.step(number)
        train(model, steps=1)


def hooked():
    """Somebody else's function is where memtrace's would be: modules say by their hooks that they are called."""
    nn.Module._compiled_call_impl = lambda self, *args, **kwargs: self._call_impl(*args, **kwargs)
    watched()


def closure():
    """The optimizer calls the model, as Lightning has it."""
    import memtrace

    model = Net().cuda()
    memtrace.watch(model)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, 256, device="cuda")

    def pass_():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        return loss

    for _ in range(2):
        with memtrace.annotate("around"):
            optimizer.step(pass_)


def caught():
    """An exception leaves the model in the middle of a module; what follows is outside again."""
    import memtrace

    model = Net().cuda()
    memtrace.watch(model)

    def fail(*_):
        raise ValueError("on purpose")

    handle = model.layers[1].up.register_forward_pre_hook(fail)
    try:
        model(torch.randn(64, 256, device="cuda"))
    except ValueError:
        pass
    handle.remove()
    assert memtrace.current_label() == "", memtrace.current_label()
    with memtrace.annotate("around"):
        model(torch.randn(64, 256, device="cuda"))
        assert memtrace.current_label() == "around"


def removed():
    import memtrace

    model = Net().cuda()
    with memtrace.watch(model):
        pass
    hooks = [h for m in model.modules() for h in (m._forward_pre_hooks, m._forward_hooks)]
    assert not any(hooks), hooks
    train(model)


def past_pytorch():
    """A program whose modules take memory from the driver itself, as libraries do."""
    import memtrace

    def take(size):
        at = ctypes.c_void_p()
        assert library.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)) == 0
        return at

    def physical(size):
        handle, properties = ctypes.c_uint64(), (ctypes.c_int * 8)(1, 0, 1, 0)
        assert library.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0)) == 0
        return handle

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert library.cudaFree(take(40_000_000)) == 0
            kept.append(physical(2 << 20))
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            kept.append(take(3_000_000))
            return 2 * gradient

    class Raw(nn.Module):
        def forward(self, x):
            return Twice.apply(x)

    model = nn.Sequential(nn.Identity(), Raw())
    memtrace.watch(model)
    batch = torch.ones(8, device="cuda", requires_grad=True)
    kept = []
    with memtrace.annotate("load"):
        kept.append(take(5_000_000))
        kept.append(take(6_000_000))
    for _ in range(2):
        model(batch).sum().backward()
    assert library.cudaFree(kept[0]) == 0
    take(1_000)


def killed():
    import os
    import signal

    import memtrace

    with memtrace.annotate("before the end"):
        kept = torch.empty(5_000_000, dtype=torch.uint8, device="cuda")
        memtrace.mark("the end")
        os.kill(os.getpid(), signal.SIGKILL)
    del kept


def forked():
    """A child that is forked inside a range goes on inside it, with a record of its own."""
    import os

    import memtrace

    with memtrace.annotate("parent's range"):
        child = os.fork()
        if child == 0:
            with memtrace.annotate("child's"):
                torch.empty(6_000_000, dtype=torch.uint8, device="cuda")
                library.memtrace_dump(path.encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def many():
    """More names than there is room for: the ranges around them stay right, and what is missing is counted."""
    import memtrace

    torch.empty(1, device="cuda")
    with memtrace.annotate("outer"):
        for i in range(40_000):
            with memtrace.annotate(f"{i:0>40}"):
                pass
        with memtrace.annotate("no room for this name"):
            kept = torch.empty(7_000_000, dtype=torch.uint8, device="cuda")
    library.memtrace_dump(path.encode())
    del kept


runs = {
    "checkpoint": lambda: watched(checkpoint="plain"),
    "reentrant": lambda: watched(checkpoint="reentrant"),
}
(runs.get(how) or globals()[how])()
if how not in ("threads", "forked", "many"):
    assert library.memtrace_dump(path.encode()) == 0
