"""PyTorch's own reader accepts the files: `python -m torch.cuda._memory_viz`."""

import base64
import io
import pickle
import pickletools
import re

import pytest
import support

# What the viewer's unpickler knows (its page reads protocols 2 to 4,
# written by hand in JavaScript).
VIEWER_OPCODES = set(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT1 BININT2 BININT LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "EMPTY_LIST APPEND APPENDS LIST EMPTY_DICT SETITEM SETITEMS DICT EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE MEMOIZE "
    "BINPUT LONG_BINPUT BINGET LONG_BINGET".split()
)


def viz(*args):
    return support.execute([support.PYTHON, "-m", "torch.cuda._memory_viz", *args])


def test_stats(snapshot_file):
    printed = support.must(viz("stats", snapshot_file)).stdout
    segments = support.load(snapshot_file)["segments"]
    allocated = sum(b["requested_size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")
    assert f"segments: {len(segments)}\n" in printed
    assert f"total_reserved: {sum(s['total_size'] for s in segments) / 2**20:.1f}MiB\n" in printed
    assert f"total_allocated: {allocated / 2**20:.1f}MiB\n" in printed


def test_trace(snapshot_file):
    printed = support.must(viz("trace", snapshot_file)).stdout
    entries = support.load(snapshot_file)["device_traces"][0]
    assert f"{len(entries)} entries" in printed
    counts = {a: sum(e["action"] == a for e in entries) for a in ("alloc", "segment_alloc", "free_requested")}
    assert counts["alloc"] > 500
    assert len(re.findall(r"^\w+ = (?:seg_\d+|\w+)\[\d+:", printed, re.M)) == counts["alloc"]
    assert printed.count(" = cudaMalloc(") == counts["segment_alloc"]
    assert len(re.findall(r"^del ", printed, re.M)) == counts["free_requested"]


@pytest.mark.parametrize("options", [[], ["-s"], ["-f"]])
def test_trace_plot_embeds_the_history(snapshot_file, tmp_path, options):
    page = tmp_path / "page.html"
    if not set(options) <= set(re.findall(r"-\w", support.must(viz("trace_plot", "--help")).stdout)):
        pytest.skip(f"this PyTorch's trace_plot has no {options}")
    support.must(viz("trace_plot", snapshot_file, "-o", page, *options))
    snapshot = support.load(snapshot_file)
    embedded = max(re.findall(r"[A-Za-z0-9+/=]{100,}", page.read_text()), key=len)
    shown = pickle.loads(base64.b64decode(embedded))
    assert shown["segments"] == snapshot["segments"]
    if "-f" not in options:
        assert shown["device_traces"] == snapshot["device_traces"]


def test_segments_and_memory(snapshot_file):
    """These two pipe into flamegraph.pl, which they download; everything
    before that is run here."""
    from torch.cuda import _memory_viz

    snapshot = support.load(snapshot_file)
    total = sum(s["total_size"] for s in snapshot["segments"])
    for command in (_memory_viz.segments, _memory_viz.memory):
        folded = command(snapshot, format_flamegraph=lambda text: text).splitlines()
        assert sum(int(line.rsplit(" ", 1)[1]) for line in folded) == total
        assert any("transformer.py" in line for line in folded), "blocks are shown by their Python lines"


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_viewer_can_read_it(form, tmp_path):
    """No integer above 2^53 (a JavaScript number), no unknown opcode, no
    batch that overflows its stack."""
    path, _, _ = support.record_alive("streams.py", tmp_path, run=["--format", form])
    numbers, left = [], [support.load(path)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
        elif isinstance(value, int):
            numbers.append(value)
    assert numbers and max(numbers) < 1 << 53
    if form == "pickle":
        data = path.read_bytes()
        opcodes = [(op.name, arg) for op, arg, _ in pickletools.genops(data)]
        assert opcodes[0] == ("PROTO", 4)
        assert {name for name, _ in opcodes} <= VIEWER_OPCODES
        assert 1 < largest_batch(data) <= 1000


def largest_batch(data):
    """The most items that one APPENDS adds."""
    seen = [0]

    class Counting(pickle._Unpickler):
        dispatch = dict(pickle._Unpickler.dispatch)

        def load_appends(self):
            seen[0] = max(seen[0], len(self.stack))
            super().load_appends()

        dispatch[pickle.APPENDS[0]] = load_appends

    Counting(io.BytesIO(data)).load()
    return seen[0]


def test_json_and_pickle_say_the_same(tmp_path):
    """The same deterministic program, written both ways."""
    both = {}
    for form in ("pickle", "json"):
        options = ["--format", form] + ["--expand"] * (form == "json")
        path, _, _ = support.record_alive("mlp.py", tmp_path / form, run=options)
        snapshot = support.load(path)
        rows = [(e["action"], e["addr"], e["size"], e["frames"]) for e in support.history(snapshot)]
        segments = [(s["address"], s["total_size"], s["blocks"]) for s in snapshot["segments"]]
        both[form] = rows, segments
    assert both["pickle"] == both["json"] and len(both["pickle"][0]) > 100
