"""`memtrace.Tracer`: phases, modules, operators and the life of every
tensor's memory, on exact data.

Tracers that run a program on fake tensors know what a step will take by running every operator
through Python, and by rules for what the allocator does. Here the program runs as it is, on a card
or on a virtual one, and the library writes down what PyTorch's allocator really did; the tracer
only says which stretch of the program was which, and works out the rest afterwards. It must never
change what the program does, nor say a number that the allocator would not.

- `_session.py` has `Tracer`: what is put in place for the time of a `with` block;
- `_results.py` makes one pass over what was written down;
- `_report.py` is what comes out: tables with `to_dict()`, `print()` and `plot()`;
- `_device.py` knows where the process runs, and `ensure_device`;
- `plugins/` has what libraries beside PyTorch need.
"""

from __future__ import annotations

from ._device import ensure_device
from ._report import DeviceUse, Devices, Lifetime, Lifetimes, PhaseCall, PhaseUse, Report, Share, Table
from ._session import Tracer
from .plugins import Plugin

__all__ = [
    "DeviceUse",
    "Devices",
    "Lifetime",
    "Lifetimes",
    "PhaseCall",
    "PhaseUse",
    "Plugin",
    "Report",
    "Share",
    "Table",
    "Tracer",
    "ensure_device",
]
