"""The processes of a run share its virtual cards: the one that
is refused is the one that would be.

A process may be killed, fork or become another program. What it held is given back when it is gone,
and never before. Nothing is left behind when all are gone.
"""

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import hazard
import pytest
import support

CARD = hazard.PROGRAMS / "card.py"
OUT_OF_MEMORY = 2
GIB = 1024  # in MiB, as all figures here
PREFIX = "memtrace-cards1-"


class Run:
    """A run whose first process is a shell that waits, and its processes."""

    def __init__(self, spec="h100"):
        done = support.memtrace("run", "--virtual", spec, "--record", "off", "--", "env", "-0")
        printed = dict(line.split("=", 1) for line in support.must(done).stdout.split("\0") if "=" in line)
        self.env = {k: v for k, v in printed.items() if support.environment().get(k) != v}
        self.file = Path(self.env["MEMTRACE_VIRTUAL_CARDS"])
        self.processes = []

    def start(self, env=None):
        process = subprocess.Popen(
            [support.PYTHON, "-S", CARD],
            env=support.environment({**self.env, **(env or {})}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def run():
    """A run on one H100."""
    run = Run()
    yield run
    end(run)


def end(run):
    for process in run.processes:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    run.file.unlink(missing_ok=True)


def ask(process, *words):
    tell(process, *words)
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, f"no answer to {words}"
    answer = process.stdout.readline().strip()
    assert answer, f"no answer to {words}: {process.poll()}"
    return int(answer) if answer.isdigit() else answer


def tell(process, *words):
    process.stdin.write(" ".join(map(str, words)) + "\n")
    process.stdin.flush()
    return process


def leave(process):
    process.stdin.close()
    assert process.wait(60) == 0


def test_two_large_processes_do_not_fit(run):
    first, second = run.start(), run.start()
    assert ask(first, "take", 60 * GIB) == 0
    assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY, "79 GiB hold 60 once"
    assert ask(second, "take", 10 * GIB) == 0, "who is refused may ask for less"
    assert ask(first, "free") == ask(second, "free") < 10 * GIB
    assert ask(first, "give") == 0
    assert ask(second, "take", 60 * GIB) == 0


def test_contexts_count(run):
    processes = [run.start() for _ in range(4)]
    left = [ask(process, "free") for process in processes]
    context = left[0] - left[1]
    assert context > 200, "a context of an H100"
    assert left == [left[0] - n * context for n in range(4)]
    leave(processes.pop())
    assert ask(processes[0], "free") == left[2], "and end with their process"


@pytest.mark.parametrize("how", ["kill", "exit", "exec", "exec itself"])
def test_what_ends_is_given_back(run, how):
    first, second = run.start(), run.start()
    before = ask(second, "free")
    assert ask(first, "take", 60 * GIB) == 0
    assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY
    if how == "kill":
        first.kill()
        first.wait()
    elif how == "exit":
        leave(first)
    elif how == "exec":
        ask(first, "become", "sleep", 60)
        until(lambda: Path(f"/proc/{first.pid}/comm").read_text() == "sleep\n")
    else:
        ask(first, "become", support.PYTHON, "-S", CARD)
        assert ask(first, "take", 1) == 0, "the same program again, which has nothing yet"
        assert ask(first, "used") < 2 * GIB
        leave(first)
    assert ask(second, "free") == before
    assert ask(second, "take", 60 * GIB) == 0


def until(done):
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_was_killed_and_not_waited_for_holds_nothing(run):
    parent, other = run.start(), run.start()
    ask(parent, "zombie")
    before = ask(other, "free")
    ask(parent, "zombie")
    assert ask(other, "free") == before, "neither that GiB nor that context"


def test_a_process_whose_first_thread_has_ended_still_holds_what_it_has(run):
    first, second = run.start(), run.start()
    assert ask(first, "take", 60 * GIB) == 0
    ask(first, "lose_main")
    until(lambda: state(first) == "Z")
    assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY
    assert ask(first, "give") == 0 and ask(second, "take", 60 * GIB) == 0


def state(process):
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Slots:
    """The file's layout (`card.rs`): a head, and a place for each process."""

    HEAD, START, LEAVING = 64, 8, 24

    def __init__(self, run):
        self.path = run.file
        self.data = bytearray(run.file.read_bytes())
        self.size, rest = divmod(len(self.data) - self.HEAD, 512)
        assert rest == 0

    def word(self, slot, at, size=4):
        place = self.HEAD + slot * self.size + at
        return int.from_bytes(self.data[place : place + size], "little")

    def pids(self):
        return [self.word(slot, 0) for slot in range(512) if self.word(slot, 0)]

    def write(self):
        with self.path.open("r+b") as file:
            file.write(self.data)


def test_a_number_that_was_given_to_another_process_is_not_the_one_that_held(run):
    """As if the process had died, and this one had got its number."""
    first, second = run.start(), run.start()
    assert ask(first, "take", 60 * GIB) == 0
    assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY
    slots = Slots(run)
    assert slots.pids() == [first.pid, second.pid]
    slots.data[slots.HEAD + slots.START] ^= 1
    slots.write()
    assert f"{first.pid}:" not in ask(second, "processes")
    assert ask(second, "take", 60 * GIB) == 0
    assert Slots(run).pids() == [second.pid]


def test_a_process_that_becomes_another_program_keeps_its_place(run):
    first, second = run.start(), run.start()
    ask(first, "free"), ask(second, "free")
    leave(first)
    for _ in range(2):
        ask(second, "become", support.PYTHON, "-S", CARD)
        ask(second, "free")
        assert Slots(run).pids() == [first.pid, second.pid]


def test_places_of_the_dead_are_used_again(run):
    """As if as many processes as there are places had been killed."""
    first = run.start()
    ask(first, "free")
    first.kill()
    first.wait()
    slots = Slots(run)
    slots.data[slots.HEAD :] = slots.data[slots.HEAD :][: slots.size] * 512
    slots.data[4:8] = (512).to_bytes(4, "little")
    slots.write()
    second, third = run.start(), run.start()
    assert ask(second, "take", 60 * GIB) == 0
    assert ask(third, "take", 60 * GIB) == OUT_OF_MEMORY, "both have a place in the file"


def test_a_program_that_clears_its_environment_still_shares(run):
    first, second = run.start(), run.start()
    assert ask(first, "take", 60 * GIB) == 0
    assert ask(second, "clear") == 0
    assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY


@pytest.mark.parametrize("inner, same", [("h100", True), ("t4", False)])
def test_a_run_within_a_run_has_the_same_cards(run, inner, same):
    """A launcher under `memtrace run` whose workers are started by `memtrace run`, as scripts may
    do it. Another kind of card is another."""
    command = ["run", "--virtual", inner, "--record", "off", "--", "sh", "-c", "echo $MEMTRACE_VIRTUAL_CARDS"]
    done = support.must(support.memtrace(*command, env=run.env))
    assert (done.stdout.strip() == str(run.file)) == same


def test_a_forked_child_takes_nothing_and_gives_nothing_back(run):
    parent, other = run.start(), run.start()
    assert ask(parent, "take", 60 * GIB) == 0
    before = ask(other, "free")
    assert ask(parent, "fork") == 3, "an initialisation error, as CUDA gives it"
    assert ask(other, "free") == before
    assert ask(other, "take", 60 * GIB) == OUT_OF_MEMORY
    leave(other)
    assert run.file.exists(), "the child's end was not its parent's"


def test_nvml_knows_all_of_them_and_a_process_that_only_looks(run):
    first, second, third = run.start(), run.start(), run.start()
    assert ask(first, "take", 8 * GIB) == 0 and ask(second, "take", 2 * GIB) == 0
    listed = [dict(re.findall(r"(\d+):(\d+)", ask(process, "processes"))) for process in (first, third)]
    assert listed[0] == listed[1] and set(listed[0]) == {str(first.pid), str(second.pid)}
    held = {pid: int(mib) for pid, mib in listed[0].items()}
    assert held[str(first.pid)] - held[str(second.pid)] == 6 * GIB
    assert ask(third, "used") == sum(held.values())
    first.kill()
    first.wait()
    assert ask(third, "processes") == f"{second.pid}:{held[str(second.pid)]}"


def test_sharing_is_by_the_card_not_by_its_number_in_the_process():
    run = Run("h100*2")
    try:
        one, zero, both = run.start({"CUDA_VISIBLE_DEVICES": "1"}), run.start({"CUDA_VISIBLE_DEVICES": "0"}), run.start()
        assert ask(one, "take", 60 * GIB) == 0
        assert ask(zero, "take", 60 * GIB) == 0, "another card"
        again = run.start({"CUDA_VISIBLE_DEVICES": "1,0"})
        assert ask(again, "take", 60 * GIB) == OUT_OF_MEMORY
        assert 60 * GIB < ask(both, "used", 0) < ask(both, "used", 1) < 62 * GIB, "and a context on the second"
    finally:
        end(run)


def test_memory_of_another_process_is_counted_once(run):
    owner, reader = run.start(), run.start()
    assert ask(owner, "take", 30 * GIB) == 0
    ask(reader, "free")
    before = ask(owner, "used")
    assert ask(reader, "open_handle", ask(owner, "export")) == 0
    assert ask(owner, "used") == before


def test_a_lock_that_a_killed_process_held_is_taken_over(run):
    first = run.start()
    assert ask(first, "take", 1) == 0
    with run.file.open("r+b") as file:  # the first word is who decides
        file.write((2**22 + 1).to_bytes(4, "little"))
    assert ask(first, "take", 64) == 0
    assert run.file.read_bytes()[:4] == bytes(4)


def test_requests_at_one_time_fill_the_card_exactly(run):
    """Processes that all take 64 MiB until they are refused, one of them killed
    meanwhile: no byte is lost or lent twice."""
    whole = ask(one := run.start(), "fill", GIB)
    leave(one)
    for number in range(5):
        processes = [run.start() for _ in range(4)]
        for process in processes:
            ask(process, "free")  # which makes its context
        total = ask(processes[0], "free") + ask(processes[0], "used")
        for process in processes:
            tell(process, "fill", 64)
        time.sleep(0.002 * number)
        processes[number % 4].kill()
        processes.pop(number % 4).wait()
        for process in processes:
            assert process.stdout.readline()
        for process in processes:
            ask(process, "fill", 64)
        assert ask(processes[0], "free") < 64, "what is left is less than a request"
        assert ask(processes[0], "free") + ask(processes[0], "used") == total
        held = [int(mib) for mib in re.findall(r":(\d+)", ask(processes[0], "processes"))]
        assert sum(held) == ask(processes[0], "used") <= total and len(held) == 3
        for process in processes:
            leave(process)
    assert ask(run.start(), "fill", GIB) == whole, "all of it is there again"


def test_nothing_is_left_when_the_run_is_over(tmp_path):
    code = "import ctypes; p = ctypes.c_void_p(); ctypes.CDLL('libcudart.so.13').cudaMalloc(ctypes.byref(p), 1 << 20)"
    say = "import os; print(os.path.exists(os.environ['MEMTRACE_VIRTUAL_CARDS']), os.environ['MEMTRACE_VIRTUAL_CARDS'])"
    script = f'{support.PYTHON} -S -c "{code}; {say}"; {support.PYTHON} -S -c "{code}" & {support.PYTHON} -S -c "{code}" & wait'
    done = support.must(support.memtrace("run", "--virtual", "t4", "--out", tmp_path, "--", "sh", "-c", script))
    existed, path = done.stdout.split()
    assert existed == "True" and not Path(path).exists()
    assert not list(Path(path).parent.glob(f"{PREFIX}*-{Path(path).name.split('-')[-1]}"))


def test_what_a_killed_run_left_goes_with_the_next(run):
    first = run.start()
    ask(first, "free")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert run.file.exists(), "nobody was left to take it away"
    other = Run()
    try:
        ask(other.start(), "free")
        assert not run.file.exists() and other.file.exists()
    finally:
        end(other)


def test_a_run_that_lives_keeps_its_file(run):
    ask(run.start(), "free")
    other = Run()
    try:
        ask(other.start(), "free")
        assert run.file.exists()
    finally:
        end(other)


def test_two_that_end_at_one_time_leave_nothing(run, programs, tmp_path):
    """Each is gone only after it has looked whether it is the last. Until
    it is gone it has its memory."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    preload = f"{run.env['LD_PRELOAD']}:{programs / 'liblinger.so'}"
    first, second = run.start({"LD_PRELOAD": preload, "LINGER": str(fifo)}), run.start()
    assert ask(first, "take", 60 * GIB) == 0 and ask(second, "take", 1) == 0
    first.stdin.close()
    with fifo.open("rb"):
        assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY, "the first is still there"
        leave(second)
        assert not run.file.exists() and first.poll() is None
    assert first.wait(60) == 0


FIRST = """
import os, subprocess, sys
worker = subprocess.Popen([sys.executable, "-S", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print("take 1", file=worker.stdin, flush=True)
assert worker.stdout.readline() == "0\\n"
worker.kill(), worker.wait()
%s
print(os.environ["MEMTRACE_VIRTUAL_CARDS"], os.path.exists(os.environ["MEMTRACE_VIRTUAL_CARDS"]))
"""
BETWEEN = "subprocess.run([sys.executable, '-S', '-c', 'pass'], check=True)"


@pytest.mark.parametrize("between", ["nothing", "others"])
def test_the_run_s_first_process_clears_up_after_the_killed(between):
    """It needs no card for that. Other processes without one have no business there."""
    code = FIRST % (BETWEEN if between == "others" else "")
    done = support.must(support.memtrace("run", "--virtual", "t4", "--record", "off", "--", support.PYTHON, "-S", "-c", code, CARD))
    path, existed = done.stdout.split()
    assert existed == "True" and not Path(path).exists()


def test_another_machine_within_a_run_has_cards_of_its_own(run):
    """It says so itself in its environment; the same one shares."""
    first, other, same = run.start(), run.start({"MEMTRACE_VIRTUAL": "h100*2"}), run.start({"MEMTRACE_VIRTUAL": "h100"})
    assert ask(first, "take", 60 * GIB) == 0
    assert ask(other, "take", 60 * GIB) == 0
    assert ask(same, "take", 60 * GIB) == OUT_OF_MEMORY


def test_without_a_run_a_process_is_alone(run):
    del run.env["MEMTRACE_VIRTUAL_CARDS"]
    first, second = run.start(), run.start()
    assert ask(first, "take", 60 * GIB) == 0
    assert ask(second, "take", 60 * GIB) == 0


@pytest.mark.parametrize("wrong", ["folder", "link", "dangling", "fifo", "lease", "missing", "full", "somebody's"])
def test_a_file_that_cannot_be_had_is_said_and_harms_nobody(run, tmp_path, wrong):
    """Nothing is written through it, made of it or waited for."""
    path, elsewhere, limits = tmp_path / "cards", tmp_path / "elsewhere", ""
    says = {"folder": "Is a directory", "link": "symbolic link", "dangling": "symbolic link", "missing": "No such file"}
    says |= {"fifo": "not a file of this", "somebody's": "not a file of this", "lease": "unavailable", "full": "large"}
    if wrong == "folder":
        path.mkdir()
    elif wrong == "link":
        elsewhere.write_bytes(b"keep")
        path.symlink_to(elsewhere)
    elif wrong == "dangling":
        path.symlink_to(elsewhere)
    elif wrong == "fifo":
        os.mkfifo(path)
    elif wrong == "missing":
        path = tmp_path / "no" / "cards"
    elif wrong == "full":
        limits = "ulimit -f 1; "
    else:
        path.write_bytes(b"")
    if wrong == "somebody's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 65534, 65534)
    env = support.environment({**run.env, "MEMTRACE_VIRTUAL_CARDS": str(path)})
    command = ["sh", "-c", f'{limits}exec {support.PYTHON} -S "{CARD}"']
    with leased(path if wrong == "lease" else None):
        done = subprocess.run(command, env=env, input="mortal\ntake 100\nfree\n", capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["0", "0"]), done
    [line] = [line for line in done.stderr.splitlines() if "this process has cards of its own" in line]
    assert str(path) in line and says[wrong] in line
    assert elsewhere.exists() == (wrong == "link") and (wrong != "link" or elsewhere.read_bytes() == b"keep")


@contextlib.contextmanager
def leased(path):
    """Whoever opens this waits until it is given up: for the better part
    of a minute, as the kernel has it."""
    if path is None:
        yield
        return
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent to whoever should give it up
    try:
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            yield
    finally:
        signal.signal(signal.SIGIO, before)


def test_closing_every_descriptor_changes_nothing(run):
    first, second = run.start(), run.start()
    assert ask(first, "take", 60 * GIB) == 0
    assert tell(first, "shut").stdout.readline() == "0\n"
    assert ask(second, "take", 60 * GIB) == OUT_OF_MEMORY
    assert ask(first, "give") == 0 and ask(second, "take", 60 * GIB) == 0


def test_mode_and_owner_of_the_file(run):
    ask(run.start(), "free")
    assert run.file.stat().st_mode & 0o777 == 0o600 and run.file.stat().st_uid == os.geteuid()
