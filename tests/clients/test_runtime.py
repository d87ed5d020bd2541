"""The runtime API, and memory that processes share."""

import json

import client
import pytest


@pytest.mark.parametrize("way", ["symbol", "dlsym", "deepbind"])
def test_the_ledger_is_exact_after_each_call(way, programs, gpu, tmp_path):
    env = {**gpu, "CLIENT_CUDART": "libcudart.so.13"}
    done, said = client.run([programs / "runtime", way], env, tmp_path)
    assert len(client.check_steps(said)) > 20
    assert client.complaints(done) == []
    pool = next(s for s in said if "pool" in s)
    after = next(s for s in said if s.get("step") == "cudaMemPoolGetAttribute")
    _, snapshot = client.ledger(after["path"])
    found = [p for p in snapshot["memtrace"]["ledger"]["pools"] if p["pool"] == pool["pool"]]
    assert [{k: p[k] for k in ("pool", "device", "reserved")} for p in found] == [pool]


@pytest.mark.parametrize("way", ["ipc", "driver-ipc"])
def test_memory_of_another_process_is_not_counted_here(way, programs, gpu, tmp_path):
    done, said = client.run([programs / "shared", way], gpu, tmp_path)
    assert client.check_steps(said) == ["open", "close"]
    opened, closed = (json.loads(open(s["path"]).read()) for s in said)
    for snapshot in (opened, closed):
        assert snapshot["segments"] == [] and snapshot["device_traces"] in ([], [[]])
        assert snapshot["memtrace"]["counters"]["anomalies"] == 0
    assert client.events(closed) == client.events(opened) + 1
