"""`crates/caching` against PyTorch's own allocator, on random programs: every
event, statistic and segment is the same.

A few short programs by default; `--extended` runs all of them, 50,000 operations each.
"""

import json
import shutil
from importlib.metadata import version

import allocator_differential
import pytest
import support

SHORT = ["streams", "pools_lazy", "captures_pools", "expandable_pools", "gc_split", "switching"]
LONG = 50_000


REPEAT = ["cargo", "run", "--release", "--locked", "--quiet", "-p", "memtrace-caching", "--example", "differential", "--"]

pytestmark = [
    pytest.mark.skipif(not version("torch").startswith("2.15."), reason="other releases have other rules in details"),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not in PATH: the example can't be built"),
]


def compare(name, seed, count, folder):
    configuration, lazy, _ = allocator_differential.PROGRAMS[name]
    spec = allocator_differential.SMALL_CARD + (",lazy" if lazy else "")
    result = folder / f"{name}.json"
    script = support.HERE / "allocator_differential.py"
    env = {"PYTORCH_ALLOC_CONF": configuration} if configuration else None
    command = [support.PYTHON, script, name, seed, count, result]
    done = support.memtrace("run", "--virtual", spec, "--record", "off", "--", *command, env=env, timeout=600)
    support.must(done)
    compared = support.must(support.execute([*REPEAT, result], cwd=support.ROOT, timeout=600))
    assert compared.stdout.endswith("events, equal\n"), compared.stdout
    result.unlink()


@pytest.mark.parametrize("name", SHORT)
def test_random_programs(name, tmp_path, request):
    if request.config.getoption("--extended"):
        pytest.skip("the long one runs")
    compare(name, 1, 6000, tmp_path)


@pytest.mark.parametrize("name", allocator_differential.PROGRAMS)
def test_all_random_programs(name, tmp_path, request):
    if not request.config.getoption("--extended"):
        pytest.skip("only with --extended")
    compare(name, 1, LONG, tmp_path)


@pytest.mark.parametrize("configuration", ["", "expandable_segments:True"])
@pytest.mark.parametrize("script", ["transformer.py", "empty_cache.py", "streams.py", "oom.py"])
def test_our_own_recordings_replay_as_they_were(script, configuration, tmp_path):
    env = {"PYTORCH_ALLOC_CONF": configuration} if configuration else None
    support.record([support.PYTHON, support.HERE / "scripts" / script], tmp_path, stacks="none", env=env)
    for path in support.files(tmp_path):
        answer = support.memtrace("replay", "--json", path)
        assert answer.returncode in (0, 1), answer.stderr
        for device in json.loads(answer.stdout)["devices"]:
            assert device["repeated"]["difference"] is None, f"{path.name}: {device['repeated']}"
            assert device["repeated"]["equal"] > 20
            assert device["capacity"] > 70 << 30, "the virtual card is in the file"
