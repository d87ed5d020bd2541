"""Comments: lines of at most 100 columns, in the field's words, not in our own of once."""

import re
import subprocess

import support

COLUMNS = 100
# Each with the field's word.
DENIED = {"door": "hook", "doors": "hooks", "books": "ledger", "told": "reported", "farewell": "last snapshot"}
# Tests know line numbers of these programs.
EXEMPT = re.compile(r"tests/e2e/scripts/|/programs/")
COMMENT = {"rs": re.compile(r"\s*//[/!]?(.*)|[^\"]*\s//\s(.*)"), "py": re.compile(r"\s*#(?!!)(.*)")}


def comments(text, language):
    """Number, line and words of each comment; tables and listings may be as wide as they are."""
    listing = False
    for number, line in enumerate(text.splitlines(), 1):
        if found := COMMENT[language].fullmatch(line):
            words = next(group for group in found.groups() if group is not None).strip()
            listing ^= words.startswith("```")
            if not listing and not words.startswith("|"):
                yield number, line, words


def test_comments_are_short_lines_in_plain_words():
    tracked = subprocess.run(["git", "ls-files"], cwd=support.ROOT, check=True, capture_output=True, text=True)
    wrong = []
    for name in tracked.stdout.splitlines():
        language = name.rpartition(".")[2]
        if language not in COMMENT or EXEMPT.search(name):
            continue
        for number, line, words in comments((support.ROOT / name).read_text(), language):
            if len(line) > COLUMNS:
                wrong.append(f"{name}:{number}: {len(line)} columns")
            for word in re.findall(r"\w+", words):
                if word in DENIED:
                    wrong.append(f"{name}:{number}: {DENIED[word]}, not {word}")
    assert wrong == []


def test_comments_are_found():
    rust = '//! a\n    /// b\nlet a = 1; // c\n// ```\n// d\n// ```\n// | e |\nlet a = "http://f";\n#[h]\n'
    assert [words for _, _, words in comments(rust, "rs")] == ["a", "b", "c", "```"]
    assert [words for _, _, words in comments("#!a\n# b\nc = 7 // 2\n", "py")] == ["b"]
