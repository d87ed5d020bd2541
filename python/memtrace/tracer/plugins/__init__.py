"""Plugins of `memtrace.Tracer`: what a library has to say, or needs, while a tracer is on.

A plugin is wanted if the program has imported its library; else it is left out, quietly, and the
library is not imported for it. One of your own is a class derived from `Plugin`. An object of it
goes into `Tracer(plugins=["auto", mine])`. Or its class goes into the entry points
`memtrace.plugins` of an installed package, which `"auto"` includes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Sequence

from ..._library import MemtraceError

if TYPE_CHECKING:
    from .._results import OperatorCalls
    from .._session import Tracer


class Plugin:
    """The face of a plugin. All that is here may be left as it is but `name`."""

    name = ""
    library = ""
    """The module that must have been imported; `""`: none."""

    def is_wanted(self) -> bool:
        """Is there anything to do in this process?"""
        return not self.library or self.library in sys.modules

    def begin(self, tracer: Tracer) -> None:
        """The tracer begins. What this raises, its `with` statement raises;
        nothing may be left behind then."""

    def end(self) -> None:
        """The tracer has made its report: whatever was changed goes back to what it was."""

    def report(self, operators: OperatorCalls) -> dict[str, Any]:
        """What to add to the report under the plugin's name, in plain values. `operators`: how
        often each was called; empty without `operators=True`."""
        return {}


def chosen(plugins: str | Sequence[str | Plugin]) -> list[Plugin]:
    """The plugins that a program asks for: `"auto"`, names, objects."""
    found: dict[str, Plugin] = {}
    for one in [plugins] if isinstance(plugins, str) else plugins:
        if isinstance(one, Plugin):
            found[one.name] = one
        elif one == "auto":
            for plugin in (*built_in().values(), *_installed().values()):
                found.setdefault(plugin.name, plugin)
        else:
            known = built_in() if one in built_in() else _installed()
            if one not in known:
                raise MemtraceError(f"there is no plugin {one!r}: {', '.join((*built_in(), *_installed()))}, or 'auto'")
            found[one] = known[one]
    return list(found.values())


def built_in() -> dict[str, Plugin]:
    """Those that come with memtrace."""
    from .distributed import Distributed
    from .megatron import Megatron

    return {plugin.name: plugin for plugin in (Distributed(), Megatron())}


def _installed() -> dict[str, Plugin]:
    """Those of other packages."""
    from importlib import metadata

    known = metadata.entry_points()
    # Before CPython 3.10 a dictionary.
    points = known.select(group="memtrace.plugins") if hasattr(known, "select") else known.get("memtrace.plugins", ())
    plugins = [point.load()() for point in points]
    return {plugin.name: plugin for plugin in plugins}
