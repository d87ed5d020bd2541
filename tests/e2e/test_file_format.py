"""Every key under `memtrace` is in docs/file-format.md, whoever wrote the file: the process, the
command from a black box, a replay. A key that has no field in crates/format/src/key is not in
that table, and so turns this red."""

import re

import pytest
import support

TABLE = re.compile(r"^\| `(\S+)` \| ([^|]+) \|", re.MULTILINE)
FRAME = {"name", "filename", "line"}
TYPES = {"number": int, "string": str, "true or false": bool, "list": list, "object": dict, "pair": list}
# The keys of these are names, not words of the format.
NAMES = {"libraries"}
KILLED = """
import os, signal, torch
kept = [torch.empty(1 << 20, device="cuda"), torch.empty(1 << 20, pin_memory=True)]
torch.cuda.nvtx.range_push("phase")
kept.append(torch.nn.Linear(100, 100).cuda())
torch.cuda.mem_get_info()
os.kill(os.getpid(), signal.SIGKILL)
"""


def documented():
    text = (support.ROOT / "docs" / "file-format.md").read_text()
    return {key: kind.strip() for key, kind in TABLE.findall(text)}


def walk(value, at=""):
    """Each key with what is there."""
    if isinstance(value, dict) and at not in NAMES:
        for key, inner in value.items():
            here = f"{at}.{key}" if at else key
            yield here, inner
            yield from walk(inner, here)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner, f"{at}[]")


def unknown_keys(path, known):
    """The keys of a snapshot that the table doesn't have, or has with another type."""
    about = support.load(path)["memtrace"]
    assert about["version"]
    found = set()
    for key, value in walk(about):
        folder, _, name = key.rpartition(".")
        if folder.endswith("frames[]"):
            fits = name in FRAME
        else:
            kind = known.get(key, "")
            may_be_null, kind = kind.endswith(" or null"), kind.removesuffix(" or null")
            fits = kind in TYPES and (isinstance(value, TYPES[kind]) or (may_be_null and value is None))
        if not fits:
            found.add(f"{key}: {value!r:.60}")
    return sorted(found)


@pytest.mark.parametrize("script", ["mlp.py", "oom.py", "labels.py nvtx own.pickle", "pinned.py", "streams.py"])
def test_what_a_process_writes(script, tmp_path):
    known = documented()
    name, *arguments = script.split()
    program = [support.PYTHON, support.HERE / "scripts" / name, *arguments]
    support.must(support.record(program, tmp_path / "out", stacks="all", cwd=tmp_path))
    assert support.files(tmp_path / "out")
    for path in support.files(tmp_path / "out"):
        assert unknown_keys(path, known) == []


def test_what_the_command_writes(tmp_path):
    """From a black box, and of that what would have been, and with source lines."""
    known = documented()
    support.record([support.PYTHON, "-c", KILLED], tmp_path / "run", stacks="all")
    written = support.must(support.memtrace("recover", tmp_path / "run", "--out", tmp_path / "out")).stdout.split()
    support.must(support.memtrace("replay", *written, "--out", tmp_path / "replayed"))
    support.must(support.memtrace("symbolize", *written, "--out", tmp_path / "named.pickle"))
    replayed = support.only_file(tmp_path / "replayed")
    assert len(written) == 1 and support.load(replayed)["memtrace"]["replay"]
    for path in [*written, replayed, tmp_path / "named.pickle"]:
        assert unknown_keys(path, known) == []
