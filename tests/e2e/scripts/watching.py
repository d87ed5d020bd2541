"""What `memtrace.watch` must leave alone: arguments, errors, copies, replicas, lifetimes, compiled code. Says so by not failing."""

import copy
import gc
import pickle
import weakref

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import memtrace


class Odd(nn.Module):
    """Takes arguments of every kind and more than are usual."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, *more, fail=False, **named):
        if fail:
            raise KeyError("as it was")
        self.seen = memtrace.current_label()
        return self.inner(x), more, named


def label_after(call):
    before = memtrace.current_label()
    call()
    assert memtrace.current_label() == before, (memtrace.current_label(), before)


def refused(module):
    try:
        module(torch.zeros(1, 4), fail=True)
    except KeyError as error:
        assert error.args == ("as it was",)
    else:
        raise AssertionError("no error")


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.odd = Odd()

    def forward(self, *args, **kwargs):
        return self.odd(*args, **kwargs)


torch.zeros(1, device="cuda")
empty = nn.Module._compiled_call_impl
model = Holder()
pickled = pickle.dumps(model)
x = torch.ones(1, 4)
with memtrace.watch(model), memtrace.watch(model.odd, name="again"):
    # Arguments and results.
    many = tuple(range(30))
    names = {f"n{i}": i for i in range(20)}
    y, more, named = model(x, *many, **names)
    assert more == many and named == names
    assert torch.equal(y, model.odd.inner(x))
    assert model.odd.seen.endswith("again") and model.odd.seen.startswith("forward"), model.odd.seen
    # Errors.
    label_after(lambda: refused(model))
    # Copies know nothing; nothing is in the module.
    assert pickle.dumps(model).replace(b"seen", b"") != b"" and not any("memtrace" in key for key in vars(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.odd.inner.weight.zero_()
        twin.odd.inner.bias.fill_(7)
    assert torch.equal(twin(x)[0], torch.full((1, 4), 7.0))
    assert twin.odd.seen == "", twin.odd.seen
    # A replica, as DataParallel makes them, calls its own weights.
    replica = model.odd._replicate_for_data_parallel()
    replica._modules = {"inner": twin.odd.inner}
    assert torch.equal(replica(x)[0], torch.full((1, 4), 7.0))
    # A name that was given comes before the modules' own; wrappers are in no name.
    with memtrace.watch(twin, name="teacher"):
        twin(x)
        assert twin.odd.seen == "forward/teacher.odd", twin.odd.seen
    for wrapped in (AveragedModel(twin), checkpoint_wrapper(twin)):
        with memtrace.watch(wrapped):
            wrapped(x)
        inside = next(module for module in wrapped.modules() if isinstance(module, Odd))
        assert inside.seen == "forward/odd", inside.seen
    # Unwatched modules, whatever they override.
    assert torch.equal(nn.Sequential(nn.Identity(), nn.ReLU())(-x), torch.zeros(1, 4))

    # Compiled: nothing breaks the graph, with hooks of the program's own or without.
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    called = []
    net[1].register_forward_hook(lambda module, args, output: called.append(1) or output)
    with memtrace.watch(net):
        before = net(x)
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), before)
        net.compile(backend="eager", fullgraph=True)
        assert torch.equal(net(x), before)
    assert called
    # Scripted and traced.
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with memtrace.watch(plain):
        assert torch.equal(torch.jit.trace(plain, x)(x), plain(x))
        assert torch.equal(torch.jit.script(plain)(x), plain(x))

    # A watched model goes when its last reference goes.
    gc.collect()
    gc.disable()
    short = nn.Linear(4, 4)
    memtrace.watch(short)
    gone = weakref.ref(short)
    short(x)
    del short
    assert gone() is None, "kept alive"
    gc.enable()

model(x)
assert model.odd.seen == "", model.odd.seen
assert pickle.loads(pickled)(x)[1:] == ((), {})
memtrace.watching  # the module
print("left alone", empty)
