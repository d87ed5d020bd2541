"""The modules of src/: each knows only those below it, as ARCHITECTURE says."""

import re

import pytest
import support

# From the lowest up. Single files of src/ are modules, too.
MODULES = ["naked", "pair", "gauges", "real", "debug", "hot", "config", "record", "labels", "pytorch", "nccl", "cuda", "process", "allocator", "api", "lib"]
USED = re.compile(r"\bcrate::(\w+)")
GROUP = re.compile(r"\bcrate::\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def used(text):
    """The modules of src/ that a file names, outside of comments and of its tests."""
    text = text.split("#[cfg(test)]")[0]
    text = re.sub(r"//.*", "", text)
    inner = [re.sub(r"\{(?:[^{}]|\{[^{}]*\})*\}", "", group) for group in GROUP.findall(text)]
    return set(USED.findall(text)) | {name for group in inner for name in re.findall(r"(?:^|,)\s*(\w+)", group)}


def test_no_module_knows_one_above_it():
    source = support.ROOT / "src"
    wrong = []
    for path in sorted(source.rglob("*.rs")):
        module = path.relative_to(source).parts[0].removesuffix(".rs")
        assert module in MODULES, f"{path}: a module that is not in the list"
        if re.search(r"(^|_)test(s|ing)?\.rs$", path.name) or "tests" in path.parts[len(source.parts) :]:
            continue
        above = MODULES[MODULES.index(module) + 1 :]
        wrong += [f"{path.relative_to(source)} uses {name}" for name in sorted(used(path.read_text())) if name in above]
    assert wrong == []


def test_the_rule_is_looked_for():
    assert used("use crate::cuda::{table, roles};") == {"cuda"}
    assert used("use crate::{os::{clock, errno}, process::life, api};") == {"os", "process", "api"}
    assert used("// crate::cuda\nlet a = crate::record::switch::recorder();") == {"record"}
    assert used("fn f() {}\n#[cfg(test)]\nmod tests { use crate::cuda; }") == set()


def test_the_files_that_one_adds_to_are_there():
    """Those that ARCHITECTURE names for a new function, verb, field and so on."""
    section = (support.ROOT / "ARCHITECTURE.md").read_text().split("\n## Adding things\n")[1].split("\n## ")[0]
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", section)
    assert len(named) > 20
    assert [name for name in named if not (support.ROOT / name).exists()] == []


# --- inside a module ------------------------------------------------------------------------------

# Files that know each other.
MOST = 3
# Where modules are, and the crates under them.
SOURCES = ["src", "crates/os/src", "crates/libraries/src", "crates/stack/src"]


def leaves(tree):
    """`a::{b, c::d}` as `a::b` and `a::c::d`."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(tree + ","):
        depth += (c == "{") - (c == "}")
        if c == "," and depth == 0:
            parts.append(tree[start:i].strip())
            start = i + 1
    for part in filter(None, parts):
        group = re.fullmatch(r"([\w:]*?)(?:::)?\{(.*)\}", part, re.DOTALL)
        if group:
            inside = leaves(group[2])
            yield from (f"{group[1]}::{leaf}".removesuffix("::self") if group[1] else leaf for leaf in inside)
        else:
            yield part.split(" as ")[0].removesuffix("::self")


def imports(module, text, modules):
    """The modules that a file names, outside of comments and of its tests."""
    text = re.sub(r"//.*", "", text.split("#[cfg(test)]\nmod tests")[0])
    parent = module.rpartition("::")[0]
    paths = []
    for where, tree in re.findall(r"\buse (crate|super)::([^;]+);", text):
        paths += [leaf if where == "crate" else f"{parent}::{leaf}" for leaf in leaves(" ".join(tree.split()))]
    paths += re.findall(r"\bcrate::([\w:]+)", text)
    found = set()
    for path in paths:
        parts = [part for part in path.split("::") if part]
        named = next(("::".join(parts[:n]) for n in range(len(parts), 0, -1) if "::".join(parts[:n]) in modules), None)
        found |= {named} - {None, module}
    return found


def circles(knows):
    """Sets of modules each of which is reached from every other one."""

    def reached(start):
        seen, left = set(), [start]
        while left:
            new = knows[left.pop()] - seen
            seen |= new
            left += new
        return seen

    reach = {module: reached(module) for module in knows}
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in knows if module in reach[module]}


@pytest.mark.parametrize("source", SOURCES)
def test_circles_inside_a_module_are_small(source):
    source = support.ROOT / source
    files = {}
    for path in source.rglob("*.rs"):
        parts = path.relative_to(source).with_suffix("").parts
        if not any("test" in part for part in parts):
            files["::".join(part for part in parts if part not in ("mod", "lib"))] = path.read_text()
    assert files
    knows = {module: imports(module, text, files) for module, text in files.items()}
    assert [sorted(circle) for circle in circles(knows) if len(circle) > MOST] == []


def test_a_circle_is_found():
    assert list(leaves("a::{b, c::{d, self}}, e as f")) == ["a::b", "a::c::d", "a::c", "e"]
    modules = {"a::b", "a::c", "a::d"}
    assert imports("a::b", "use super::{c, d::X};\n// crate::a::e\nmod tests {}", modules) == {"a::c", "a::d"}
    assert circles({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == {frozenset({"a", "b"})}
