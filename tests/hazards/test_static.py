"""Children that no library can be preloaded into, and a process whose
addresses are not shuffled."""

import shutil

import hazard
import pytest
import support

COMPILER = support.execute(["sh", "-c", "command -v ${CC:-cc}"]).stdout.strip()


@pytest.mark.parametrize("kind", ["-static-pie", "-static -no-pie"])
@pytest.mark.parametrize("how", ["'{}'", "'{}'; exit $?", "exec '{}'"])
@pytest.mark.parametrize("virtual", ["h100", None])
def test_a_static_child(kind, how, virtual, tmp_path):
    """It runs as it would without us: its output, its exit code, at most one line."""
    source, child = tmp_path / "child.c", tmp_path / "child"
    source.write_text('#include <stdio.h>\nint main(void) { puts("static"); return 5; }')
    if support.execute([COMPILER, *kind.split(), "-o", child, source]).returncode != 0:
        pytest.skip(f"no C library for {kind}")
    command = ["sh", "-c", how.format(child)]
    done = support.must(support.record(command, tmp_path / "out", spec=virtual, run=("--record", "on")), code=5)
    said = done.stderr.splitlines()
    assert done.stdout == "static\n" and len(said) <= 1 and all(line.startswith("memtrace: ") for line in said), done
    assert not [p.name for p in (tmp_path / "out").iterdir()], "nothing is left"


def test_addresses_that_are_not_shuffled(programs, gpu, tmp_path):
    if not shutil.which("setarch"):
        pytest.skip("setarch is not installed")
    command = ["setarch", "-R", programs / "room", "churn", 1000, 10]
    done = support.must(support.record(list(map(str, command)), tmp_path / "out", stacks="all"))
    assert done.stdout == "ok\n" and len(done.stderr.splitlines()) == 1, done
    assert len(hazard.driver_blocks(support.load(support.only_file(tmp_path / "out")))) == 101
