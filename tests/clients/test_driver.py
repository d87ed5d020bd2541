"""The driver API, one call after the other, in each way of reaching it."""

import client
import pytest

WAYS = ["symbol", "dlsym", "deepbind", "dlvsym", "get-proc-address", "get-proc-address-v2", "entry-point", "entry-point-by-version"]


@pytest.mark.parametrize("way", WAYS)
def test_the_ledger_is_exact_after_each_call(way, programs, gpu, tmp_path):
    env = {**gpu, "CLIENT_VERSIONED": str(programs / "libversioned.so")}
    done, said = client.run([programs / "driver", way], env, tmp_path)
    assert len(client.check_steps(said)) > 40
    assert client.complaints(done) == []
    pool = next(s for s in said if "pool" in s)
    after = next(s for s in said if s.get("step") == "cuMemPoolGetAttribute")
    _, snapshot = client.ledger(after["path"])
    [found] = snapshot["memtrace"]["ledger"]["pools"]
    assert {k: found[k] for k in ("pool", "device", "reserved")} == pool
