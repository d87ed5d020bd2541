"""What memtrace's Python side has to say, as structured log records.

Everything goes to the standard logger `memtrace` and those below it, so a program's own
logging sees it and decides. Without a word from the program or the environment warnings
and errors are printed, as Python does by itself. `MEMTRACE_LOG_LEVEL` and
`MEMTRACE_LOG_FILE`, or `configure_logging`, ask for more: readable lines on stderr (in
colour where `rich` is installed), and JSON in a file, one object a line. A record's facts
are in its attribute `memtrace`, a dictionary.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from . import _interface

LEVELS = dict(zip(_interface.LOG_LEVELS, (10, 20, 30, 40, 60)))

_root = logging.getLogger("memtrace")
_ours: list[logging.Handler] = []
_from_environment = False


def get(name: str) -> logging.Logger:
    """The logger of a part of the package; what the environment asks for
    is done at the first use."""
    global _from_environment
    if not _from_environment:
        _from_environment = True
        _read_environment()
    return logging.getLogger(f"memtrace.{name}")


def say(logger: logging.Logger, level: int, message: str, **facts: Any) -> None:
    """A line with facts: `tracer ended peak=123 device=cuda:0`."""
    if logger.isEnabledFor(level):
        logger.log(level, message, extra={"memtrace": facts})


def configure_logging(
    level: str | int = "info", *, file: str | os.PathLike[str] | None = None, rich: bool | None = None
) -> None:
    """Sets what memtrace's Python side logs, and where. It replaces earlier settings.

    `level`: `debug`, `info`, `warning`, `error`, `off`. `file`: JSON lines go there,
    beside stderr. `rich`: colours by the package of that name; by default if it is
    installed and stderr is a terminal.
    """
    number = LEVELS.get(str(level).strip().lower()) if not isinstance(level, int) else level
    if number is None:
        raise ValueError(f"a log level is {', '.join(LEVELS)}, not {level!r}")
    for handler in _ours:
        _root.removeHandler(handler)
        handler.close()
    _ours[:] = [_terminal(rich)]
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        written = logging.FileHandler(file, encoding="utf-8")
        written.setFormatter(_Json())
        _ours.append(written)
    for handler in _ours:
        _root.addHandler(handler)
    _root.setLevel(number)
    _root.propagate = False


def _read_environment() -> None:
    level, file = os.environ.get("MEMTRACE_LOG_LEVEL"), os.environ.get("MEMTRACE_LOG_FILE")
    if level is None and not file:
        return
    if level is not None and level.strip().lower() not in LEVELS:
        print(
            f"memtrace: MEMTRACE_LOG_LEVEL={level!r} is not one of {', '.join(LEVELS)}; warnings are shown", file=sys.stderr
        )
        level = "warning"
    try:
        configure_logging(level or "info", file=file or None)
    except OSError as error:
        print(f"memtrace: MEMTRACE_LOG_FILE={file!r} can't be written: {error.strerror}", file=sys.stderr)
        configure_logging(level or "info")


def _terminal(rich: bool | None) -> logging.Handler:
    if rich or (rich is None and sys.stderr.isatty()):
        try:
            from rich.console import Console
            from rich.logging import RichHandler
        except ImportError:
            if rich:
                raise
        else:
            handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False)
            handler.setFormatter(_Plain(""))
            return handler
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("memtrace: %(levelname)s: "))
    return handler


class _Plain(logging.Formatter):
    """A message, and its facts as `name=value`."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix + "%(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in getattr(record, "memtrace", {}).items())
        return super().formatMessage(record) + facts


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        whole: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **({"rank": int(os.environ["RANK"])} if os.environ.get("RANK", "").isdigit() else {}),
            **getattr(record, "memtrace", {}),
        }
        if record.exc_info:
            whole["error"] = self.formatException(record.exc_info)
        return json.dumps(whole, default=str)
