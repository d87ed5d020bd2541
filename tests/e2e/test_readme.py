"""README: each of its commands is typed as it is written there, in README's order and in one
folder; its session shows what is printed today."""

import re
import sys

import pytest
import torch

from support import LIBRARY, MEMTRACE, PYTHON, ROOT, TIMEOUT, execute, must

README = (ROOT / "README.md").read_text()
BUILD = {"MEMTRACE_BUILD": str(MEMTRACE.parent), "MEMTRACE_TORCH": PYTHON}

# What is done beside this test, each with who does it.
ELSEWHERE = {
    "scripts/demo": "the session below runs what the demo runs, after the same set-up",
    "scripts/test": "that is what runs this",
    "pip install .": "scripts/check_wheel builds and installs the wheel",
}


def commands():
    """The commands of README's shell blocks, without comments."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line]


def test_each_command_of_readme_works(tmp_path):
    for name in ("scripts", "examples", "python"):
        (tmp_path / name).symlink_to(ROOT / name)
    # The folders that `export PATH` names, wherever what is tested was built.
    (tmp_path / "target").mkdir()
    (tmp_path / "target/release").symlink_to(LIBRARY.parent)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    found = commands()
    assert len(found) > 10, found
    script = ["set -e"]
    for command in found:
        if command in ELSEWHERE:
            continue
        # Where there is no GPU the commands meant for one find a virtual one, which a
        # command's own LD_PRELOAD would take away.
        command = re.sub(r'^LD_PRELOAD="([^"]*)"', r'LD_PRELOAD="\1:$LD_PRELOAD"', command)
        script += [f"printf '>>> %s\\n' {command!r} >&2", command]
    around = [MEMTRACE, "run", "--virtual", "h100*2", "--record", "off", "--", "bash", "-c", "\n".join(script)]
    done = must(execute(around, cwd=tmp_path, timeout=2 * TIMEOUT))
    assert "ESTIMATE on a virtual GPU" in done.stdout and "held at the peak" in done.stdout


@pytest.mark.skipif(not torch.__version__.startswith("2.15"), reason="README shows PyTorch 2.15")
def test_the_session_of_readme_is_a_real_one():
    must(execute([PYTHON, ROOT / "scripts/readme_session", "--check"], env=BUILD))


def test_links_of_readme_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 8
    assert [link for link in links if not (ROOT / link).exists()] == []
