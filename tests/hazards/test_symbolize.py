"""`memtrace symbolize`: source lines and inlined functions for what the
recorder left as library and offset."""

import shutil

import hazard
import pytest
import support

SOURCE = """
int cudaMalloc(void **out, unsigned long size);
#pragma weak cudaMalloc
static inline __attribute__((always_inline)) int inner(unsigned long size) {
    void *at;
    int code = cudaMalloc(&at, size);   // the line of inner
    return code + (at == 0);
}
int outer(unsigned long size) {
    return 2 * inner(size) + 1;         // the line of outer
}
__attribute__((constructor)) static void begin(void) { outer(4321); }
"""
LINE_OF = {name: SOURCE.splitlines().index(next(s for s in SOURCE.splitlines() if f"line of {name}" in s)) + 1 for name in ("inner", "outer")}


def compile_library(folder, *options, text=SOURCE):
    source, library = folder / "liblines.c", folder / "liblines.so"
    source.write_text(text)
    command = ["cc", "-shared", "-fPIC", "-O2", "-fno-optimize-sibling-calls", "-Wl,--build-id", *options, "-o", library, source]
    support.must(support.execute(command))
    return library


@pytest.fixture
def recorded(programs, gpu, tmp_path):
    """Runs a program that loads the library; returns the snapshot's path
    and the frames of its call."""

    def run(library):
        env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_STACKS": "all"}
        support.must(support.execute([programs / "odd", "constructor", library], env=env))
        return support.only_file(tmp_path / "out")

    return run


def frames(path):
    (entry,) = [e for e in support.load(path)["device_traces"][0] if e["action"] == "alloc" and e["size"] == 4321]
    return [(f["name"], f["filename"].rsplit("/", 1)[-1], f["line"]) for f in entry["frames"]]


def test_lines_and_inlined_functions(recorded, tmp_path):
    path = recorded(compile_library(tmp_path, "-g"))
    raw = frames(path)
    assert raw[0][:2] == ("outer", "liblines.so")
    done = support.must(support.memtrace("symbolize", path, "--out", tmp_path / "new.pickle"))
    assert "native frames have source lines now" in done.stdout
    new = frames(tmp_path / "new.pickle")
    assert new[:2] == [("inner", "liblines.c", LINE_OF["inner"]), ("outer", "liblines.c", LINE_OF["outer"])]
    support.must(support.memtrace("check", tmp_path / "new.pickle"))
    assert frames(path) == raw, "the file itself is as it was"
    shown = support.must(support.memtrace("summary", tmp_path / "new.pickle")).stdout
    assert " inner\n" in shown and "liblines.c:" not in shown, "no line of a script's"
    # In place, and a second time: nothing more to do.
    support.must(support.memtrace("symbolize", path))
    assert frames(path) == new
    support.must(support.memtrace("symbolize", path))
    assert frames(path) == new


def test_what_cannot_be_read_stays(recorded, tmp_path):
    """No debug information: silence. Another file under the same name, or none: a line."""
    library = compile_library(tmp_path)
    path = recorded(library)
    raw = frames(path)
    for change, words in (
        (lambda: None, ""),
        (lambda: compile_library(tmp_path, "-g", text=SOURCE.replace("4321", "1234")), "build id"),
        (library.unlink, "is not here"),
    ):
        change()
        done = support.must(support.memtrace("symbolize", path))
        about_it = [line for line in done.stderr.splitlines() if "liblines.so" in line]
        assert (len(about_it) == 1 and words in about_it[0]) if words else not about_it, done.stderr
        assert [f for f in frames(path) if f[1] == "liblines.so"] == [f for f in raw if f[1] == "liblines.so"]


def test_a_zipped_file_needs_a_name(tmp_path):
    zipped = tmp_path / "a.pickle.gz"
    shutil.copy(next((support.ROOT / "tests" / "data").rglob("*.gz")), zipped)
    before = zipped.read_bytes()
    done = support.must(support.memtrace("symbolize", zipped), code=2)
    assert "--out FILE" in done.stderr and zipped.read_bytes() == before
    support.must(support.memtrace("symbolize", zipped, "--out", tmp_path / "new.pickle"))


def test_real_pytorch(tmp_path):
    """Libraries without debug information, hundreds of megabytes: quick, and nothing is lost."""
    pytest.importorskip("torch")
    script = support.HERE / "scripts" / "mlp.py"
    support.must(support.record([support.PYTHON, script], tmp_path, stacks="all"))
    path = support.only_file(tmp_path)
    before = support.load(path)
    support.must(support.memtrace("symbolize", path))
    after = support.load(path)
    assert len(before["device_traces"][0]) == len(after["device_traces"][0]) and before["segments"] != []
    names = [f["name"] for e in after["device_traces"][0] for f in e["frames"]]
    assert any("at::" in n for n in names)
    hazard.about(path)
