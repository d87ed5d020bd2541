"""Says early and in one line what is missing, instead of failing in every test."""

import importlib.util

import pytest
import support


def pytest_addoption(parser):
    parser.addoption("--extended", action="store_true", help="all random programs for the allocator, in full length")


def pytest_configure(config):
    missing = [p for p in (support.MEMTRACE, support.LIBRARY) if not p.exists()]
    if missing:
        raise pytest.UsageError(f"{missing[0]} is not built: run scripts/setup first, or set MEMTRACE_BUILD")
    if importlib.util.find_spec("torch") is None:
        raise pytest.UsageError(f"{support.PYTHON} has no PyTorch: run scripts/setup and use .venv/bin/python")


@pytest.fixture(scope="session")
def snapshot_file(tmp_path_factory):
    """A snapshot of a small transformer after its training, for tests that only read."""
    return support.record_alive("transformer.py", tmp_path_factory.mktemp("snapshot"))[0]
