"""PyTorch before 2.6 on the virtual GPU, compared with its own recorder. Each release is
installed for the test (several GB), so only with --extended. 2.1 to 2.3 come with cuDNN 8, up
to 2.4 NVTX is a library of its own."""

import json
import sys

import pytest
import support

# What the tests run on may be too new for the older ones.
VERSIONS = {"2.1.2": (3, 11), "2.4.1": (3, 12)}


@pytest.mark.parametrize("version", VERSIONS)
def test_equals_an_older_pytorch(version, tmp_path, pytestconfig):
    if not pytestconfig.getoption("--extended"):
        pytest.skip("installs an older PyTorch: only with --extended")
    if sys.version_info[:2] > VERSIONS[version]:
        pytest.skip(f"PyTorch {version} has no wheel for this Python")
    python = tmp_path / "venv" / "bin" / "python"
    support.must(support.execute([sys.executable, "-m", "venv", tmp_path / "venv"]))
    packages = [f"torch=={version}", "numpy<2"]
    support.must(support.execute([python, "-m", "pip", "install", "--quiet", *packages], timeout=1800))
    for script in ("mlp.py", "transformer.py"):
        results = tmp_path / f"{script}-verdicts"
        results.mkdir()
        command = [python, support.ORACLE, "--results", results, support.HERE / "scripts" / script]
        done = support.must(support.record(command, tmp_path / "out", spec="a100-80"))
        (verdict,) = [json.loads(path.read_text()) for path in results.iterdir()]
        assert verdict["differences"] == {} and verdict["entries"] > 500, (script, verdict, done.stderr)
