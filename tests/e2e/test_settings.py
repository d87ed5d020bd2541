"""The settings of PyTorch's allocator in a snapshot are those in force: of whichever variable
counts, and as the program changes them under way. PyTorch itself is the oracle."""

import json
import os
import subprocess

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
    """Its black box has the variables that were set; which of them PyTorch has read,
    and how, follows from its release."""
    program = "import json, os, torch; x = torch.empty(9, device='cuda')\n"
    program += "print(json.dumps(torch.cuda.memory._snapshot()['allocator_settings']), flush=True); os.kill(os.getpid(), 9)"
    done = support.record([support.PYTHON, "-W", "ignore", "-c", program], tmp_path / "out", env=env)
    assert done.returncode in (-9, 137), done
    own = json.loads(done.stdout)
    support.must(support.memtrace("recover", tmp_path / "out"))
    found = support.load(support.only_file(tmp_path / "out"))["allocator_settings"]
    assert {key: value for key, value in found.items() if key in own} == own


OF_THE_COMMAND = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:99", "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"}
UNDER_WAY = """
import json, os, sys, torch
x = torch.empty(9, device="cuda")
for conf in sys.argv[2:]: torch.cuda.memory._set_allocator_settings(conf)
import memtrace; memtrace.dump(sys.argv[1])
print(json.dumps(torch.cuda.memory._snapshot()["allocator_settings"]), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("changes", [[], ["garbage_collection_threshold:0.6", SEGMENTS]], ids=str)
@pytest.mark.parametrize("how", ["run", "install"])
def test_whoever_reads_the_record_says_the_settings_of_its_process(how, changes, tmp_path):
    """Not those of the environment in which `snapshot` or `recover` runs, and those
    that the program set under way, too."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:222,pinned_num_register_threads:2", "MEMTRACE_LIBRARY": str(support.LIBRARY)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(support.ROOT / "python"), os.environ.get("PYTHONPATH")]))
    out = tmp_path / "out"
    program = ("import memtrace; memtrace.install()" if how == "install" else "") + UNDER_WAY
    options = ["--virtual", "h100", "--out", out, *(["--record", "off"] if how == "install" else [])]
    command = [support.MEMTRACE, "run", *options, "--", support.PYTHON, "-W", "ignore", "-c", program, tmp_path / "own.pickle", *changes]
    env = support.environment({**env, "MEMTRACE_OUT": str(out)})
    process = subprocess.Popen([str(c) for c in command], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        pytorchs = json.loads(process.stdout.readline())
        live = support.must(support.memtrace("snapshot", process.pid, "--out", tmp_path / "live", env=OF_THE_COMMAND)).stdout.strip()
    finally:
        process.kill()
        process.wait()
    recovered = support.must(support.memtrace("recover", out, env=OF_THE_COMMAND)).stdout.strip()
    own, *others = [support.load(path) for path in (tmp_path / "own.pickle", live, recovered)]
    assert {key: value for key, value in own["allocator_settings"].items() if key in pytorchs} == pytorchs
    for other in others:
        assert other["allocator_settings"] == own["allocator_settings"]
        assert other["memtrace"]["allocator_conf"] == own["memtrace"]["allocator_conf"]


KILLED = """
import os, sys, torch
for conf in sys.argv[1:]: torch.cuda.memory._set_allocator_settings(conf)
child = os.fork()
x = torch.empty(9, device="cuda")
if child: os.waitpid(child, 0)
os.kill(os.getpid(), 9)
"""


def killed(changes, tmp_path):
    """The snapshots that are recovered of a process and its child."""
    done = support.record([support.PYTHON, "-W", "ignore", "-c", KILLED, *changes], tmp_path / "out", env={"PYTORCH_CUDA_ALLOC_CONF": SPLIT})
    assert done.returncode in (-9, 137), done
    paths = support.must(support.memtrace("recover", tmp_path / "out", env=OF_THE_COMMAND)).stdout.split()
    assert len(paths) == 2, paths
    return [support.load(path) for path in paths]


def test_what_was_set_before_recording_began_holds_in_a_child_too(tmp_path):
    for snapshot in killed([SEGMENTS], tmp_path):
        found = snapshot["allocator_settings"]
        assert (found["expandable_segments"], found["max_split_size"]) == (True, -1), found
        assert not any("settings" in what for what in snapshot["memtrace"]["not_recorded"])


def test_settings_for_which_there_is_no_room_are_not_made_up(tmp_path):
    """Words of more than 8 KiB: nothing is said of what holds, and that this is so."""
    for snapshot in killed([",".join([SEGMENTS] * 500)], tmp_path):
        assert "allocator_settings" not in snapshot and snapshot["memtrace"]["allocator_conf"] is None
        assert "the settings of PyTorch's allocator" in snapshot["memtrace"]["not_recorded"]
