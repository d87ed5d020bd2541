"""Jupyter: `%load_ext memtrace`, then `%%memtrace [NAME]` at the top of a
cell says what the cell took."""

from __future__ import annotations

from typing import Any

from ._library import MemtraceError
from .labels import annotate
from .recording import peak, start


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext memtrace`; begins to record, if the notebook
    has not touched CUDA yet."""
    try:
        how = start()
    except MemtraceError as error:
        print(f"memtrace: {error}")
    else:
        print({"none": "memtrace: no CUDA here"}.get(how, f"memtrace: recording ({how})"))
    shell.register_magic_function(lambda line, cell: _cell(shell, line, cell), "cell", "memtrace")


def _cell(shell: Any, line: str, cell: str) -> None:
    name = line.strip() or f"cell {shell.execution_count}"
    with annotate(name), peak() as measured:
        result = shell.run_cell(cell)
    print(f"memtrace: {name}: {measured}")
    result.raise_error()
