"""The oracle itself: it must see each kind of difference, or its approval is worth nothing."""

import copy

import oracle
import pytest

FRAMES = [{"name": "f", "filename": "a.py", "line": 3}]
ENTRY = {"time_us": 5, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0), "frames": FRAMES}
SNAPSHOT = {
    "segments": [
        {
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
            "blocks": [
                {"address": 4096, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": FRAMES},
                {"address": 4608, "size": 1536, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 4096, "size": 2048, "stream": 0, **ENTRY},
            {"action": "alloc", "addr": 4096, "size": 100, "stream": 0, **ENTRY},
            {"action": "oom", "device_free": 10, "size": 512, "stream": 0, **ENTRY},
        ]
    ],
    "allocator_settings": {},
    "external_annotations": [],
}


def ours():
    """What memtrace would write for the same history."""
    return {**copy.deepcopy(SNAPSHOT), "memtrace": {}}


def test_equal_snapshots_are_equal():
    result = oracle.compare(SNAPSHOT, ours())
    assert result.differences == {}
    assert result.counts == {"entries": 3, "frames": 3, "native": 0, "segments": 1, "blocks": 2, "driver": 0}


def trace(snapshot):
    return snapshot["device_traces"][0]


CHANGES = {
    "trace: size": ("trace", lambda s: trace(s)[1].update(size=101)),
    "trace: address": ("trace", lambda s: trace(s)[1].update(addr=4608)),
    "trace: stream": ("trace", lambda s: trace(s)[1].update(stream=7)),
    "trace: action": ("trace", lambda s: trace(s)[1].update(action="free_requested")),
    "trace: oom": ("trace", lambda s: trace(s)[2].update(device_free=11)),
    "trace: pool": ("trace", lambda s: trace(s)[1].update(pool_id=(0, 1))),
    "trace: order": ("trace", lambda s: trace(s).reverse()),
    "trace: one missing": ("trace", lambda s: trace(s).pop()),
    "trace: one too many": ("trace", lambda s: trace(s).append(trace(s)[1])),
    "trace: a device too many": ("trace", lambda s: s["device_traces"].append(trace(s))),
    "frames: line": ("frames", lambda s: trace(s)[0].update(frames=[{**FRAMES[0], "line": 4}])),
    "frames: none": ("frames", lambda s: trace(s)[0].pop("frames")),
    "segment: sum": ("segments", lambda s: s["segments"][0].update(active_size=0)),
    "segment: kind": ("segments", lambda s: s["segments"][0].update(segment_type="large")),
    "segment: pool": ("segments", lambda s: s["segments"][0].update(segment_pool_id=(1, 0))),
    "segment: missing": ("segments", lambda s: s["segments"].clear()),
    "block: state": ("blocks", lambda s: s["segments"][0]["blocks"][0].update(state="active_pending_free")),
    "block: one missing": ("blocks", lambda s: s["segments"][0]["blocks"].pop()),
    "shape: key": ("shape", lambda s: s.pop("external_annotations")),
    "shape: entry": ("shape", lambda s: trace(s)[0].pop("pool_id")),
    "shape: type": ("shape", lambda s: s["segments"][0].update(segment_pool_id=[0, 0])),
    "shape: own key": ("shape", lambda s: s.pop("memtrace")),
    "time": ("time", lambda s: [e.update(time_us=10**9) for e in trace(s)]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_difference_is_seen(name):
    kind, change = CHANGES[name]
    changed = ours()
    change(changed)
    assert kind in oracle.compare(SNAPSHOT, changed).differences


def test_the_driver_layer_is_counted_apart():
    more = ours()
    note = {**ENTRY, "user_metadata": "driver: cudaMalloc"}
    trace(more).insert(1, {"action": "segment_alloc", "addr": 1 << 30, "size": 64, "stream": 0, **note})
    more["segments"].append({**more["segments"][0], "address": 1 << 30})
    result = oracle.compare(SNAPSHOT, more)
    assert result.differences == {} and result.counts["driver"] == 1


def test_native_frames_are_another_question():
    mixed, theirs = ours(), copy.deepcopy(SNAPSHOT)
    native = {"name": "at::empty", "filename": "/x/libtorch_cpu.so", "line": 77}
    trace(mixed)[0]["frames"] = [native, *FRAMES]
    assert "frames" in oracle.compare(SNAPSHOT, mixed).differences
    assert set(oracle.compare(SNAPSHOT, mixed, native=True).differences) == {"native frames"}
    trace(theirs)[0]["frames"] = [native, *FRAMES]
    assert oracle.compare(theirs, mixed, native=True).differences == {}
