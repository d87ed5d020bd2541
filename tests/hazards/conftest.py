"""Programs in trouble: what memtrace must survive, and what it must leave behind."""

import shutil
import tempfile
from pathlib import Path

import hazard
import pytest


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The C programs and libraries beside this file, built."""
    return hazard.build(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def gpu():
    """The environment of a program on a virtual GPU, recorded: what `memtrace run` sets. Black
    boxes go where they would go anyway, but into a folder that can be removed."""
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="memtrace-test-", dir=memory if memory.is_dir() else None)
    yield {**hazard.virtual_environment(), "MEMTRACE_BLACKBOX": folder}
    shutil.rmtree(folder)
