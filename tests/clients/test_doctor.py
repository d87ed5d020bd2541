"""`memtrace doctor`: what it says of sound and of broken installations, and of programs; each cause is a real one."""

import json
import os
import shutil
import signal
import subprocess

import client
import hazard
import pytest
import support

TAKE = "import ctypes; take = lambda: ctypes.CDLL(None).cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096)); "


def doctor(*args, code=0, **options):
    return json.loads(support.must(support.memtrace("doctor", "--json", *args, **options), code=code).stdout)


def wrong(answer):
    return [(c["about"], c["text"]) for c in answer["checks"] if c["level"] == "wrong"]


def test_a_sound_installation(tmp_path):
    answer = doctor(cwd=tmp_path)
    assert answer["ok"] and wrong(answer) == []
    assert {"library", "loader", "snapshots", "black box", "Python"} <= {c["about"] for c in answer["checks"]}
    text = support.must(support.memtrace("doctor", cwd=tmp_path)).stdout
    assert "libc.so.6" in text and text.endswith("\nnothing is wrong\n")
    assert list(tmp_path.iterdir()) == []


def test_doors_by_library(tmp_path):
    """Exact counts; the program's exit code is told, and its output is out of the way."""
    code = TAKE + "[take() for _ in range(700)]; print('hello'); raise SystemExit(3)"
    done = support.memtrace("doctor", "--json", "--virtual", "h100", "--", support.PYTHON, "-c", code, cwd=tmp_path)
    answer = json.loads(support.must(done).stdout)
    assert answer["exit"] == 3 and "hello" in done.stderr and answer["ok"]
    (process,) = answer["processes"]
    doors = {d["door"]: d for d in process["doors"]}
    assert doors["cudaMalloc"]["calls"] == 700
    ((library, calls),) = [(c["library"], c["calls"]) for c in doors["cudaMalloc"]["callers"]]
    assert calls == 700 and "ffi" in library
    assert client.events({"memtrace": process}) == 700 and process["cost"]["sampled"] == 2
    assert 0 < process["cost"]["ns_each"] < 10_000_000 and 0 < process["cost"]["share"] < 1
    assert all(0 < full < 1 for full in process["full"].values())
    assert list(tmp_path.iterdir()) == []


def test_a_dead_process_knows_its_doors(tmp_path):
    code = TAKE + "[take() for _ in range(5)]; print(flush=True); input()"
    command = [support.MEMTRACE, "run", "--virtual", "h100", "--out", tmp_path, "--", support.PYTHON, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([str(c) for c in command], env=support.environment(), **pipes) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    (path,) = hazard.recover(tmp_path)
    about = support.load(path)["memtrace"]
    assert [(d["door"], d["calls"]) for d in about["doors"]] == [("cudaMalloc", 5)]
    assert "ffi" in about["doors"][0]["callers"][0]["library"] and about["stacks"]["code_words"] > 8
    for command in ("report", "summary"):
        text = support.must(support.memtrace(command, path)).stdout
        assert "note: whether calls went past memtrace is not known" in text and "nothing had computed is not known" in text


def test_a_program_that_is_killed(tmp_path):
    """Its black box is read, and what only the process itself could have said is told as not known."""
    code = TAKE + "[take() for _ in range(9)]; import os; os.kill(os.getpid(), 9)"
    answer = doctor("--virtual", "h100", "--", support.PYTHON, "-c", code, cwd=tmp_path)
    (process,) = answer["processes"]
    assert (answer["exit"], process["reason"], process["doors"][0]["calls"]) == ("signal: 9 (SIGKILL)", "recovered", 9)
    assert any(c["level"] == "note" and "whether calls went past memtrace is not known" in c["text"] for c in answer["checks"])
    clean = doctor("--virtual", "h100", "--", support.PYTHON, "-c", TAKE + "take()", cwd=tmp_path)
    assert not any("not known" in c["text"] for c in clean["checks"])


def test_what_goes_past(tmp_path):
    """A library that was opened so that its own runtime comes first, and whose runtime never comes to the driver."""
    own, user = tmp_path / "libown.c", tmp_path / "libuser.c"
    own.write_text("#include <stdlib.h>\nint cudaMalloc(void **at, size_t n) { *at = malloc(n); return 0; }\n")
    user.write_text("#include <stddef.h>\nint cudaMalloc(void **at, size_t n);\nint use(void) { void *at; return cudaMalloc(&at, 64); }\n")
    client.compile(own, tmp_path / "libown.so")
    client.compile(user, tmp_path / "libuser.so", f"-L{tmp_path}", "-lown", f"-Wl,-rpath,{tmp_path},-z,now")
    code = TAKE + f"take(); print(ctypes.CDLL('{tmp_path}/libuser.so', mode=os.RTLD_NOW | os.RTLD_DEEPBIND).use())"
    answer = doctor("--virtual", "h100", "--", support.PYTHON, "-c", "import os; " + code, code=1)
    ((about, text),) = wrong(answer)
    assert about == "doors" and f"{tmp_path}/libuser.so calls cudaMalloc in {tmp_path}/libown.so" in text
    # Opened as usual it binds to memtrace, whatever it has brought along.
    usual = code.replace(", mode=os.RTLD_NOW | os.RTLD_DEEPBIND", "")
    answer = doctor("--virtual", "h100", "--", support.PYTHON, "-c", "import os; " + usual)
    doors = {d["door"]: d["callers"] for d in answer["processes"][0]["doors"]}
    assert {"library": f"{tmp_path}/libuser.so", "calls": 1} in doors["cudaMalloc"]


def test_an_interposer_in_front(programs, tmp_path):
    """Calls come from it, and it calls on: that is worth a note, and nothing is wrong."""
    code = TAKE + "take()"
    before = {"LD_PRELOAD": str(programs / "libbefore.so")}
    answer = doctor("--virtual", "h100", "--", support.PYTHON, "-c", code, env=before)
    assert ("note", "LD_PRELOAD") in [(c["level"], c["about"]) for c in answer["checks"]]


def test_a_program_with_a_runtime_of_its_own(tmp_path):
    """Its calls of the runtime are not seen as such, and that is said; so is a tool that CUDA's driver will load."""
    source = tmp_path / "own.c"
    source.write_text("int cudaGetDeviceCount(int *n) { *n = 0; return 100; }\nint main(void) { int n; return cudaGetDeviceCount(&n) != 100; }\n")
    client.compile(source, tmp_path / "own")
    answer = doctor("--virtual", "h100", "--", tmp_path / "own", env={"CUDA_INJECTION64_PATH": "/opt/tool.so"}, code=1)
    notes = {c["about"]: c["text"] for c in answer["checks"] if c["level"] == "note"}
    assert f"{tmp_path}/own has the CUDA runtime linked into it" in notes["program"]
    assert "CUDA_INJECTION64_PATH=/opt/tool.so" in notes["settings"]
    other = doctor("--virtual", "h100", "--", support.PYTHON, "-c", TAKE + "take()")
    assert "program" not in [c["about"] for c in other["checks"]]


def test_a_program_that_records_nothing():
    ((about, _),) = wrong(doctor("--virtual", "h100", "--", "true", code=1))
    assert about == "record"


def test_no_library(tmp_path):
    shutil.copy(support.MEMTRACE, tmp_path / "memtrace")
    done = support.must(support.execute([tmp_path / "memtrace", "doctor", "--out", tmp_path / "out"]), code=1)
    assert "wrong library" in done.stdout and "install memtrace with its libraries" in done.stdout
    text = "driver library /" if "driver library /" in done.stdout else "wrong CUDA         neither libcuda.so.1 nor"
    assert text in done.stdout


def test_a_damaged_library(tmp_path):
    shutil.copy(support.MEMTRACE, tmp_path / "memtrace")
    (tmp_path / "libmemtrace.so").write_bytes(support.LIBRARY.read_bytes()[:5000])
    answer = json.loads(support.must(support.execute([tmp_path / "memtrace", "doctor", "--json"]), code=1).stdout)
    assert [about for about, _ in wrong(answer)][:2] == ["library", "loader"]


def test_a_library_that_needs_more_than_every_program_has(tmp_path):
    shutil.copy(support.MEMTRACE, tmp_path / "memtrace")
    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }\n")
    client.compile(source, tmp_path / "libstrange.so")
    client.compile(source, tmp_path / "libmemtrace.so", f"-L{tmp_path}", "-Wl,--no-as-needed", "-lstrange")
    answer = json.loads(support.must(support.execute([tmp_path / "memtrace", "doctor", "--json"]), code=1).stdout)
    assert any("needs libstrange.so" in text for about, text in wrong(answer) if about == "library"), answer


def test_a_driver_in_the_search_path(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("")
    answer = doctor(env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert f"driver library {tmp_path}/libcuda.so.1" in {c["text"] for c in answer["checks"] if c["level"] == "ok"}


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    ((about, text),) = wrong(doctor("--out", tmp_path / "file" / "out", code=1))
    assert about == "snapshots" and "--out DIR" in text
    ((about, text),) = wrong(doctor(env={"MEMTRACE_BLACKBOX": "/proc"}, code=1))
    assert about == "black box" and "MEMTRACE_BLACKBOX" in text
    notes = {c["about"]: c["text"] for c in doctor(env={"MEMTRACE_BLACKBOX": "off"})["checks"] if c["level"] == "note"}
    assert "a killed process did is lost" in notes["black box"]


def test_what_is_set(tmp_path):
    env = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    notes = [c["text"] for c in doctor(env=env)["checks"] if c["about"] == "settings"]
    assert len(notes) == 2 and "allocator is off" in notes[0] and "no segments" in notes[1]
    ((about, text),) = wrong(doctor(env={"LD_PRELOAD": "/no/such/lib.so"}, code=1))[-1:]
    assert (about, "take it out" in text) == ("LD_PRELOAD", True)


@pytest.mark.parametrize("command", [["/no/such/program"], ["--virtual", "h9000", "--", "true"]])
def test_what_cannot_be_run(command):
    done = support.memtrace("doctor", *command)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
