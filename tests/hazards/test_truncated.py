"""The black box is cut short while the program runs: one line, and the program runs on.
Other faults are what they were."""

import signal

import hazard
import pytest
import support


def run(programs, gpu, tmp_path, *args, code=5, **env):
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_QUIET": "1", **env}
    return support.must(support.execute([programs / "bus", *args], env=env, timeout=60), code=code)


@pytest.mark.parametrize("length", [0, 4096, 1 << 20, 2 << 20])
@pytest.mark.parametrize("stacks", ["none", "all"])
def test_one_line_and_the_program_runs_on(stacks, length, programs, gpu, tmp_path):
    done = run(programs, gpu, tmp_path, "cut", length, MEMTRACE_STACKS=stacks)
    assert done.stdout == "ok\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("memtrace: ") and "cut" in line and "MEMTRACE_BLACKBOX" in line
    # What is left says what happened to it; no snapshot claims to be whole.
    assert not support.files(tmp_path / "out")
    said = support.must(support.memtrace("recover", tmp_path / "out"), code=1 if length == 0 else 2).stderr
    assert len(said.splitlines()) == 1, said


@pytest.mark.parametrize("length", [0, 4096, 1 << 20, 2 << 20])
def test_cut_before_the_last_snapshot(length, programs, gpu, tmp_path):
    """Nobody notices before the last snapshot is written: then there is
    none, rather than one that is wrong."""
    done = run(programs, gpu, tmp_path, "cut-at-the-end", length, MEMTRACE_STACKS="none")
    (line,) = done.stderr.splitlines()
    assert done.stdout == "ok\n" and "cut the black box short" in line
    assert not [p for p in (tmp_path / "out").iterdir() if not p.name.endswith(".blackbox")]


def test_a_small_ring_in_which_all_wait_for_room(programs, gpu, tmp_path):
    done = run(programs, gpu, tmp_path, "cut", 0, MEMTRACE_EVENTS="1024")
    assert done.stdout == "ok\n" and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("stacks", ["none", "all"])
def test_in_a_handler_on_a_stack_for_signals(stacks, programs, gpu, tmp_path):
    """What is live on that stack stays, although we have left it for a
    stack of ours when the fault comes."""
    done = run(programs, gpu, tmp_path, "cut-on-signal-stack", MEMTRACE_STACKS=stacks)
    assert done.stdout == "ok\n" and "cut the black box short" in done.stderr


def test_a_handler_of_the_programs_own(programs, gpu, tmp_path):
    """Gets its own faults and what is sent to it, as it asked for them, and nothing of ours."""
    done = run(programs, gpu, tmp_path, "own-handler")
    assert done.stdout == "ok\n" and "cut the black box short" in done.stderr


@pytest.mark.parametrize("what", ["fault", "sent"])
def test_any_other_sigbus_ends_the_program(what, programs, gpu, tmp_path):
    done = run(programs, gpu, tmp_path, what, code=-signal.SIGBUS)
    assert done.stderr == ""
    (path,) = hazard.recover(tmp_path / "out")
    assert list(hazard.driver_blocks(support.load(path)).values()) == [1000]


@pytest.mark.parametrize("what", ["ignored", "fault-in-child"])
def test_what_the_program_set_up_stays(what, programs, gpu, tmp_path):
    assert run(programs, gpu, tmp_path, what).stderr == ""


def test_python_that_explains_faults(tmp_path):
    """`faulthandler` has a handler of SIGBUS, too: it is not troubled, and PyTorch goes on."""
    pytest.importorskip("torch")
    code = (
        "import glob, os, torch\n"
        "x = [torch.empty(1000, device='cuda') for _ in range(100)]\n"
        "(box,) = glob.glob(os.environ['MEMTRACE_OUT'] + '/*.blackbox'); os.truncate(box, 0)\n"
        "for _ in range(1000): x.append((torch.ones(1000, device='cuda') * 2).sum())\n"
        "raise SystemExit(len(x) // 100)\n"
    )
    command = [support.PYTHON, "-X", "faulthandler", "-c", code]
    done = support.must(support.record(command, tmp_path, stacks="all"), code=11)
    said = [line for line in done.stderr.splitlines() if line.startswith("memtrace: ")]
    assert done.stdout == "" and sum("cut the black box short" in line for line in said) == 1, done.stderr
    assert "Fatal" not in done.stderr
