"""What the virtual GPU doesn't have: memory of others, several devices writing together, devices
that nobody named, and (T25) physical memory on the host."""

import client
import support


def test_the_ledger_is_exact_after_each_call(programs, gpu, tmp_path):
    env = {k: v for k, v in gpu.items() if k.startswith("MEMTRACE")}
    env["LD_PRELOAD"] = f"{support.LIBRARY}:{programs / 'libstandin.so'}"
    _, said = client.run([programs / "others"], env, tmp_path)
    assert len(client.check_steps(said)) > 12
    by_name = {s["step"]: client.ledger(s["path"])[1] for s in said}
    with_host = by_name["cuMemCreate with the host: on no device"]["memtrace"]["ledger"]["host"]
    assert with_host["physical"] == 2 << 20
    mapped = by_name["mapped: one's own, another process's, several devices'"]
    assert [s["address"] for s in mapped["segments"]] == [0x600000000000]
    unknown = by_name["in a context that nobody has seen made"]
    assert [(s["device"], s["total_size"]) for s in unknown["segments"]] == [(-1, 500), (0, 400)]
    assert all(s["memtrace"]["counters"]["anomalies"] == 0 for s in by_name.values())
