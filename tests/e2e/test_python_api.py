"""The Python package in daily use: recording, peaks, decorators, pytest, callbacks; with and
without memtrace, with and without CUDA."""

import sys

import pytest

from support import HERE, LIBRARY, PYTHON, ROOT, execute, memtrace, must, record

SCRIPT = HERE / "scripts" / "python_api.py"
PACKAGE = {"PYTHONPATH": str(ROOT / "python"), "MEMTRACE_LIBRARY": str(LIBRARY)}
sys.path.insert(0, str(ROOT / "python"))


def run(what, tmp_path, *options, spec="h100", env=None):
    env = {**PACKAGE, "EXPECT": "preload", **(env or {})}
    done = record([PYTHON, SCRIPT, what], tmp_path / "out", spec=spec, run=options, env=env, cwd=tmp_path)
    assert must(done).stdout == "done\n"
    return done


@pytest.mark.parametrize("what", ["peaks", "profile", "files", "loop", "facts"])
def test_under_memtrace(tmp_path, what):
    run(what, tmp_path)


@pytest.mark.parametrize("what", ["peaks", "files"])
def test_as_the_allocator_where_nobody_preloaded_it(tmp_path, what):
    """`start()` installs memtrace as the allocator; the peak is the allocator's own."""
    env = {"EXPECT": "allocator", "MEMTRACE_OUT": str(tmp_path / "out")}
    if what == "peaks":
        script = tmp_path / "start_first.py"
        script.write_text(f"import sys, memtrace\nassert memtrace.start() == 'allocator'\nexec(open({str(SCRIPT)!r}).read())")
        done = record([PYTHON, script, what], tmp_path / "out", run=("--record", "off"), env={**PACKAGE, **env})
        assert must(done).stdout == "done\n"
    else:
        run(what, tmp_path, "--record", "off", env=env)


def test_too_late_it_says_how_and_changes_nothing(tmp_path):
    assert run("too_late", tmp_path, "--record", "off").stderr == ""


def test_without_cuda_it_does_nothing(tmp_path):
    done = execute([PYTHON, SCRIPT, "without_cuda"], env={**PACKAGE, "CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path)
    assert must(done).stdout == "done\n" and not list(tmp_path.iterdir())


TESTS = """
import pytest, torch
MIB = 1 << 20
kept = []

def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

@pytest.mark.limit_gpu_memory("10 MiB")
def test_within():
    take(10)

@pytest.mark.limit_gpu_memory("10 MiB")
def test_beyond():
    take(12)

@pytest.mark.limit_gpu_leaks("2 MiB")
def test_small_leak():
    kept.append(take(2))

@pytest.mark.limit_gpu_leaks
def test_leak():
    kept.append(take(3))

@pytest.mark.limit_gpu_leaks
def test_cycle_is_no_leak():
    cycle = [take(4)]
    cycle.append(cycle)

@pytest.mark.limit_gpu_memory("1 MiB")
def test_that_fails_by_itself():
    take(4)
    assert False, "by itself"

def test_without_a_limit():
    kept.append(take(5))
"""


def pytest_run(tmp_path, *options, run=()):
    (tmp_path / "test_limits.py").write_text(TESTS)
    command = [PYTHON, "-m", "pytest", "-p", "memtrace.pytest_plugin", "-p", "no:cacheprovider", "-rA", *options]
    done = record([*command, "test_limits.py"], tmp_path / "out", run=run, env=PACKAGE, cwd=tmp_path)
    outcomes = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("PASSED ", "FAILED "))]
    return {name.rpartition("::")[2]: outcome for outcome, name in outcomes}, done.stdout


def test_pytest_limits(tmp_path):
    outcomes, text = pytest_run(tmp_path)
    failed = {name for name, outcome in outcomes.items() if outcome == "FAILED"}
    assert failed == {"test_beyond", "test_leak", "test_that_fails_by_itself"}, text
    assert "12.0 MiB of GPU memory were allocated at once, the limit is 10.0 MiB" in text
    assert "the test left 3.0 MiB of GPU memory behind, the limit is 0 B" in text
    assert "by itself" in text


def test_pytest_leaks_of_every_test(tmp_path):
    outcomes, text = pytest_run(tmp_path, "--gpu-leaks", "4MiB")
    failed = {name for name, outcome in outcomes.items() if outcome == "FAILED"}
    assert failed == {"test_beyond", "test_leak", "test_that_fails_by_itself", "test_without_a_limit"}, text


def test_a_limit_that_nobody_measures_is_a_failure(tmp_path):
    outcomes, text = pytest_run(tmp_path, run=("--record", "off"))
    assert outcomes["test_within"] == "FAILED" and "memtrace run" in text
    assert outcomes["test_without_a_limit"] == "PASSED"


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("2 GiB", 2 << 30), ("500MB", 500_000_000), ("64k", 65536), ("12", 12), ("7 B", 7), (9, 9), ("1.5 MiB", 3 << 19)],
)
def test_sizes(text, bytes_):
    from memtrace.recording import parse_size

    assert parse_size(text) == bytes_


@pytest.mark.parametrize("text", ["", "GiB", "2 XB", "-1", "1 GiB extra", "٣"])
def test_what_is_no_size(text):
    from memtrace.recording import parse_size

    with pytest.raises(ValueError, match="is no size"):
        parse_size(text)


def test_sizes_for_a_screen():
    from memtrace.recording import size

    assert [size(n) for n in (0, 1023, 1024, 3 << 19, -(5 << 30), 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "-5.0 GiB",
        "3.0 TiB",
    ]


CALLBACKS = """
import sys, types
base = type("Base", (), {})
for name, attribute in (("lightning.pytorch", "Callback"), ("transformers", "TrainerCallback")):
    module = types.ModuleType(name)
    setattr(module, attribute, base)
    sys.modules[name] = module
sys.modules["lightning"] = types.ModuleType("lightning")
import torch, memtrace
from memtrace.integrations.lightning import MemtraceCallback as Lightning
from memtrace.integrations.huggingface import MemtraceCallback as HuggingFace

model = torch.nn.Sequential(torch.nn.Linear(256, 256)).cuda()
state = types.SimpleNamespace(global_step=7)

callback = Lightning()
callback.on_fit_start(state, model)
callback.on_train_batch_start(state, model, None, 0)
model(torch.ones(8, 256, device="cuda"))
callback.on_fit_end(state, model)

state.global_step = 9
callback = HuggingFace()
callback.on_train_begin(None, state, None, model=model)
callback.on_step_begin(None, state, None, model=model)
model(torch.ones(8, 256, device="cuda"))
callback.on_train_end(None, state, None)

snapshot = memtrace.snapshot()
assert [m["number"] for m in snapshot["memtrace"]["marks"] if m["sort"] == "step"] == [7, 9]
assert [e["user_metadata"] for e in snapshot["device_traces"][0] if e["action"] == "alloc"].count("forward/0") >= 2
assert not model._forward_hooks and not model[0]._forward_hooks
print("done")
"""


def test_callbacks_follow_the_calls_that_the_trainers_document(tmp_path):
    """The libraries themselves are not needed here: their callbacks are
    called by name, with these arguments."""
    (tmp_path / "callbacks.py").write_text(CALLBACKS)
    done = record([PYTHON, tmp_path / "callbacks.py"], tmp_path / "out", env=PACKAGE)
    assert must(done).stdout == "done\n"


def test_the_command_says_its_version_and_so_does_the_package():
    import memtrace as package

    assert must(memtrace("--version")).stdout.split()[-1] == package.__version__


def test_every_public_name_is_there_and_documented():
    import memtrace as package

    for name in package.__all__:
        assert getattr(package, name).__doc__ or name == "__version__", name
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
