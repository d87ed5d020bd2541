"""A random walk over the driver's memory calls, against a model: a client in
Rust that opens the driver itself."""

import json
from pathlib import Path

import client
import pytest
import support

# The history is kept short on purpose: most of what is alive at a
# checkpoint is in the live table alone.
EVENTS = "4096"


@pytest.fixture(scope="session")
def walk():
    return support.example("walk")


def segments(snapshot):
    """Address, size and device of everything that is shown; the host's is −1."""
    return sorted([s["address"], s["total_size"], s["device"]] for s in [*snapshot["segments"], *snapshot["host_segments"]])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_ledger_equals_the_model(seed, walk, gpu, tmp_path, pytestconfig):
    calls = 1_000_000 if pytestconfig.getoption("--extended") else 30_000
    env = {**gpu, "MEMTRACE_EVENTS": EVENTS}
    _, said = client.run([walk, calls, seed], env, tmp_path, timeout=600)
    assert len(client.check_steps(said)) == 8
    for step in said:
        snapshot = json.loads(Path(step["path"]).read_text())
        assert segments(snapshot) == step["segments"], step["step"]
    counters = snapshot["memtrace"]["counters"]
    assert counters["live_refused"] == 0 and counters["events_retired"] > calls / 3
    assert len(step["segments"]) > 100
