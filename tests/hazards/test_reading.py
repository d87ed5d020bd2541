"""Files of recorded programs, as commands read them. They are JSON with each stack
once, names of programs and folders that no terminal should obey, and names of
libraries that must not be opened."""

import json
import os
import time

import hazard
import pytest
import support
from test_symbolize import SOURCE, compile_library

EVIL = "x\x1b[2J\x07\nmemtrace: all is well\r\u202e\u200b\u009by"


def is_safe(text):
    return "\nmemtrace: all is well" not in text and not any(c in text for c in EVIL if not c.isprintable() and c != "\n")


@pytest.fixture
def run(programs, gpu, tmp_path):
    def run(name, **env):
        env = {**gpu, "MEMTRACE_OUT": str(tmp_path / name), "MEMTRACE_STACKS": "all", **env}
        done = support.must(support.execute([programs / "odd", "constructor", compile_library(tmp_path, "-g")], env=env))
        return done, tmp_path / name

    return run


def expand(snapshot):
    """As docs/files.md says."""
    stacks, frames = snapshot.pop("stacks"), snapshot.pop("frames")

    def walk(value):
        if isinstance(value, dict):
            return {k: [frames[f] for f in stacks[v]] if k == "frames" and isinstance(v, int) else walk(v) for k, v in value.items()}
        return [walk(v) for v in value] if isinstance(value, list) else value

    return walk(snapshot)


def test_json_has_each_stack_once_and_all_commands_read_both_forms(run, tmp_path):
    _, shared = run("shared", MEMTRACE_FORMAT="json")
    shared = support.only_file(shared, ".json")
    read = json.loads(shared.read_text())
    entries = [e for trace in read["device_traces"] for e in trace]
    assert entries and all(isinstance(e["frames"], int) for e in entries if "frames" in e)
    refused = support.must(support.memtrace("check", shared), code=1)
    assert "symbolize --expand" in refused.stdout

    support.must(support.memtrace("symbolize", shared, "--out", tmp_path / "lines.json"))
    support.must(support.memtrace("symbolize", shared, "--expand", "--out", tmp_path / "expanded.json"))
    expanded = json.loads((tmp_path / "expanded.json").read_text())
    assert expand(json.loads((tmp_path / "lines.json").read_text())) == expanded
    assert any(f["name"] == "inner" for e in expanded["device_traces"][0] for f in e.get("frames", []))
    support.must(support.memtrace("check", tmp_path / "expanded.json"))
    for verb in ("summary", "report"):
        same = [support.must(support.memtrace(verb, "--json", tmp_path / name)).stdout for name in ("lines.json", "expanded.json")]
        assert same[0] == same[1]

    _, out = run("expanded", MEMTRACE_FORMAT="json-expanded")
    own = support.only_file(out, ".json")
    support.must(support.memtrace("check", own))
    assert "stacks" not in json.loads(own.read_text())


def test_recover_and_snapshot_write_both_forms(programs, gpu, tmp_path):
    """The black box of a process that sleeps, and of one that was killed."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path)}
    sleeps = "#include <unistd.h>\n" + SOURCE.replace("outer(4321);", "outer(4321); pause();")
    program = hazard.start([programs / "odd", "constructor", compile_library(tmp_path, text=sleeps)], env)
    try:
        end = time.monotonic() + 60
        while not (boxes := list(tmp_path.glob("*.blackbox"))):
            assert time.monotonic() < end and program.poll() is None
            time.sleep(0.01)
        for options, tables in ((), True), (("--expand",), False):
            done = support.must(support.memtrace("snapshot", "--format", "json", *options, "--out", tmp_path / "now", program.pid))
            assert ("stacks" in json.loads(open(done.stdout.strip()).read())) == tables
    finally:
        program.kill()
        program.communicate()
    for options, code in ((), 1), (("--expand",), 0):
        (path,) = hazard.recover(boxes[0], "--keep", "--format", "json", "--out", tmp_path / "then", *options)
        support.must(support.memtrace("check", path), code=code)


def test_names_of_programs_and_folders_reach_no_terminal_raw(programs, gpu, tmp_path):
    folder = tmp_path / EVIL
    folder.mkdir()
    program = folder / EVIL
    program.write_bytes((programs / "odd").read_bytes())
    program.chmod(0o755)
    env = {**gpu, "MEMTRACE_OUT": str(folder / "out"), "MEMTRACE_STACKS": "all"}
    done = support.must(support.execute([program, "plain", EVIL], env=env))
    assert is_safe(done.stderr) and "\\u{1b}" in done.stderr, done.stderr
    path = support.only_file(folder / "out")
    for command in (["summary"], ["report"], ["check"], ["summary", "--json"], ["doctor", "--", program, "plain"]):
        done = support.memtrace(*command, *([] if command[0] == "doctor" else [path]))
        assert is_safe(done.stdout + done.stderr), done.stdout + done.stderr
        if "--json" in command:
            assert EVIL in json.loads(done.stdout)["recorded_by"]["command"]


def test_a_pipe_that_a_file_names_is_not_waited_for(run, tmp_path):
    _, out = run("out", MEMTRACE_FORMAT="json")
    path = support.only_file(out, ".json")
    library = tmp_path / "liblines.so"
    library.unlink()
    os.mkfifo(library)
    done = support.must(support.execute([support.MEMTRACE, "symbolize", path], timeout=60))
    assert f"{library}: is not here" in done.stderr
