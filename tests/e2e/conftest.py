"""Real PyTorch on the virtual GPU."""

import importlib.util

import pytest
import support


def pytest_configure(config):
    if importlib.util.find_spec("torch") is None:
        raise pytest.UsageError(f"{support.PYTHON} has no PyTorch: run scripts/setup and use .venv/bin/python")


@pytest.fixture(scope="session")
def snapshot_file(tmp_path_factory):
    """A snapshot of a small transformer after its training, for tests that only read."""
    return support.record_alive("transformer.py", tmp_path_factory.mktemp("snapshot"))[0]
