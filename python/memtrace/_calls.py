"""How calls of modules are noticed.

At each call `torch.nn.Module` looks whether the module has a compiled form. That is the attribute
`_compiled_call_impl`, which its class sets to `None`. While anything is watched, the class has a
function there that only calls `_call_impl`. Python calls this function through the library
(`src/pytorch/modules.rs`), which opens the module's range first. That takes a tenth of the time of
a hook, has no frame of Python, and puts nothing into the module. Copies, pickles and replicas of a
module are therefore what they were. Where `torch.compile` looks at a call (it does if the module
has hooks), it follows the function that does nothing. A module that was compiled by itself
(`module.compile()`) has an attribute of its own and is not seen, as its inside isn't.

Where a PyTorch doesn't look at that attribute, or another library uses it,
PyTorch's public hooks do the same, slower.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator

from ._native import Native

if TYPE_CHECKING:
    import torch

# What is said when a module is called, as in `include/memtrace.h`.
FORWARD, MODULE, NUMBER = range(3)

_ATTRIBUTE = "_compiled_call_impl"
_numbers = itertools.count(1)
_placed: set[Calls] = set()


_NEXT = "_call_impl"  # must outlive every use that the interpreter makes of it
_method_of_calls: Any = None


class Calls:
    """What one watcher wants said; until `remove()`, or for the life of the process."""

    def __init__(self, known: Native) -> None:
        self._known = known
        self._number = next(_numbers)
        self._modules: list[weakref.ref[torch.nn.Module]] = []
        self._hooks: list[Any] = []

    def add(self, module: torch.nn.Module, sort: int, name: str = "", number: int = 0) -> None:
        """Whenever the module is called: the phase `forward`, the range of a
        module, or (for operators) a number."""
        if self not in _placed:
            _placed.add(self)
            _install(self._known)
        if not _is_installed():
            self._hooks.extend(_hooks(self._known, module, sort, name, number))
            return
        address, forget = id(module), self._known.calls_forget
        self._known.calls_add(address, self._number, sort, name.encode(), number)
        self._modules.append(weakref.ref(module, lambda _: forget(address)))

    def remove(self) -> None:
        """Takes all back."""
        if self not in _placed:
            return
        _placed.remove(self)
        self._known.calls_remove(self._number)
        self._modules.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if not _placed:
            _uninstall()


def _is_installed() -> bool:
    import torch

    return _method_of_calls is not None and torch.nn.Module.__dict__.get(_ATTRIBUTE) is _method_of_calls


def _install(known: Native) -> None:
    import torch

    global _method_of_calls
    module = torch.nn.Module
    code = getattr(getattr(module, "_wrapped_call_impl", None), "__code__", None)
    if code is None or _ATTRIBUTE not in code.co_names or module.__dict__.get(_ATTRIBUTE, 0) is not None:
        return
    if _method_of_calls is None:
        _method_of_calls = _make_method(known)
    if _method_of_calls is not None:
        setattr(module, _ATTRIBUTE, _method_of_calls)


def _make_method(known: Native) -> Any:
    def _compiled_call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)

    python = ctypes.pythonapi
    known.calls_begin(_address(python.PyObject_VectorcallMethod), id(_NEXT))
    if sys.version_info >= (3, 12):
        python.PyFunction_SetVectorcall.restype = None
        python.PyFunction_SetVectorcall.argtypes = [ctypes.py_object, ctypes.c_void_p]
        python.PyFunction_SetVectorcall(_compiled_call_impl, known.module_called)
        return _compiled_call_impl
    # What that does has no function of its own in older ones: the word is
    # recognised by what is in it.
    usual = _address(python._PyFunction_Vectorcall)
    size = sys.getsizeof(_compiled_call_impl) // ctypes.sizeof(ctypes.c_void_p)
    words = (ctypes.c_void_p * min(size, 16)).from_address(id(_compiled_call_impl))
    found = [i for i, word in enumerate(words) if word == usual]
    if len(found) != 1:
        return None
    words[found[0]] = known.module_called
    return _compiled_call_impl


def _uninstall() -> None:
    import torch

    if _is_installed():
        setattr(torch.nn.Module, _ATTRIBUTE, None)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _hooks(known: Native, module: torch.nn.Module, sort: int, name: str, number: int) -> Iterator[Any]:
    from torch.compiler import is_dynamo_compiling

    text = name.encode()
    depths: list[int] = []
    open_: Callable[[], int] = {
        FORWARD: lambda: known.push_phase(b"forward"),
        MODULE: lambda: known.push_module(text),
        NUMBER: lambda: known.operators_module(number) or 0,
    }[sort]

    def before(module_: Any, args: Any) -> None:
        if not is_dynamo_compiling():
            depths.append(open_())

    def after(module_: Any, args: Any, output: Any) -> None:
        if not is_dynamo_compiling() and depths and sort != NUMBER:
            known.unwind(depths.pop())

    yield module.register_forward_pre_hook(before, prepend=sort != NUMBER)
    if sort != NUMBER:
        yield module.register_forward_hook(after, always_call=True)
