"""The list of users' cases: each number that a test names is in it, and
each in it is named by a test."""

import re

import support

CASE = re.compile(r"\bT[0-9]{2}\b")


def test_each_case_is_in_the_list_and_has_a_test():
    listed = re.findall(r"^\| (T[0-9]{2}) \|", (support.ROOT / "tests/CASES.md").read_text(), re.M)
    folders = [support.ROOT / folder for folder in ("tests", "crates", "src", "bench")]
    files = [path for folder in folders for end in ("py", "rs", "c") for path in folder.rglob(f"*.{end}")]
    named = {case for path in files if "node_modules" not in path.parts for case in CASE.findall(path.read_text())}
    assert listed == sorted(set(listed)) and len(listed) > 30
    assert named - set(listed) == set(), "not in tests/CASES.md"
    assert set(listed) - named == set(), "no test names it"
