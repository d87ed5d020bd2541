"""`crates/caching` against PyTorch's own allocator, on random programs: every event, statistic and segment is the same.

A few short programs by default; `--extended` runs all of them, 50,000 operations each.
"""

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
