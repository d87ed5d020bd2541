"""C and Rust programs that call CUDA in every way there is; after each
call the ledger must be exact."""

import client
import hazard
import pytest


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """The C programs and libraries beside this file, built."""
    return client.build(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def gpu():
    """The environment of a program on two virtual GPUs, recorded: what `memtrace run` sets."""
    return hazard.virtual_environment("h100*2")
