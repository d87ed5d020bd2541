"""C and Rust programs that call CUDA in every way there is; after each call the books must be exact."""

import sys
from pathlib import Path

import pytest

for folder in ("e2e", "hazards"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))

import support  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--extended", action="store_true", help="a million steps of the random walk")


def pytest_configure(config):
    for needed in (support.MEMTRACE, support.LIBRARY):
        if not needed.exists():
            raise pytest.UsageError(f"{needed} is not built: run scripts/setup first, or set MEMTRACE_BUILD")


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The C programs and libraries beside this file, built."""
    import client

    return client.build(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def gpu():
    """The environment of a program on two virtual GPUs, recorded: what `memtrace run` sets."""
    import hazard

    return hazard.virtual_environment("h100*2")
