"""Finding `libmemtrace.so` and calling it.

There must be one recorder in a process, so a library that is loaded already, preloaded or by
whomever, is the one we use. Else the first of: what `MEMTRACE_LIBRARY` names, the one beside this
package (a wheel), the newest build in this checkout's target folder. Nothing is searched for on
`LD_LIBRARY_PATH`: whatever is there may be of another version.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Iterator, TypeVar

from . import _interface

FILE_NAME = "libmemtrace.so"

Library = TypeVar("Library", bound=ctypes.CDLL)

_package = Path(__file__).resolve().parent
_library: ctypes.CDLL | None = None


class MemtraceError(RuntimeError):
    """Something memtrace can't do, with what to do about it."""


class LibraryNotFoundError(MemtraceError, ImportError):
    """There is no `libmemtrace.so`, or it can't be loaded."""


def load() -> ctypes.CDLL:
    """The library; the same one for the life of the process.

    Raises `LibraryNotFoundError`, which says where it was looked for.
    """
    global _library
    if _library is None:
        _library = declare(_already_loaded() or _open(find()))
    return _library


def text(answer: int | None) -> str | None:
    """The text of an answer that is a string, which is given back to the library."""
    if not answer:
        return None
    found = ctypes.string_at(answer).decode("utf-8", "replace")
    load().memtrace_string_free(answer)
    return found


def address(function: str) -> int:
    """Where one of the library's functions is."""
    return ctypes.cast(getattr(load(), function), ctypes.c_void_p).value or 0


def is_preloaded() -> bool:
    """Was the library there before the program (`memtrace run`, `LD_PRELOAD`),
    so that it sees every CUDA call?"""
    return hasattr(ctypes.CDLL(None), "memtrace_version")


def is_loaded() -> bool:
    """Is the library in this process, however it came there? Asked anew until it is."""
    return _library is not None or _already_loaded() is not None


def find() -> Path:
    """The file that `load` would load if none is loaded yet."""
    named = os.environ.get("MEMTRACE_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise LibraryNotFoundError(f"MEMTRACE_LIBRARY names {named}, which is not a file")
        return Path(named)
    tried = []
    for place in _places():
        if place.is_file():
            return place
        tried.append(str(place))
    raise LibraryNotFoundError(
        f"{FILE_NAME} was not found. Build it (`cargo build --release` in a checkout), install the wheel, or set "
        "MEMTRACE_LIBRARY to its path. Looked for: " + ", ".join(tried)
    )


def _places() -> Iterator[Path]:
    yield _package / FILE_NAME
    yield _package / "lib" / FILE_NAME
    checkout = _package.parents[1]
    if (checkout / "Cargo.toml").is_file():
        target = Path(os.environ.get("CARGO_TARGET_DIR") or "target")
        builds = [checkout / target / profile / FILE_NAME for profile in ("release", "debug")]
        # Whoever has just built one means that one.
        yield from sorted(builds, key=lambda p: p.stat().st_mtime if p.is_file() else 0.0, reverse=True)


def _already_loaded() -> ctypes.CDLL | None:
    if is_preloaded():
        return ctypes.CDLL(None)
    # Opened by path, as `torch.cuda.memory.CUDAPluggableAllocator` does it.
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if path[2].rpartition("/")[2] == FILE_NAME:
                return _open(Path(path[1] + path[2]))
    return None


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryNotFoundError(f"{path} can't be loaded: {error}") from error


def declare(library: Library) -> Library:
    """The library with what each of its functions takes and returns."""
    for name, (result, arguments) in _interface.FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise LibraryNotFoundError(
                f"{FILE_NAME} has no function {name}: it is of another version than this package. Build both from one "
                "checkout, or unset MEMTRACE_LIBRARY"
            ) from None
        function.restype, function.argtypes = result, arguments
    return library
