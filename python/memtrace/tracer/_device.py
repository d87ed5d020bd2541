"""Which device a tracer is asked for, and whether this process is on it.

A virtual GPU replaces NVIDIA's libraries, and a library that is loaded cannot be
replaced. PyTorch's functions are bound when `import torch` loads them. So a process is on
a virtual GPU from its first instruction or never. A tracer that is asked for another
device than the one at hand refuses, and names the command that gives it. `ensure_device`
runs that command in place of the program.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .. import _library
from .._library import MemtraceError

VIRTUAL = "virtual:"
_AGAIN = "MEMTRACE_DEVICE_ENSURED"
_CUDA = re.compile(r"cuda(?::(\d+))?")


class Place(NamedTuple):
    """What this process runs on."""

    name: str
    virtual: str | None
    """The value of `memtrace run --virtual`; `None` on a real card."""
    number: int | None
    """The device that is meant, if one is."""


def virtual_gpu() -> dict[str, Any] | None:
    """What the virtual GPU says of itself; `None` where there is none."""
    stats = getattr(ctypes.CDLL(None), "memtrace_virtual_stats", None)
    if stats is None:
        return None
    stats.argtypes, stats.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_size_t
    text = ctypes.create_string_buffer(stats(None, 0) + 1)
    stats(text, len(text))
    known: dict[str, Any] = json.loads(text.value)
    return known


def place(device: str | None) -> Place:
    """Where this process is, if that is what is asked for; else
    `MemtraceError`, which says what to do."""
    wanted, index = _parse(device)
    virtual = virtual_gpu()
    if wanted is not None and not _is(virtual, wanted):
        now = f"the virtual GPU {virtual['spec']}" if virtual else "no virtual GPU"
        raise MemtraceError(
            f"Tracer(device={device!r}): this process is on {now}, and that cannot change once it runs. Start it as "
            f"`{shlex.join(command(device))}`, or call memtrace.ensure_device({device!r}) in its first lines"
        )
    if not _library.is_loaded():
        raise MemtraceError(
            f"Tracer needs memtrace in the process: start it as `{shlex.join(command(device))}`, or call "
            f"memtrace.ensure_device({device or 'cuda'!r}) in its first lines"
        )
    if virtual is not None:
        return Place(str(virtual["name"]), str(virtual["spec"]), index)
    import torch

    available = torch.cuda.is_available()
    return Place(torch.cuda.get_device_name(index) if available else "no CUDA device", None, index)


def ensure_device(device: str = "cuda") -> None:
    """Goes on if this process runs under memtrace on this device; else the
    program begins anew, so that it does.

        import memtrace
        memtrace.ensure_device("virtual:h100")

    `"virtual:h100"`, `"virtual:a100-80*2"`, whatever `memtrace run --virtual` takes, or `"cuda"`
    for the card at hand. It belongs into a script's first lines: what ran before runs twice. The
    process keeps its number, arguments and environment; it becomes `memtrace run -- python …`.
    """
    wanted, _ = _parse(device)
    if _library.is_preloaded() and (wanted is None or _is(virtual_gpu(), wanted)):
        return
    if os.environ.get(_AGAIN) == device:
        raise MemtraceError(f"the program was started anew for {device}, and is not on it: see what `memtrace doctor` says")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise MemtraceError(f"ensure_device({device!r}) comes too late: CUDA is in use. Call it in the program's first lines")
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise MemtraceError(f"an interactive session cannot begin anew: start it as `{shlex.join(command(device))}`")
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[_AGAIN] = device
    arguments = command(device)
    os.execv(_tool(), arguments)


def command(device: str | None) -> list[str]:
    """The command that runs this program on the device, under memtrace."""
    wanted, _ = _parse(device)
    with open("/proc/self/cmdline", "rb") as file:
        program = [os.fsdecode(part) for part in file.read().split(b"\0")[:-1]]
    program[:1] = [sys.executable or program[0]]
    return ["memtrace", "run", *(["--virtual", wanted] if wanted else []), "--", *program]


def _tool() -> str:
    """The command `memtrace`: beside the library in a build, else where the
    package's environment puts commands."""
    places = [_library.find().parent, Path(sys.prefix) / "bin"]
    for folder in places:
        if os.access(folder / "memtrace", os.X_OK):
            return str(folder / "memtrace")
    found = shutil.which("memtrace")
    if found is None:
        raise MemtraceError("the command memtrace was not found: install the wheel, or put it on PATH")
    return found


def _parse(device: str | None) -> tuple[str | None, int | None]:
    """The virtual GPU that is asked for, and the number of a device."""
    if device is None:
        return None, None
    if device.startswith(VIRTUAL) and device != VIRTUAL:
        return device[len(VIRTUAL) :], None
    found = _CUDA.fullmatch(device)
    if found is None:
        raise MemtraceError(
            f"a device is 'cuda', 'cuda:0' or 'virtual:' and a name that `memtrace devices` lists, not {device!r}"
        )
    return None, int(found[1]) if found[1] else None


def _is(virtual: dict[str, Any] | None, wanted: str) -> bool:
    """Is it the one? Who names only the card takes any number of it."""

    def plain(text: object) -> str:
        return re.sub(r"[\s_-]", "", str(text)).lower()

    return virtual is not None and plain(wanted) in (plain(virtual["spec"]), plain(virtual["profile"]))
