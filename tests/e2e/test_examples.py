"""The examples run as their own README says, on virtual GPUs; what they record is labelled."""

import json

import pytest

from support import PYTHON, ROOT, TIMEOUT, files, history, load, must, record

EXAMPLES = ROOT / "examples"
PACKAGE = {"PYTHONPATH": f"{ROOT / 'python'}:{EXAMPLES}"}


def labels(path):
    snapshot = load(path)
    devices = range(len(snapshot["device_traces"]))
    return {e["user_metadata"] for d in devices for e in history(snapshot, d) if e["action"] == "alloc"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single_gpu", {"forward/layers.0.mlp.0", "backward/layers.3.mlp.2", "backward/head", "optimizer_step"}),
        ("tracer", {"forward/layers.0.mlp.0", "backward/layers.3.mlp.2", "backward/head", "optimizer_step"}),
        ("checkpointing", {"forward/layers.0.mlp.0", "backward/layers.0.mlp.0", "backward/head"}),
        ("mixed_precision", {"forward/layers.0.mlp.0", "backward/head", "optimizer_step"}),
        ("compiled", {"forward", "backward/forward", "optimizer_step"}),
    ],
)
def test_one_gpu(tmp_path, name, expected):
    done = must(record([PYTHON, EXAMPLES / f"{name}.py"], tmp_path, env=PACKAGE))
    assert "peak" in done.stdout
    (path,) = files(tmp_path)
    found = labels(path)
    if name == "compiled":
        # The nodes of a compiled graph were made in the phase `forward`, and nowhere more exactly.
        assert {"forward", "backward", "optimizer_step"} <= found, found
        # The compiler of 2.6 opens ranges of its own, in both phases.
        within = [label for label in found if "/" in label and not label.endswith("(dynamo_timed)")]
        assert not within, within
    else:
        assert expected <= found, sorted(found)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_ranks(tmp_path, name):
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = must(record([*torchrun, EXAMPLES / f"{name}.py"], tmp_path, spec="h100*2", env=PACKAGE, timeout=TIMEOUT))
    assert {line[:6] for line in done.stdout.splitlines() if "peak" in line} == {"rank 0", "rank 1"}
    written = files(tmp_path)
    assert len(written) == 2
    for path in written:
        found = labels(path)
        assert {"forward/layers.0.mlp.0", "backward/head", "optimizer_step"} <= found, sorted(found)


RUN_NOTEBOOK = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        shell.run_cell("".join(cell["source"]), store_history=True).raise_error()
"""


def test_the_notebook(tmp_path):
    """Its cells in order, in the shell that a kernel runs them in."""
    pytest.importorskip("IPython", reason="scripts/requirements.txt brings it")
    script = tmp_path / "run_notebook.py"
    script.write_text(RUN_NOTEBOOK)
    done = must(record([PYTHON, script, EXAMPLES / "notebook.ipynb"], tmp_path / "out", env=PACKAGE, cwd=tmp_path))
    assert "memtrace: recording (preload)" in done.stdout and "memtrace: training: peak" in done.stdout
    assert "optimizer_step" in done.stdout and "training/" in done.stdout


def test_the_notebook_is_one():
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and all("id" in cell and not cell.get("outputs") for cell in notebook["cells"])
