"""Labels: what a thread says it is doing, in every event of it; from the
package, NVTX, and PyTorch itself."""

import json
import re
from collections import Counter, defaultdict

import pytest

from support import HERE, LIBRARY, PYTHON, ROOT, files, history, load, memtrace, must, record

SCRIPT = HERE / "scripts" / "labels.py"
PACKAGE = {"PYTHONPATH": str(ROOT / "python")}


def run(how, tmp_path, code=0, env=None):
    path = tmp_path / "labels.pickle"
    done = record([PYTHON, SCRIPT, how, path], tmp_path / "out", env={**PACKAGE, **(env or {})})
    must(done, code)
    return load(path) if path.exists() else None


def allocated(snapshot):
    """Label → sizes that were asked for under it."""
    by_label = defaultdict(list)
    for entry in history(snapshot):
        if entry["action"] == "alloc":
            by_label[entry["user_metadata"]].append(entry["size"])
    return by_label


def test_pytorch_says_what_its_optimizers_do_without_a_change_to_the_program(tmp_path):
    snapshot = run("nothing", tmp_path)
    labels = allocated(snapshot)
    assert set(labels) == {"", "backward", "optimizer_step"}
    # Two moments for each parameter, which live on; beside them what a step needs for a moment.
    weights = [2 * 256 * 256 * 4] * 4 + [2 * 256 * 4, 256 * 4] * 2 + [256 * 8 * 4, 8 * 4]
    missing = Counter(2 * weights) - Counter(labels["optimizer_step"])
    assert not missing, missing


def test_ranges_of_record_function_are_seen_and_carried_over_to_backward(tmp_path):
    labels = allocated(run("record_function", tmp_path))
    assert {"mine", "mine/inner", "backward/mine", "backward/mine/inner"} <= set(labels)
    # The gradient of each weight is made where the forward call was: a matrix in each direction.
    weight = 2 * 256 * 256 * 4
    for label in ("backward/mine", "backward/mine/inner"):
        assert labels[label].count(weight) == 2, (label, labels[label])
    assert weight not in labels["backward"]


def test_nvtx_ranges_are_seen(tmp_path):
    snapshot = run("nvtx", tmp_path)
    labels = allocated(snapshot)
    assert {"from nvtx", "backward/from nvtx"} <= set(labels)
    assert [m["name"] for m in snapshot["memtrace"]["marks"]] == ["here"]


def test_a_profiler_that_wants_nvtx_for_itself_comes_first(tmp_path):
    labels = allocated(run("nvtx", tmp_path, env={"NVTX_INJECTION64_PATH": str(tmp_path / "no such library")}))
    assert "from nvtx" not in labels


def test_each_thread_has_labels_of_its_own(tmp_path):
    labels = allocated(run("threads", tmp_path))
    assert labels["thread 0"] == [4_000_000] and labels["thread 1"] == [4_000_001]
    assert labels[""][-1] == 4_000_002


@pytest.mark.parametrize("how", ["watched", "hooked", "checkpoint", "reentrant"])
def test_watch_knows_phase_and_module_of_everything(tmp_path, how):
    snapshot = run(how, tmp_path)
    labels = allocated(snapshot)
    modules = [f"layers.{i}{part}" for i in range(2) for part in ("", ".up", ".down")] + ["head"]
    assert {f"forward/{m}" for m in modules if m != "layers.0"} <= set(labels)
    for module in modules:
        if "." in module[len("layers.") :] or module == "head":
            weight = 256 * 8 * 4 if module == "head" else 2 * 256 * 256 * 4
            assert labels[f"backward/{module}"].count(weight) == 2, (module, labels[f"backward/{module}"])
    assert "forward/backward" not in "".join(labels) and "backward/forward" not in "".join(labels)
    # Without a label are the input, the loss (`square`, `mean`) and what
    # begins its backward pass; nothing large.
    assert len(labels[""]) <= 2 * 6 and max(labels[""]) == 64 * 256 * 4, labels[""]
    assert sum(labels["init"]) == 4 * (4 * 2 * 256 * 256 + 2 * (2 * 256 + 256) + 256 * 8 + 8)


def test_the_steps_and_phases_are_marked_with_what_was_allocated_then(tmp_path):
    snapshot = run("watched", tmp_path)
    marks = snapshot["memtrace"]["marks"]
    one_step = ["step step", "begin forward", "end forward", "begin optimizer_step", "end optimizer_step"]
    one_step += ["begin zero_grad", "end zero_grad"]
    assert [f"{m['sort']} {m['name']}" for m in marks] == 2 * one_step
    assert [m["number"] for m in marks if m["sort"] == "step"] == [0, 1]
    # What PyTorch would have said: the state after each mark, by replaying its history.
    times = [(e["time_us"], e) for e in history(snapshot) if e["action"] in ("alloc", "free_requested")]
    for mark in marks:
        assert len(mark["allocated"]) == 1
        live = {}
        for time, entry in times:
            if time > mark["time_us"]:
                break
            if entry["action"] == "alloc":
                live[entry["addr"]] = -(-entry["size"] // 512) * 512
            else:
                live.pop(entry["addr"], None)
        assert sum(live.values()) == mark["allocated"][0], mark
    stages = [(a["stage"], a["name"]) for a in snapshot["external_annotations"]]
    assert stages[:3] == [("START", "step 0"), ("START", "forward"), ("END", "forward")]
    assert ("END", "step 0") in stages and ("START", "step 1") in stages


def test_a_pass_that_an_optimizer_calls_is_no_part_of_its_step(tmp_path):
    labels = set(allocated(run("closure", tmp_path)))
    assert {f"around/{phase}/{module}" for phase in ("forward", "backward") for module in ("layers.1.up", "head")} <= labels
    assert "around/optimizer_step" in labels and not any("optimizer_step/" in label for label in labels), labels


def test_an_exception_ends_the_ranges_it_leaves(tmp_path):
    labels = allocated(run("caught", tmp_path))
    assert "around/forward/layers.1.up" in labels


def test_hooks_are_taken_away_again(tmp_path):
    assert set(allocated(run("removed", tmp_path))) == {"", "backward", "optimizer_step"}


def test_the_labels_of_a_killed_process_are_recovered(tmp_path):
    run("killed", tmp_path, code=-9)
    done = must(memtrace("recover", tmp_path / "out", "--out", tmp_path / "out"))
    snapshot = load(files(tmp_path / "out")[0])
    assert allocated(snapshot)["before the end"] == [5_000_000], done.stdout
    (mark,) = snapshot["memtrace"]["marks"]
    assert (mark["name"], mark["label"], mark["allocated"]) == ("the end", "before the end", [5_000_192])


def test_a_forked_child_goes_on_inside_its_parents_ranges(tmp_path):
    labels = allocated(run("forked", tmp_path))
    assert labels["parent's range/child's"] == [6_000_000]


def test_names_beyond_what_there_is_room_for_are_counted(tmp_path):
    snapshot = run("many", tmp_path)
    assert allocated(snapshot)["outer"] == [7_000_000]
    assert snapshot["memtrace"]["labels"]["refused"] > 10_000


def test_sub_totals_at_the_peak_add_up_to_it(tmp_path):
    snapshot = run("watched", tmp_path)
    (device,) = snapshot["memtrace"]["labels"]["devices"]
    assert sum(row["bytes"] for row in device["at_peak"]) == device["peak"]
    assert all(row["bytes"] > 0 and row["count"] > 0 for row in device["at_peak"])
    # By replay of the history: the largest sum of what was allocated, and who held it.
    live, most, at_peak = {}, 0, {}
    for entry in history(snapshot):
        if entry["action"] == "alloc":
            live[entry["addr"]] = (entry["user_metadata"], -(-entry["size"] // 512) * 512)
        elif entry["action"] == "free_requested":
            live.pop(entry["addr"], None)
        total = sum(size for _, size in live.values())
        if total > most:
            most, at_peak = total, dict(live)
    by_label = defaultdict(int)
    for label, size in at_peak.values():
        by_label[label] += size
    assert {row["label"]: row["bytes"] for row in device["at_peak"]} == dict(by_label) and device["peak"] == most
    report = must(memtrace("report", "--top", "100", tmp_path / "labels.pickle")).stdout
    assert f"{by_label['init']:,}" in report and "backward/layers.0.up" in report, report
    # Where they are too many to list, layers are one.
    layers = sum(size for label, size in by_label.items() if re.fullmatch(r"backward/layers\.\d+\.up", label))
    report = must(memtrace("report", tmp_path / "labels.pickle")).stdout
    assert any(f"{layers:,}" in line and "backward/layers.*.up" in line for line in report.splitlines()), report
    reported = json.loads(must(memtrace("report", "--json", tmp_path / "labels.pickle")).stdout)
    assert reported["devices"][0]["labels_at_peak"][0] == device["at_peak"][0]


def test_what_is_taken_past_pytorch_is_added_up_by_label_too(tmp_path):
    device = run("past_pytorch", tmp_path)["memtrace"]["labels"]["devices"][0]
    outside = device["outside"]

    def rows(which):
        return {row["label"]: (row["bytes"], row["count"]) for row in outside[which]}

    # In the second forward, when the first step's memory is still there.
    assert rows("at_peak") == {
        "forward/1": (40_000_000 + (2 << 20), 2),
        "load": (11_000_000, 2),
        "backward/1": (3_000_000, 1),
    }
    assert outside["peak"] == sum(size for size, _ in rows("at_peak").values())
    assert rows("now") == {
        "load": (6_000_000, 1),
        "backward/1": (6_000_000, 2),
        "forward/1": (4 << 20, 2),
        "": (1_000, 1),
    }
    assert device["peak"] < 1 << 20  # PyTorch's own

    report = must(memtrace("report", tmp_path / "labels.pickle")).stdout
    section = report.split("taken from the driver past PyTorch, at its peak, by label\n")[1].splitlines()
    assert section[0].split() == ["42,097,152", "2", "x", "forward/1"], report
    assert "  of that, at the end, by label" in section, report
    reported = json.loads(must(memtrace("report", "--json", tmp_path / "labels.pickle")).stdout)["devices"][0]
    assert (reported["outside_labels_at_peak"], reported["outside_labels"]) == (outside["at_peak"], outside["now"])


def test_the_library_takes_part_in_nvtx_by_its_documented_name():
    assert b"InitializeInjectionNvtx2" in LIBRARY.read_bytes()


def test_watching_leaves_modules_and_their_copies_alone(tmp_path):
    done = must(record([PYTHON, HERE / "scripts" / "watching.py"], tmp_path / "out", env=PACKAGE))
    assert done.stdout.startswith("left alone None")
