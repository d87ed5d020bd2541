"""memtrace: the flight recorder for GPU memory, from Python.

Thin on purpose: what is recorded, counted and handed out is the library's (`libmemtrace.so`). This
package finds it, calls it, and gives its answers the form that Python programmers know. Importing
it loads neither PyTorch nor the library: each name is brought in when it is first used.

From a checkout, `PYTHONPATH=python` is all that is needed beside a built library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module it lives in. A new one is a line here, one below for
# type checkers, and one in `__all__`.
_HOME = {
    "LibraryNotFoundError": "_library",
    "MemTracker": "mem_tracker",
    "MemoryTracker": "memory_tracker",
    "MemtraceError": "_library",
    "Tracer": "tracer",
    "Usage": "recording",
    "Watch": "watching",
    "annotate": "labels",
    "configure_logging": "logs",
    "current_label": "labels",
    "dump": "recording",
    "ensure_device": "tracer",
    "install": "allocator",
    "is_installed": "allocator",
    "is_recording": "recording",
    "load_ipython_extension": "jupyter",
    "mark": "labels",
    "peak": "recording",
    "profile": "recording",
    "snapshot": "recording",
    "start": "recording",
    "stats": "recording",
    "step": "labels",
    "steps": "integrations.loop",
    "stop": "recording",
    "watch": "watching",
}

if TYPE_CHECKING:
    from ._library import LibraryNotFoundError, MemtraceError
    from .allocator import install, is_installed
    from .integrations.loop import steps
    from .jupyter import load_ipython_extension
    from .labels import annotate, current_label, mark, step
    from .logs import configure_logging
    from .recording import Usage, dump, is_recording, peak, profile, snapshot, start, stats, stop
    from .mem_tracker import MemTracker
    from .memory_tracker import MemoryTracker
    from .tracer import Tracer, ensure_device
    from .watching import Watch, watch

__all__ = [
    "LibraryNotFoundError",
    "MemTracker",
    "MemoryTracker",
    "MemtraceError",
    "Tracer",
    "Usage",
    "Watch",
    "__version__",
    "annotate",
    "configure_logging",
    "current_label",
    "dump",
    "ensure_device",
    "install",
    "is_installed",
    "is_recording",
    "load_ipython_extension",
    "mark",
    "peak",
    "profile",
    "snapshot",
    "start",
    "stats",
    "step",
    "steps",
    "stop",
    "watch",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
