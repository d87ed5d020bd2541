"""What all suites share: their option, one early line about what is missing, and
that tests leave nothing in memory."""

import os
import sys
from pathlib import Path

import pytest

for folder in ("e2e", "hazards", "clients"):
    sys.path.insert(0, str(Path(__file__).resolve().parent / folder))

import support  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--extended", action="store_true", help="everything in full length: programs, kills, random walks")


def pytest_configure(config):
    for needed in (support.MEMTRACE, support.LIBRARY):
        if not needed.exists():
            raise pytest.UsageError(f"{needed} is not built: run scripts/setup first, or set MEMTRACE_BUILD")


@pytest.fixture(autouse=True)
def no_boxes_left(tmp_path):
    """A killed process leaves its black box in memory, and a link to it in the
    output folder: both go with the test."""
    yield
    for link in tmp_path.rglob("*.blackbox"):
        # Not the target of a test's link.
        if link.is_symlink() and (box := Path(os.path.realpath(link))).suffix == ".blackbox" and box.is_file():
            box.unlink(missing_ok=True)
