"""The callbacks in the real loops of the libraries that they are for, where these are installed."""

import importlib.util
import json

import pytest
from support import HERE, PYTHON, ROOT, must, record

STEPS = 6  # two epochs of three batches


def trained(library, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not here")
    script = HERE / "scripts" / "integrations.py"
    done = must(record([PYTHON, script, library, tmp_path / "loop"], tmp_path / "out", env={"PYTHONPATH": str(ROOT / "python")}))
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_trainers_loop_has_phases_modules_and_steps(tmp_path, library):
    said = trained(library, tmp_path)
    training = [label for label, is_training in said["seen"] if is_training]
    evaluating = [label for label, is_training in said["seen"] if not is_training]
    assert training == ["forward/net.body"] * STEPS
    assert evaluating and set(evaluating) == {"forward/net.body"}
    assert [number for kind, _, number in said["marks"] if kind == "step"] == list(range(STEPS))
    begun = [name for kind, name, _ in said["marks"] if kind == "begin"]
    assert begun.count("optimizer_step") == STEPS and begun.count("forward") == len(said["seen"])
    assert {"forward/net.head", "backward/net.body.0", "backward/net.head", "optimizer_step"} <= set(said["labels"])
    assert not any("optimizer_step/" in label for label in said["labels"]), said["labels"]
    # And all is taken back, also when Lightning's last run failed.
    assert (said["after"], said["left"]) == ("", [])
