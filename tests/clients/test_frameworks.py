"""Frameworks other than PyTorch, the real ones, on the virtual GPU: they run,
everything that they take is theirs, and the table adds up. Each is installed for the
test (several GB), so only with --extended."""

import json
import sys
from pathlib import Path

import pytest
import support

PROGRAMS = Path(__file__).resolve().parent / "frameworks"
ASYNC = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}
ALL = {  # what to install, what the program prints, whose the memory is, its environment
    "jax": (["jax[cuda13]==0.10.2"], "2 (1024, 1024) (1024,)", {"JAX/XLA", "NCCL"}, ASYNC),
    "tensorflow": (["tensorflow==2.21.0"], "2 (1024, 1024)", {"TensorFlow"}, {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}),
    "onnxruntime": (
        ["onnxruntime-gpu==1.31.1", "onnx"],
        "CUDAExecutionProvider [(64, 1024), (2, 16, 62, 62)]",
        {"ONNX Runtime"},
        {},
    ),
    "numba": (["numba-cuda[cu13]==0.30.4"], "(1048576,)", {"Numba"}, {}),
}


@pytest.mark.parametrize("framework", ALL)
def test_another_framework(framework, tmp_path, pytestconfig):
    if not pytestconfig.getoption("--extended"):
        pytest.skip("installs a framework: only with --extended")
    packages, printed, expected, env = ALL[framework]
    python = tmp_path / "venv" / "bin" / "python"
    support.must(support.execute([sys.executable, "-m", "venv", tmp_path / "venv"]))
    support.must(support.execute([python, "-m", "pip", "install", "--quiet", *packages], timeout=1200))

    done = support.record(
        [python, PROGRAMS / f"{framework}_program.py"], tmp_path / "out", spec="h100*2", stacks="all", env=env, timeout=300
    )
    assert support.must(done).stdout.splitlines()[-1] == printed
    path = support.only_file(tmp_path / "out")
    support.must(support.memtrace("check", path))
    report = json.loads(support.must(support.memtrace("report", "--json", path)).stdout)
    devices = [d for d in report["devices"] if d["peak_held"] > 0]
    assert devices and all(d["reconcile"]["unexplained"] == 0 for d in devices)
    owners = {o["owner"] for d in devices for o in d["owners"] + d["owners_at_peak"]}
    assert owners == expected
    assert support.load(path)["memtrace"]["counters"]["anomalies"] == 0
