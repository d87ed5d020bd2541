"""Files that the package writes in folders that others may write to, made
as the library makes its own."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write to, which gets its name when it is complete. It is its owner's alone; one
    that it replaces hands its permissions on. A link is replaced, not followed. A FIFO, a device or
    a folder is left alone: `OSError`."""
    path = Path(path)
    mode = 0o600
    with contextlib.suppress(FileNotFoundError):
        old = path.lstat()
        if stat.S_ISREG(old.st_mode):
            mode = stat.S_IMODE(old.st_mode) & 0o777
        elif not path.is_symlink() or path.exists() and not path.is_file():
            raise OSError(f"{path}: what is there is not a plain file; name another one")
    # New under a name that nobody can guess, without following a link, for its owner alone.
    descriptor, beside = tempfile.mkstemp(prefix=".memtrace-", suffix=".part", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            yield file
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
