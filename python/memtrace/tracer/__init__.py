"""`memtrace.Tracer`: phases, modules, operators and the life of every
tensor's memory, on exact data.

Other tracers run a program on fake tensors. They run every operator through Python, and have rules
for what the allocator does. Here the program runs as it is, on a card or on a virtual one. The
library writes down what PyTorch's allocator really did. The tracer only marks the phases of the
program, and works out the rest afterwards. It must never change what the program does, nor report a
number that the allocator would not.

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
