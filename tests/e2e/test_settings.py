"""The settings of PyTorch's allocator in a snapshot are those in force: of whichever variable counts, and as the program changes
them under way. PyTorch itself is the judge (issue F, B9)."""

import json

import pytest
import support

SPLIT, SEGMENTS = "max_split_size_mb:222", "expandable_segments:True"
VARIABLES = [
    {},
    {"PYTORCH_CUDA_ALLOC_CONF": SPLIT},
    {"PYTORCH_ALLOC_CONF": SPLIT},
    {"PYTORCH_HIP_ALLOC_CONF": SPLIT},
    {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": SPLIT},
    {"PYTORCH_CUDA_ALLOC_CONF": SEGMENTS, "PYTORCH_ALLOC_CONF": SPLIT},
    {"PYTORCH_HIP_ALLOC_CONF": SEGMENTS, "PYTORCH_ALLOC_CONF": SPLIT},
]
CHANGES = [
    ["garbage_collection_threshold:0.6"],
    [SPLIT, "garbage_collection_threshold:0.6"],
    ["expandable_segments:False,roundup_power2_divisions:[256:1,512:2,>:4]"],
    [""],
]


def settings(env, changes, tmp_path):
    script = support.HERE / "scripts" / "settings.py"
    done = support.must(support.record([support.PYTHON, "-W", "ignore", script, *changes], tmp_path / "out", env=env))
    own = json.loads(done.stdout)
    found = support.load(support.only_file(tmp_path / "out"))["allocator_settings"]
    return own, {key: value for key, value in found.items() if key in own}, found


@pytest.mark.parametrize("env", VARIABLES, ids=str)
def test_the_variable_that_counts(env, tmp_path):
    own, found, _ = settings(env, [], tmp_path)
    assert found == own


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_what_the_program_changes(changes, tmp_path):
    """PyTorch forgets some settings each time and keeps the others."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": f"{SEGMENTS},{SPLIT},roundup_power2_divisions:8,pinned_num_register_threads:2"}
    own, found, _ = settings(env, changes, tmp_path)
    assert found == own


def test_a_refused_change_is_none(tmp_path):
    """The exception is PyTorch's, and what held holds."""
    program = "import torch; x = torch.empty(9, device='cuda')\ntry: torch.cuda.memory._set_allocator_settings('nonsense:1')\n"
    program += "except Exception as e: print(type(e).__name__, str(e).splitlines()[0])"
    plain = support.must(support.record([support.PYTHON, "-W", "ignore", "-c", program], tmp_path / "off", run=["--record", "off"]))
    done = support.must(support.record([support.PYTHON, "-W", "ignore", "-c", program], tmp_path / "out", env={"PYTORCH_CUDA_ALLOC_CONF": SPLIT}))
    assert done.stdout == plain.stdout and done.stdout
    assert support.load(support.only_file(tmp_path / "out"))["allocator_settings"]["max_split_size"] == 222 << 20


@pytest.mark.parametrize("env", [*VARIABLES, {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4]"}], ids=str)
def test_of_a_process_that_was_killed(env, tmp_path):
    """Its black box has the variables that were set; which of them PyTorch has read, and how, follows from its release."""
    program = "import json, os, torch; x = torch.empty(9, device='cuda')\n"
    program += "print(json.dumps(torch.cuda.memory._snapshot()['allocator_settings']), flush=True); os.kill(os.getpid(), 9)"
    done = support.record([support.PYTHON, "-W", "ignore", "-c", program], tmp_path / "out", env=env)
    assert done.returncode in (-9, 137), done
    own = json.loads(done.stdout)
    support.must(support.memtrace("recover", tmp_path / "out"))
    found = support.load(support.only_file(tmp_path / "out"))["allocator_settings"]
    assert {key: value for key, value in found.items() if key in own} == own
