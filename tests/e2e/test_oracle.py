"""PyTorch is the oracle: over the whole corpus, memtrace's history equals
PyTorch's, entry for entry."""

import json

import corpus
import pytest
import support


@pytest.mark.parametrize("program", corpus.compared(), ids=lambda p: p.name)
def test_equals_pytorch(program, tmp_path):
    results, out = tmp_path / "verdicts", tmp_path / "out"
    results.mkdir()
    command = program.command(support.PYTHON, support.ORACLE, "--results", results)
    env = {**program.env, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = support.must(support.record(command, out, spec=program.spec, env=env))

    verdicts = [json.loads(p.read_text()) for p in results.glob("verdict-*.json")]
    assert len(verdicts) == program.ranks, done.stderr
    for verdict in verdicts:
        assert verdict["differences"] == {}
        # NCCL, which ranks have, takes memory of its own.
        assert (verdict["driver"] > 0) == (program.ranks > 1), "nothing else may bypass PyTorch's allocator"
        assert verdict["entries"] > 20 and verdict["frames"] > 20 and verdict["segments"] > 0, verdict
        if program.script == "random_program.py" and len(program.args) == 1:
            assert verdict["entries"] >= 100_000
    assert any(line.startswith(program.closing) for line in done.stdout.splitlines()), done.stdout

    assert "changed past memtrace" not in done.stderr, done.stderr

    written = support.files(out)
    reasons = [support.load(path)["memtrace"]["reason"] for path in written]
    assert reasons.count("exit") == program.ranks, [p.name for p in out.iterdir()]
    assert reasons.count("oom") == len(reasons) - program.ranks
    for path in written:
        support.must(support.memtrace("check", path))
        devices = support.load(path)["memtrace"]["owners"]["devices"]
        outside = {by["owner"] for device in devices for by in device["by"] + (device["peak"]["by"] or [])}
        assert outside <= ({"PyTorch", "NCCL"} if program.ranks > 1 else {"PyTorch"})


def test_a_history_cut_short_is_not_equal(tmp_path):
    """The verdict can be no: a ring of 1,024 events can't hold this program."""
    command = [support.PYTHON, support.ORACLE, support.HERE / "scripts" / "random_program.py", "1", "3000"]
    done = support.must(support.record(command, tmp_path, env={"MEMTRACE_EVENTS": "1024"}), code=1)
    assert "oracle: trace" in done.stderr and "random_program.py: DIFFERENT" in done.stdout
