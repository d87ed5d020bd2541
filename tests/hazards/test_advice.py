"""What memtrace advises can be followed, on the release that the program runs, and changes nothing
else; nothing is unexplained that memtrace itself has overlooked."""

import json
import sys

import pytest
import support
import torch

GIB = 1 << 30
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def run(tmp_path):
    """Runs a program on a virtual GPU, recorded; gives the files that it left."""

    def run(program, spec="h100", **env):
        (tmp_path / "train.py").write_text(program)
        support.must(support.record([sys.executable, "-W", "ignore", tmp_path / "train.py"], tmp_path / "out", spec=spec, env=env))
        return support.files(tmp_path / "out")

    return run


def answer_of(verb, path):
    return json.loads(support.must(support.memtrace(verb, "--json", path)).stdout)


# A card that is full of pieces of PyTorch's expandable segments, and a request that it can't grant.
GROWS = """
import torch
G = 1 << 30
{before}
blocks = [torch.empty(2 * G, dtype=torch.uint8, device="cuda") for _ in range(20)]
for i in range(0, 20, 2):
    blocks[i] = None
try:
    blocks.append(torch.empty(60 * G, dtype=torch.uint8, device="cuda"))
    print("it fits?")
except torch.OutOfMemoryError:
    {after}
"""


@pytest.mark.parametrize("before", ["", "c = torch.ones(1, device='cuda'); torch.cuda.mem_get_info()"])
@pytest.mark.parametrize("after", ["pass", "torch.cuda.mem_get_info()", "torch.cuda.empty_cache(); torch.cuda.mem_get_info()"])
def test_what_pytorch_asks_while_its_segment_grows_is_no_measurement(run, before, after):
    """It takes physical memory, fails, asks how much is free, and gives it
    back: −41 GB were "unexplained"."""
    files = run(GROWS.format(before=before, after=after), PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert len(files) == 2
    for path in files:
        [device] = support.load(path)["memtrace"]["reconcile"]
        lines = {line["name"]: line["bytes"] for line in device["lines"]}
        assert device["unexplained"] == 0, lines
        assert lines["PyTorch"] <= device["used"] and all(n < GIB for name, n in lines.items() if "contexts" in name), lines


FAILS_TWICE = """
import torch
{before}
x = torch.empty({held} << 30, dtype=torch.uint8, device="cuda")
for size in {sizes}:
    try:
        torch.empty(size << 20, dtype=torch.uint8, device="cuda")
        print("it fits?")
    except torch.OutOfMemoryError:
        pass
"""
LIMIT = "torch.cuda.set_per_process_memory_fraction(0.25)"


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize(("before", "held", "limited"), [(LIMIT, 15, True), ("", 75, False)])
def test_who_refused_is_known_of_every_failure(run, before, held, limited, conf):
    """Not only of the last."""
    files = run(FAILS_TWICE.format(before=before, held=held, sizes=[9000, 10000, 20000]), PYTORCH_CUDA_ALLOC_CONF=conf)
    [device] = answer_of("summary", files[-1])["devices"]
    assert [oom["limited"] for oom in device["ooms"]] == [limited] * 3
    assert len(support.load(files[-1])["memtrace"]["refused_by_driver"]) == (0 if limited else 3)


@pytest.mark.skipif(RELEASE < (2, 11), reason="this release has no such setting")
def test_a_large_segment_is_what_did_not_fit(run):
    """5 MiB come in a segment of 4 GiB, for which the card had no room: no
    limit of PyTorch's refused."""
    conf = "large_segment_size_mb:4096"
    files = run(FAILS_TWICE.format(before="", held=76, sizes=[5, 6]), PYTORCH_CUDA_ALLOC_CONF=conf)
    for path in files:
        [device] = answer_of("summary", path)["devices"]
        assert device["ooms"] and not any(oom["limited"] for oom in device["ooms"]), device["ooms"]


SCATTERED = """
import torch
keep, MIB = [], 1 << 20
for _ in range(60):
    a = torch.empty(91 * MIB, dtype=torch.uint8, device="cuda")
    b = torch.empty(45 * MIB, dtype=torch.uint8, device="cuda")
    keep.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
    del a, b
"""


def exported(text):
    """The settings that a shell has after the lines that `tune` printed."""
    lines = [line for line in text.splitlines() if line.startswith(("export ", "unset "))]
    script = "\n".join(["export PYTORCH_ALLOC_CONF=old PYTORCH_HIP_ALLOC_CONF=old", *lines, 'echo "${PYTORCH_CUDA_ALLOC_CONF-none}"'])
    return lines, support.must(support.execute(["bash", "-c", script], env={"PATH": "/usr/bin:/bin"})).stdout.strip()


def test_tune_keeps_what_else_is_set(run):
    own = "pinned_num_register_threads:2,roundup_power2_divisions:[256:1,512:2,>:4],expandable_segments:True,max_split_size_mb:90"
    if RELEASE >= (2, 11):
        own += ",per_process_memory_fraction:0.9"
    path = run(SCATTERED, PYTORCH_CUDA_ALLOC_CONF=own)[-1]
    answer = answer_of("tune", path)
    kept = ["pinned_num_register_threads:2", *(["per_process_memory_fraction:0.9"] if RELEASE >= (2, 11) else [])]
    for row in answer["tried"]:
        assert all(setting in row["conf"] for setting in kept), row["conf"]
        assert RELEASE >= (2, 11) or "large_segment" not in row["conf"]
    lines, line = exported(support.must(support.memtrace("tune", path)).stdout)
    assert lines and line == answer["best"] != own
    # PyTorch takes it, whole, by this name.
    program = "import torch; torch.empty(1, device='cuda'); print(torch.cuda.memory._snapshot()['allocator_settings']['PYTORCH_CUDA_ALLOC_CONF'])"
    done = support.must(support.memtrace("run", "--virtual", "h100", "--record", "off", "--", sys.executable, "-W", "ignore", "-c", program, env={"PYTORCH_CUDA_ALLOC_CONF": line, "PYTORCH_ALLOC_CONF": "nonsense:1"}))
    assert done.stdout.strip() == line


def test_tune_has_nothing_to_say_of_another_allocator(run):
    """The driver's own pool, which can't be replayed: there is nothing to compare with."""
    path = run(SCATTERED + "torch.cuda.synchronize()\n", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")[-1]
    done = support.memtrace("tune", path)
    assert done.returncode == 2 and not done.stdout, done
    assert "can't be replayed" in done.stderr or "nothing to replay" in done.stderr, done.stderr


def test_the_release_is_in_a_snapshot(run):
    about = support.load(run("import torch; torch.ones(9, device='cuda')")[-1])["memtrace"]
    assert about["pytorch"] == torch.__version__
