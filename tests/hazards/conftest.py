"""Programs in trouble: what memtrace must survive, and what it must leave behind."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import support  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--extended", action="store_true", help="ten times as many kills")


def pytest_configure(config):
    for needed in (support.MEMTRACE, support.LIBRARY):
        if not needed.exists():
            raise pytest.UsageError(f"{needed} is not built: run scripts/setup first, or set MEMTRACE_BUILD")


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The C programs and libraries beside this file, built."""
    import hazard

    return hazard.build(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def gpu():
    """The environment of a program on a virtual GPU, recorded: what `memtrace run` sets. Black boxes go where they
    would go anyway, but into a folder that can be removed."""
    import hazard

    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="memtrace-test-", dir=memory if memory.is_dir() else None)
    yield {**hazard.virtual_environment(), "MEMTRACE_BLACKBOX": folder}
    shutil.rmtree(folder)
