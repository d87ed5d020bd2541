"""`memtrace check`: PyTorch's own files and ours pass; a damaged file is refused,
and the reason names the damage."""

import copy
import json
import pickle

import pytest
import support

FRAME = {"name": "main", "filename": "train.py", "line": 7}
BLOCK = {"address": 4096, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": [FRAME]}
REST = {"address": 4608, "size": 1536, "requested_size": 0, "state": "inactive", "frames": []}
SEGMENT = {
    "device": 0,
    "address": 4096,
    "total_size": 2048,
    "allocated_size": 512,
    "active_size": 512,
    "requested_size": 100,
    "stream": 0,
    "segment_type": "small",
    "segment_pool_id": (0, 0),
    "is_expandable": False,
    "frames": [],
    "blocks": [BLOCK, REST],
}


def entry(action, addr, size):
    notes = {"time_us": 1_700_000_000_000_000, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    return {"action": action, "addr": addr, "size": size, "stream": 0, **notes, "frames": [FRAME]}


GOOD = {
    "segments": [SEGMENT],
    "device_traces": [
        [
            entry("segment_alloc", 4096, 2048),
            entry("alloc", 4096, 300),
            entry("free_requested", 4096, 300),
            entry("free_completed", 4096, 300),
            entry("alloc", 4096, 100),
        ]
    ],
    "allocator_settings": {},
    "external_annotations": [],
    "host_segments": [],
    "host_traces": [],
}


def write(path, snapshot):
    path.write_bytes(pickle.dumps(snapshot, protocol=4))
    return path


def refused(path):
    """`check` must say no, in words, and not fail to work. What it said."""
    done = support.must(support.memtrace("check", path), code=1)
    said = (done.stdout + done.stderr).strip()
    assert said and "panicked" not in said
    return said


def test_a_small_file_written_by_hand_passes(tmp_path):
    support.must(support.memtrace("check", write(tmp_path / "good.pickle", GOOD)))
    (tmp_path / "good.json").write_text(json.dumps(GOOD))
    support.must(support.memtrace("check", tmp_path / "good.json"))


def test_the_files_of_pytorch_itself_pass(tmp_path):
    """Golden files by the machine at hand: PyTorch writes them, on the
    virtual GPU, without our recorder."""
    program = (
        "import sys, torch\n"
        "torch.cuda.memory._record_memory_history(max_entries=int(sys.argv[2]))\n"
        "side = torch.cuda.Stream()\n"
        "kept = []\n"
        "for i in range(200):\n"
        "    x = torch.empty(1000 * i + 1, device='cuda')\n"
        "    x.record_stream(side)\n"
        "    kept.append(x)\n"
        "    if i % 7 == 0: del kept[::3]\n"
        "torch.cuda.memory._dump_snapshot(sys.argv[1])\n"
    )
    for entries in (100_000, 50):  # the second ring has lost its beginning, as long runs do
        file = tmp_path / f"{entries}.pickle"
        command = [support.PYTHON, "-c", program, file, entries]
        done = support.memtrace("run", "--virtual", "h100,lazy", "--record", "off", "--", *command, cwd=tmp_path)
        support.must(done)
        support.must(support.memtrace("check", file))
    assert not support.files(tmp_path), "--record off records nothing"


def segment(s):
    return s["segments"][0]


def trace(s):
    return s["device_traces"][0]


# A change to the good snapshot, and a word that the reason must contain.
DAMAGES = {
    "no segments": (lambda s: s.pop("segments"), "segments"),
    "no device_traces": (lambda s: s.pop("device_traces"), "device_traces"),
    "blocks do not fill their segment": (lambda s: segment(s)["blocks"].pop(), "total_size"),
    "a segment's sum is wrong": (lambda s: segment(s).update(allocated_size=1024), "allocated_size"),
    "an unknown state": (lambda s: segment(s)["blocks"][0].update(state="lost"), "state"),
    "a size that is text": (lambda s: trace(s)[1].update(size="300"), "size"),
    "an entry without address": (lambda s: trace(s)[1].pop("addr"), "addr"),
    "an integer of nine bytes": (lambda s: trace(s)[1].update(size=1 << 63), "2^63"),
    "a frame whose name is a number": (lambda s: first_frame(s).update(name=3), "name"),
    "a live block outside every segment": (lambda s: trace(s)[4].update(addr=1 << 40), "segment"),
    "a segment of no device": (lambda s: segment(s).update(device=5), "device"),
    "segments that overlap": (lambda s: s["segments"].append(copy.deepcopy(segment(s))), "inside segments[0]"),
}


def first_frame(snapshot):
    return trace(snapshot)[0]["frames"][0]


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name, tmp_path):
    damage, word = DAMAGES[name]
    damaged = copy.deepcopy(GOOD)
    damage(damaged)
    assert word in refused(write(tmp_path / "damaged.pickle", damaged))


def test_every_cut_of_a_file_is_refused(tmp_path, snapshot_file):
    data = snapshot_file.read_bytes()
    for cut in (0, 1, 2, 100, len(data) // 2, len(data) - 1):
        path = tmp_path / f"cut-{cut}.pickle"
        path.write_bytes(data[:cut])
        refused(path)


class Trap:
    """A pickle that would run a program in a careless reader."""

    def __reduce__(self):
        return print, ("the pickle was executed",)


def test_hostile_and_foreign_files_are_refused(tmp_path):
    foreign = {
        "trap": pickle.dumps({**GOOD, "more": Trap()}, protocol=4),
        "text": b"this is not a snapshot\n",
        "zeros": bytes(4096),
        "json": b'{"segments": [], "device_traces": [',
        "a list": pickle.dumps([1, 2, 3], protocol=4),
        "newer protocol": pickle.dumps({**GOOD, "more": bytearray(b"x" * 300)}, protocol=5),
        "a bomb": b"\x80\x04" + b"(" * 2_000_000 + b".",
        "a huge claim": b"\x80\x04X\xff\xff\xff\x7fabc.",
    }
    for name, data in foreign.items():
        path = tmp_path / f"{name}.pickle"
        path.write_bytes(data)
        assert "executed" not in refused(path)


@pytest.mark.parametrize("name", ["nothing-here.pickle", ""])
def test_a_file_that_cannot_be_read_is_an_error(name, tmp_path):
    path = tmp_path / name  # the second is the folder itself
    done = support.must(support.memtrace("check", path), code=2)
    assert str(path) in done.stderr and len(done.stderr.strip().splitlines()) == 1
