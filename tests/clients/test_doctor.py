"""`memtrace doctor`: what it says of sound and of broken installations, and of
programs; each cause is a real one."""

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


def test_entry_points_by_library(tmp_path):
    """Exact counts; the program's exit code is reported, and its output is out of the way."""
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


def test_a_dead_process_knows_its_entry_points(tmp_path):
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
    """Its black box is read, and what only the process itself could have
    said is reported as not known."""
    code = TAKE + "[take() for _ in range(9)]; import os; os.kill(os.getpid(), 9)"
    answer = doctor("--virtual", "h100", "--", support.PYTHON, "-c", code, cwd=tmp_path)
    (process,) = answer["processes"]
    assert (answer["exit"], process["reason"], process["doors"][0]["calls"]) == ("signal: 9 (SIGKILL)", "recovered", 9)
    assert any(c["level"] == "note" and "whether calls went past memtrace is not known" in c["text"] for c in answer["checks"])
    clean = doctor("--virtual", "h100", "--", support.PYTHON, "-c", TAKE + "take()", cwd=tmp_path)
    assert not any("not known" in c["text"] for c in clean["checks"])


def test_what_goes_past(tmp_path):
    """A library that was opened so that its own runtime comes first, and whose
    runtime never comes to the driver."""
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
    """Its calls of the runtime are not seen as such, and that is said; so is a
    tool that CUDA's driver will load."""
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


def said(answer, about):
    return [(c["level"], c["text"]) for c in answer["checks"] if c["about"] == about]


needs_mounts = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0, reason="mount namespaces need root"
)


def in_mounts(script, *command, **options):
    """Runs a command where `script` has mounted what it wants, out of everybody else's sight."""
    return support.execute(["unshare", "-m", "bash", "-ec", script + '; "$@"', "in", *command], **options)


def a_driver(folder):
    folder.mkdir(exist_ok=True)
    (folder / "one.c").write_text("int cuInit(unsigned flags) { return (int) flags; }\n")
    client.compile(folder / "one.c", folder / "libcuda.so.1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    return folder / "libcuda.so.1"


def test_a_driver_in_the_search_path(tmp_path):
    """Where the loader finds it, and a program would. A file that it can't load is none."""
    path = a_driver(tmp_path)
    assert said(doctor(env={"LD_LIBRARY_PATH": str(tmp_path)}), "CUDA") == [("ok", f"driver library {path}")]
    path.write_text("")
    assert said(doctor(env={"LD_LIBRARY_PATH": str(tmp_path)}), "CUDA") != [("ok", f"driver library {path}")]


@needs_mounts
def test_a_driver_in_the_loaders_cache(tmp_path):
    """As under WSL and in containers: its folder is named in /etc/ld.so.conf.d and nowhere else."""
    path = a_driver(tmp_path / "driver")
    script = f"cp -r /etc '{tmp_path}/etc'; mount --bind '{tmp_path}/etc' /etc; echo '{path.parent}' >/etc/ld.so.conf.d/0.conf; ldconfig"
    done = in_mounts(script, support.MEMTRACE, "doctor", "--json")
    assert said(json.loads(support.must(done).stdout), "CUDA") == [("ok", f"driver library {path}")]


@needs_mounts
def test_a_driver_where_the_loader_does_not_look(tmp_path):
    path = a_driver(tmp_path / "driver")
    at = "/usr/local/nvidia/lib64"
    script = f"mount -t tmpfs tmpfs /usr/local; mkdir -p {at}; cp '{path}' {at}"
    done = in_mounts(script, support.MEMTRACE, "doctor", "--json")
    ((level, text),) = said(json.loads(support.must(done).stdout), "CUDA")
    if "driver library" not in text:  # this machine has one
        assert level == "note" and f"add {at} to LD_LIBRARY_PATH" in text
        advised = in_mounts(script, support.MEMTRACE, "doctor", "--json", env={"LD_LIBRARY_PATH": at})
        assert said(json.loads(support.must(advised).stdout), "CUDA") == [("ok", f"driver library {at}/libcuda.so.1")]


# The virtual GPU answers as a driver does; where its libraries are not preloaded, a program
# finds them as it finds the real ones.
ASK = "import os; print(os.environ['LD_LIBRARY_PATH'])"


def real(*args, code=0, **options):
    return json.loads(support.must(support.memtrace("devices", "--real", "--json", *args, **options), code=code).stdout)


def of_virtual_gpu(tmp_path, spec):
    """An environment in which the virtual GPU's folder is where the loader
    looks, and nothing is preloaded."""
    done = support.memtrace("run", "--record", "off", "--virtual", spec, "--", support.PYTHON, "-c", ASK, cwd=tmp_path)
    return {"LD_LIBRARY_PATH": support.must(done).stdout.strip(), "MEMTRACE_VIRTUAL": spec}


def test_no_driver_no_cards(tmp_path):
    """Nothing is said of it where nobody asked, and nothing is loaded."""
    if any(c["about"] == "GPU" for c in doctor(cwd=tmp_path)["checks"]):
        pytest.skip("this machine has a GPU")
    assert real(code=1) == [] and doctor(cwd=tmp_path)["cards"] == []
    text = support.must(support.memtrace("devices")).stdout
    assert text.startswith("--virtual ") and "cuda:0" not in text
    assert "sees no GPU" in support.must(support.memtrace("devices", "--real"), code=1).stdout


def test_the_cards_that_a_driver_has(tmp_path):
    env = of_virtual_gpu(tmp_path, "h100*2")
    cards = real(env=env)
    profile = next(p for p in json.loads(support.memtrace("devices", "--json").stdout) if p["key"] == "h100")
    assert [c["device"] for c in cards] == [0, 1] and len({c["uuid"] for c in cards}) == 2
    for card in cards:
        assert card["virtual"] and card["uuid"].startswith("GPU-") and card["driver"] and card["cuda"]
        assert [card[k] for k in ("name", "compute_capability", "memory_bytes")] == [
            profile[k] for k in ("name", "compute_capability", "memory_bytes")
        ]
        # No context was made for the question.
        assert card["free_bytes"] >= card["memory_bytes"] - (1 << 30)
    assert len(real(env=env | {"CUDA_VISIBLE_DEVICES": "1"})) == 1
    assert real(env=env | {"CUDA_VISIBLE_DEVICES": "-1"}, code=1) == []
    text = support.must(support.memtrace("devices", env=env)).stdout
    assert "cuda:1 " in text and "memtrace's virtual GPU" in text and "--virtual " in text
    answer = doctor(env=env, cwd=tmp_path)
    assert answer["cards"] == cards and [level for level, _ in said(answer, "GPU")] == ["ok", "ok"]


def test_the_question_is_not_recorded(tmp_path):
    """Under a recorder the driver is asked without it. On a virtual GPU the cards are
    those, with what others hold of them."""
    out = tmp_path / "out"
    code = TAKE.replace("4096", "5 << 30") + (
        f"take(); import subprocess; print(subprocess.run([{str(support.MEMTRACE)!r}, 'devices', '--real', '--json'], "
        "check=True, capture_output=True, text=True).stdout)"
    )
    done = support.must(support.record([support.PYTHON, "-c", code], out))
    (card,) = json.loads(done.stdout)
    assert card["virtual"] and card["memory_bytes"] - card["free_bytes"] >= 5 << 30
    # That a program ran without the recorder is said, as of any other.
    assert len(support.files(out)) == 1 and done.stderr.count("devices") == 1


def test_a_driver_that_is_broken(tmp_path):
    """It costs a line, and no more."""
    source = tmp_path / "one.c"
    env = {"LD_LIBRARY_PATH": str(tmp_path)}
    for body, words in [
        ("int cuInit(unsigned flags) { return 999; }", "doesn't answer"),
        ("int cuInit(unsigned flags) { return 999; } int cuGetErrorName(int e, const char **name) { *name = \"CUDA_BAD\"; return 0; }", "CUDA_BAD"),
        ("int cuInit(unsigned flags) { return *(volatile int *) 16; }", "doesn't answer"),
    ]:
        source.write_text(body)
        client.compile(source, tmp_path / "libcuda.so.1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
        done = support.must(support.memtrace("devices", "--real", env=env), code=2)
        assert words in done.stderr and done.stderr.count("\n") == 1
        done = support.must(support.memtrace("devices", env=env))
        assert words in done.stderr and done.stderr.count("\n") == 1 and done.stdout.startswith("--virtual ")
        answer = doctor(env=env, cwd=tmp_path)
        ((level, text),) = said(answer, "GPU")
        assert level == "note" and words in text and answer["cards"] == []


# How much room there is; how it is said; whether a killed process leaves a record.
ROOM = {"256k": ("wrong", "none can be made", False), "2m": ("note", "a short history", True), "64m": ("ok", "has room in", True)}


@needs_mounts
@pytest.mark.parametrize("size", ROOM)
def test_room_for_a_black_box_is_what_a_killed_process_finds(size, tmp_path):
    level, words, survives = ROOM[size]
    (tmp_path / "box").mkdir()
    code = TAKE + "take(); import os; os.kill(os.getpid(), 9)"
    recorded = f"'{support.MEMTRACE}' run --virtual h100 --out '{tmp_path}/out' -- '{support.PYTHON}' -c '{code}' || true"
    script = f"mount -t tmpfs -o size={size} tmpfs '{tmp_path}/box'; {recorded}; '{support.MEMTRACE}' recover '{tmp_path}/out' >&2 || true"
    env = {"MEMTRACE_BLACKBOX": str(tmp_path / "box")}
    done = support.must(in_mounts(script, support.MEMTRACE, "doctor", "--json", env=env), code=int(level == "wrong"))
    ((found, text),) = said(json.loads(done.stdout[done.stdout.index("{"):]), "black box")
    assert (found, words in text) == (level, True), text
    assert bool(support.files(tmp_path / "out")) == survives


@needs_mounts
def test_no_room_in_memory_is_room_in_the_output_folder(tmp_path):
    """The recorder goes there, too, and a killed process leaves its record."""
    out = tmp_path / "out"
    code = TAKE + "take(); import os; os.kill(os.getpid(), 9)"
    script = f"mount -t tmpfs -o size=4k tmpfs /dev/shm; '{support.MEMTRACE}' run --virtual h100 --out '{out}' -- '{support.PYTHON}' -c '{code}' || true"
    done = support.must(in_mounts(script, support.MEMTRACE, "doctor", "--json", "--out", out))
    ((level, text),) = said(json.loads(done.stdout[done.stdout.index("{"):]), "black box")
    assert level in ("note", "ok") and f"has room in {out}" in text, text
    assert hazard.recover(out)


def test_a_limit_on_files(tmp_path):
    """The kernel kills who writes more: doctor says so and lives."""
    for kib, level in ((1000, "wrong"), (3500, "ok")):
        done = support.execute(["bash", "-c", f'ulimit -f {kib}; exec "$@"', "limited", support.MEMTRACE, "doctor", "--json"], cwd=tmp_path)
        answer = json.loads(support.must(done, code=int(level == "wrong")).stdout)
        assert [c[0] for c in said(answer, "black box")] == [level], answer


def test_the_virtual_gpu_is_one_note():
    """It is some forty libraries, which nobody has preloaded himself."""
    done = support.memtrace("run", "--virtual", "h100", "--record", "off", "--", support.MEMTRACE, "doctor", "--json")
    notes = [text for _, text in said(json.loads(support.must(done).stdout), "LD_PRELOAD")]
    assert len(notes) == 1 and "virtual GPU" in notes[0], notes


def test_sanitizers_stay_first(tmp_path):
    """What is said of the order is what the program gets."""
    name = "libasan.so.99"
    (tmp_path / "one.c").write_text("int one(void) { return 1; }\n")
    client.compile(tmp_path / "one.c", tmp_path / name, "-shared", "-fPIC")
    client.compile(tmp_path / "one.c", tmp_path / "libother.so")
    env = {"LD_PRELOAD": f"{tmp_path}/libother.so:{tmp_path}/{name}"}
    notes = dict(text.split(" ", 1) for _, text in said(doctor(env=env), "LD_PRELOAD"))
    assert "stays first" in notes[f"{tmp_path}/{name}"] and notes[f"{tmp_path}/libother.so"] == "is loaded, too; memtrace comes before it"
    done = support.must(support.memtrace("run", "--", "printenv", "LD_PRELOAD", env=env))
    names = [path.rsplit("/", 1)[1] for path in done.stdout.split(":")]
    assert [n.strip() for n in names] == [name, "libmemtrace.so", "libother.so"]


def test_programs_without_memtrace_are_named(tmp_path):
    """As `run` does at its end."""
    code = TAKE + "take(); import os, subprocess; env = {k: v for k, v in os.environ.items() if k != 'LD_PRELOAD'}; "
    code += "[subprocess.run(['true', 'lost'], env=env, check=True) for _ in range(12)]"
    answer = doctor("--virtual", "h100", "--out", tmp_path, "--", support.PYTHON, "-c", code)
    lines = [text for level, text in said(answer, "tree") if level == "note"]
    assert len(lines) == 11 and "and 2 more" in lines[10]
    assert all("LD_PRELOAD was replaced or cleared" in line and "true lost (process " in line for line in lines[:10])
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".run"]
    clean = doctor("--virtual", "h100", "--", support.PYTHON, "-c", TAKE + "take()")
    assert said(clean, "tree") == []


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
    env = {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}
    notes = [c["text"] for c in doctor(env=env)["checks"] if c["about"] == "settings"]
    assert "PyTorch 2.6 turns its allocator off for any value" in notes[0] and "kept in" in notes[1]
    assert "doesn't read it, because PYTORCH_CUDA_ALLOC_CONF is set" in notes[2]
    # A slip of the pen, among ours.
    [note] = [c["text"] for c in doctor(env={"MEMTRACE_EVENT": "9"})["checks"] if c["about"] == "settings"]
    assert "MEMTRACE_EVENT is not known" in note and "MEMTRACE_EVENTS?" in note
    # By HIP's name, too, also in PyTorch for CUDA.
    for value, said in [("1", "allocator is off"), ("0", "PyTorch 2.6 turns its allocator off for any value")]:
        [note] = [c["text"] for c in doctor(env={"PYTORCH_NO_HIP_MEMORY_CACHING": value})["checks"] if c["about"] == "settings"]
        assert said in note
    ((about, text),) = wrong(doctor(env={"LD_PRELOAD": "/no/such/lib.so"}, code=1))[-1:]
    assert (about, "take it out" in text) == ("LD_PRELOAD", True)


@pytest.mark.parametrize("command", [["/no/such/program"], ["--virtual", "h9000", "--", "true"]])
def test_what_cannot_be_run(command):
    done = support.memtrace("doctor", *command)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
