"""The rooms of src/: each knows only those below it, as ARCHITECTURE says."""

import re

import support

# From the lowest up. Single files of src/ are rooms, too.
ROOMS = ["hot", "gauges", "os", "libraries", "stack", "real", "config", "record", "labels", "pytorch", "nccl", "cuda", "process", "allocator", "api", "lib"]
USED = re.compile(r"\bcrate::(\w+)")
GROUP = re.compile(r"\bcrate::\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def used(text):
    """The rooms that a file names, outside of comments and of its tests."""
    text = text.split("#[cfg(test)]")[0]
    text = re.sub(r"//.*", "", text)
    inner = [re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "", group) for group in GROUP.findall(text)]
    return set(USED.findall(text)) | {name for group in inner for name in re.findall(r"(?:^|,)\s*(\w+)", group)}


def test_no_room_knows_one_above_it():
    source = support.ROOT / "src"
    wrong = []
    for path in sorted(source.rglob("*.rs")):
        room = path.relative_to(source).parts[0].removesuffix(".rs")
        assert room in ROOMS, f"{path}: a room that is not in the list"
        if re.search(r"(^|_)test(s|ing)?\.rs$", path.name) or "tests" in path.parts[len(source.parts) :]:
            continue
        above = ROOMS[ROOMS.index(room) + 1 :]
        wrong += [f"{path.relative_to(source)} uses {name}" for name in sorted(used(path.read_text())) if name in above]
    assert wrong == []


def test_the_rule_is_looked_for():
    assert used("use crate::cuda::{table, roles};") == {"cuda"}
    assert used("use crate::{os::{clock, errno}, process::life, api};") == {"os", "process", "api"}
    assert used("// crate::cuda\nlet a = crate::record::switch::recorder();") == {"record"}
    assert used("fn f() {}\n#[cfg(test)]\nmod tests { use crate::cuda; }") == set()
