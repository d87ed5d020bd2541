"""The command line: bad input ends in one line that says what to do, and exit code
2; what was traced is untouched."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys

import pytest
import support


def refused(done, *words):
    """Exit code 2 and one line on stderr, with these words; nothing on stdout."""
    support.must(done, code=2)
    said = done.stderr.strip()
    assert len(said.splitlines()) == 1 and said.startswith("memtrace"), said
    assert "panicked" not in said and not done.stdout
    for word in words:
        assert word.lower() in said.lower(), f"{word!r} is not in: {said}"


@pytest.mark.parametrize(
    "spec, words",
    [
        ("h101", ("h101", "h100")),
        ("", ("sm_90,80GiB,132SM",)),
        ("h100*0", ("*0",)),
        ("h100*many", ("many",)),
        ("sm_90,0GiB,132SM", ("0GiB",)),
        ("sm_90,999999999GiB,132SM", ("999999999GiB",)),
        ("sm_90,80GiB", ("sm_90,80GiB",)),
        ("sm_10,80GiB,132SM", ("sm_10",)),
        ("sm_90,80GiB,0SM", ("0SM",)),
        ("h100,sleepy", ("h100,sleepy",)),
    ],
)
def test_a_card_that_cannot_be(spec, words, tmp_path):
    refused(support.memtrace("run", "--virtual", spec, "--out", tmp_path, "--", "true"), *words)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ([], "Usage"),
        (["walk"], "walk"),
        (["run"], "Usage"),
        (["run", "--"], "Usage"),
        (["run", "--stacks", "some", "--", "true"], "none, python, all"),
        (["run", "--format", "xml", "--", "true"], "pickle, json"),
        (["run", "--record", "maybe", "--", "true"], "on, off"),
        (["run", "--colour", "--", "true"], "--colour"),
        (["summary"], "Usage"),
        (["check"], "Usage"),
    ],
)
def test_arguments_that_make_no_sense(arguments, word):
    done = support.must(support.memtrace(*arguments), code=2)
    assert word in done.stderr and not done.stdout


def test_a_command_that_is_not_there(tmp_path):
    refused(support.memtrace("run", "--out", tmp_path, "--", "no-such-command-here"), "no-such-command-here", "PATH")
    missing = tmp_path / "absent" / "program"
    refused(support.memtrace("run", "--out", tmp_path, "--", missing), str(missing))
    plain = tmp_path / "plain.txt"
    plain.write_text("not a program\n")
    refused(support.memtrace("run", "--out", tmp_path, "--", plain), str(plain))
    refused(support.memtrace("run", "--out", tmp_path, "--", tmp_path), str(tmp_path))


def test_a_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("in the way")
    refused(support.memtrace("run", "--out", file, "--", "true"), str(file))
    refused(support.memtrace("run", "--out", file / "below", "--", "true"), str(file))
    refused(support.memtrace("run", "--out", "/proc/memtrace", "--", "true"), "/proc/memtrace")


def test_a_folder_that_is_not_there_yet_is_made(tmp_path):
    out = tmp_path / "a" / "b"
    done = support.record([support.PYTHON, "-c", "import torch; torch.zeros(1, device='cuda')"], out)
    support.must(done)
    support.only_file(out)


def compile_c(path, source, *flags):
    subprocess.run(["gcc", "-x", "c", "-", "-o", str(path), *flags], input=source, text=True, check=True)
    return path


def test_a_static_binary(tmp_path):
    """The loader never runs, so nothing can be preloaded: that must be
    said, not recorded as nothing."""
    program = compile_c(tmp_path / "static", "void _start(void) { for (;;); }", "-static", "-nostdlib")
    refused(support.memtrace("run", "--out", tmp_path, "--", program), str(program), "static")


def test_a_setuid_binary(tmp_path):
    """The loader drops LD_PRELOAD there."""
    program = tmp_path / "setuid"
    shutil.copy(shutil.which("true"), program)
    other = 65534 if os.geteuid() == 0 else os.geteuid()
    if os.geteuid() == 0:
        os.chown(program, other, other)
    program.chmod(0o755 | stat.S_ISUID)
    if os.geteuid() == 0:
        refused(support.memtrace("run", "--out", tmp_path, "--", program), str(program), "setuid")
    else:  # a program of one's own keeps its preload
        support.must(support.memtrace("run", "--out", tmp_path, "--", program))


def test_another_architecture(tmp_path):
    program = tmp_path / "foreign"
    header = bytearray(open(sys.executable, "rb").read(4096))
    header[18:20] = (183).to_bytes(2, "little")  # e_machine: AArch64
    program.write_bytes(header)
    program.chmod(0o755)
    refused(support.memtrace("run", "--out", tmp_path, "--", program), str(program), "aarch64")


def test_a_library_that_is_missing(tmp_path):
    """The tool alone, without what must be beside it."""
    shutil.copy(support.MEMTRACE, tmp_path / "memtrace")
    for arguments, library in ((["run"], "libmemtrace.so"), (["run", "--virtual", "h100", "--record", "off"], ".so")):
        done = support.execute([tmp_path / "memtrace", *arguments, "--", "true"])
        refused(done, library, str(tmp_path))


def test_no_pytorch_and_no_cuda_are_the_programs_own_business(tmp_path):
    """Its own error and its own exit code come through; we add at most a line of ours."""
    bare = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    code = "import sys; sys.path = []; import torch_that_is_nowhere"
    done = support.must(support.memtrace("run", "--out", tmp_path, "--", bare, "-c", code), code=1)
    assert "ModuleNotFoundError" in done.stderr and "torch_that_is_nowhere" in done.stderr
    assert not support.files(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 2, 3, 77, 255])
def test_exit_codes_pass_through(code, tmp_path):
    done = support.memtrace("run", "--out", tmp_path, "--", "sh", "-c", f"exit {code}")
    support.must(done, code=code)
    recorded = f"import os, sys, torch; torch.zeros(5, device='cuda'); sys.exit({code})"
    if code in (0, 3):
        support.must(support.record([support.PYTHON, "-c", recorded], tmp_path), code=code)
        support.only_file(tmp_path)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGABRT", "SIGSEGV"])
def test_signals_pass_through(name, tmp_path):
    number = getattr(signal, name)
    code = f"import os, torch; torch.zeros(5, device='cuda'); os.kill(os.getpid(), {int(number)})"
    done = support.record([support.PYTHON, "-c", code], tmp_path)
    support.must(done, code=-number)


def test_the_programs_own_error_passes_through(tmp_path):
    code = "import torch; x = torch.zeros(5, device='cuda'); raise ValueError('my own trouble')"
    done = support.must(support.record([support.PYTHON, "-c", code], tmp_path), code=1)
    assert done.stderr.count("ValueError: my own trouble") == 1
    assert len(support.history(support.load(support.only_file(tmp_path)))) >= 2


def test_an_uncaught_oom_ends_as_ever_and_leaves_its_snapshot(tmp_path):
    code = "import torch\nheld = torch.zeros(1 << 20, device='cuda')\ntorch.empty(1 << 40, dtype=torch.uint8, device='cuda')"
    done = support.must(support.record([support.PYTHON, "-c", code], tmp_path), code=1)
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 GiB" in done.stderr
    by_reason = {support.load(p)["memtrace"]["reason"]: support.load(p) for p in support.files(tmp_path)}
    at_oom = by_reason["oom"]
    last = support.history(at_oom)[-1]
    assert (last["action"], last["size"]) == ("oom", 1 << 40)
    assert [b["requested_size"] for b in support.live_blocks(at_oom)] == [4 << 20]


@pytest.mark.parametrize("script", ["mlp.py", "streams.py", "oom.py", "cuda_graphs.py"])
def test_output_is_the_same_with_and_without_recording(script, tmp_path):
    said = {}
    for record in ("on", "off"):
        command = [support.PYTHON, support.HERE / "scripts" / script]
        done = support.must(support.record(command, tmp_path / record, run=["--record", record]))
        own = [line for line in done.stderr.splitlines() if not line.startswith("memtrace: ")]
        said[record] = done.stdout, own
    assert said["on"] == said["off"]


def test_standard_input_and_the_folder_are_the_programs(tmp_path):
    done = subprocess.run(
        [support.MEMTRACE, "run", "--out", tmp_path / "out", "--", "sh", "-c", "cat; pwd; echo error >&2; echo $0", "a b"],
        input="through\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=support.environment(),
    )
    assert (done.stdout, done.stderr) == (f"through\n{tmp_path}\na b\n", "error\n")


def test_summary_tells_peak_sites_and_oom(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "small = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')\n"
        "def peak():\n"
        "    return torch.empty(300 << 20, dtype=torch.uint8, device='cuda')\n"
        "x = peak()\n"
        "del x\n"
        "try: torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError: pass\n"
    )
    out = tmp_path / "out"
    support.must(support.record([support.PYTHON, program], out))
    path = support.files(out)[-1]
    text = support.must(support.memtrace("summary", path)).stdout
    assert "301.0 MiB" in text and "program.py:4" in text and "peak" in text.lower(), text
    report = json.loads(support.must(support.memtrace("summary", path, "--json")).stdout)
    flat = json.dumps(report)
    assert str(301 << 20) in flat and "program.py" in flat and str(1 << 40) in flat, flat[:2000]


@pytest.mark.parametrize("content", [None, b"nonsense"])
def test_summary_of_what_is_no_snapshot(content, tmp_path):
    path = tmp_path / "file.pickle"
    if content is not None:
        path.write_bytes(content)
    refused(support.memtrace("summary", path), str(path))


def test_help_and_version():
    assert "run" in support.must(support.memtrace("--help")).stdout
    for command in ("run", "summary", "check", "devices"):
        assert support.must(support.memtrace(command, "--help")).stdout.strip()
    assert support.must(support.memtrace("--version")).stdout.startswith("memtrace ")
