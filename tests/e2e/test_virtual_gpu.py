"""The virtual GPU: what it carries, that it behaves like the card it says
it is, and that it says so."""

import json
import os
import re
import shutil
import sysconfig

import corpus
import pytest
import support

GIB = 1 << 30

# Published facts: compute capability, multiprocessors, and the memory on the card. (The data sheet
# prints a little less for H200 and B200, whose stacks hold 144 and 192 GiB.)
CARDS = {
    "v100-16": ((7, 0), 80, 16 * GIB),
    "v100-32": ((7, 0), 80, 32 * GIB),
    "t4": ((7, 5), 40, 16 * GIB),
    "a10": ((8, 6), 72, 24 * GIB),
    "a100-40": ((8, 0), 108, 40 * GIB),
    "a100-80": ((8, 0), 108, 80 * GIB),
    "l4": ((8, 9), 58, 24 * GIB),
    "l40s": ((8, 9), 142, 48 * GIB),
    "rtx3090": ((8, 6), 82, 24 * GIB),
    "rtx4090": ((8, 9), 128, 24 * GIB),
    "rtx5090": ((12, 0), 170, 32 * GIB),
    "h100": ((9, 0), 132, 80 * GIB),
    "h200": ((9, 0), 132, 144 * GIB),
    "b200": ((10, 0), 148, 192 * GIB),
}


def python(code, *args, spec="h100", out=None, env=None, stacks="none", record="on", **options):
    """Runs Python code on a virtual GPU."""
    folder = ["--out", out] if out else []
    run = ["run", "--virtual", spec, *folder, "--stacks", stacks, "--record", record]
    return support.memtrace(*run, "--", support.PYTHON, "-c", code, *args, env=env, **options)


@pytest.mark.parametrize("program", [p for p in corpus.PROGRAMS if not p.compared], ids=lambda p: p.name)
def test_carries_what_pytorch_cannot_compare(program, tmp_path):
    done = support.must(support.record(program.command(support.PYTHON), tmp_path, spec=program.spec, env=program.env))
    assert any(line.startswith(program.closing) for line in done.stdout.splitlines()), done.stdout


def test_devices_lists_every_card():
    printed = support.must(support.memtrace("devices")).stdout
    for card in CARDS:
        assert card in printed.split(), f"{card} is not in:\n{printed}"


@pytest.mark.parametrize("card", CARDS)
def test_properties_are_those_of_the_card(card):
    done = python(
        "import json, torch\n"
        "p = torch.cuda.get_device_properties(0)\n"
        "free, total = torch.cuda.mem_get_info()\n"
        "print(json.dumps([p.major, p.minor, p.multi_processor_count, p.total_memory, free, total, p.name]))",
        spec=card,
        record="off",
    )
    major, minor, processors, memory, free, total, name = json.loads(support.must(done).stdout.splitlines()[-1])
    capability, expected_processors, sheet = CARDS[card]
    assert (major, minor) == capability and processors == expected_processors, name
    assert sheet * 0.9 < memory <= sheet, "usable memory is a little less than what is on the card"
    assert total == memory and 0.97 * total < free < total, "a context takes some hundred MiB"


def test_a_card_of_ones_own():
    done = python(
        "import torch; p = torch.cuda.get_device_properties(1)\n"
        "print(torch.cuda.device_count(), p.major, p.minor, p.multi_processor_count, p.total_memory >> 20)",
        spec="sm_86,12GiB,28SM*3",
        record="off",
    )
    assert support.must(done).stdout.split() == ["3", "8", "6", "28", str(12 * 1024)]


def test_capacity_is_enforced_and_costs_no_host_memory(tmp_path):
    done = python(
        "import json, resource, torch\n"
        "free, total = torch.cuda.mem_get_info()\n"
        "held = []\n"
        "try:\n"
        "    while True: held.append(torch.empty(1 << 30, dtype=torch.uint8, device='cuda').zero_())\n"
        "except torch.cuda.OutOfMemoryError: pass\n"
        "rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([len(held), free, torch.cuda.mem_get_info()[0], rss]))",
        out=tmp_path,
        spec="a100-80",
    )
    held, free, left, rss_kib = json.loads(support.must(done).stdout.splitlines()[-1])
    assert held == free // GIB and left == free - held * GIB
    assert rss_kib < 2 * 1024 * 1024, "75 GiB of device memory in a process of less than 2 GiB"


def test_a_big_model_trains_within_seconds_and_4_gib(tmp_path):
    script = support.HERE / "scripts" / "decoder_6b7.py"
    done = support.must(support.record([support.PYTHON, script], tmp_path, stacks="all", timeout=120))
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["parameters"] == said["expected_parameters"] == 6_658_404_352
    states = 2 * 4 * said["parameters"]  # bfloat16: parameters, gradients, two moments
    assert states < said["peak_bytes"] < 80 * GIB
    assert said["host_peak_kib"] < 4 * 1024 * 1024


def test_small_contents_come_back():
    done = python(
        "import torch\n"
        "host = torch.arange(1000)\n"
        "device = host.cuda()\n"
        "assert torch.equal(device.cpu(), host)\n"
        "assert torch.zeros(50, device='cuda').tolist() == [0] * 50\n"
        "assert (device * 2).sum().item() == 0, 'nothing is computed'\n"
        "print('fine')",
        record="off",
    )
    assert support.must(done).stdout == "fine\n"


def test_a_size_that_nothing_computed_is_a_warning():
    code = "import torch\nx = torch.ones(100, device='cuda')\nprint(x.nonzero().shape[0], x[x > 0].numel(), x.unique().numel())"
    done = support.must(python(code, record="off"))
    warnings = [line for line in done.stderr.splitlines() if "lower bound" in line]
    assert len(warnings) == 1, done.stderr
    quiet = support.must(python("import torch; x = torch.ones(100, device='cuda').sum()", record="off"))
    assert "lower bound" not in quiet.stderr, "nothing was read"


def test_eager_and_lazy_streams_give_the_range():
    """Blocks that wait for a side stream are reused at once or only after a
    wait: the real card is in between."""
    code = (
        "import torch\n"
        "side = torch.cuda.Stream()\n"
        "for _ in range(50):\n"
        "    x = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\n"
        "    with torch.cuda.stream(side): x.add_(1)\n"
        "    x.record_stream(side)\n"
        "    del x\n"
        "print(torch.cuda.max_memory_reserved() >> 20)"
    )
    eager, lazy = (int(support.must(python(code, spec=s, record="off")).stdout) for s in ("h100", "h100,lazy"))
    assert (eager, lazy) == (64, 3200)


def run_twice(name, tmp_path):
    """The entries of all devices without their times, the segments, and
    what was printed, of two runs."""
    program = next(p for p in corpus.PROGRAMS if p.name == name)
    for turn in ("first", "second"):
        path, _, done = support.record_alive(program.script, tmp_path / turn, *program.args, spec=program.spec)
        snapshot = support.load(path)
        entries = [(device, e) for device, trace in enumerate(snapshot["device_traces"]) for e in trace]
        for _, entry in entries:
            del entry["time_us"]
        yield entries, snapshot["segments"], done.stdout


@pytest.mark.parametrize("name", ["elementwise", "streams-lazy", "empty-cache", "oom-small-card", "random-eager"])
def test_the_same_run_twice_gives_the_same_addresses(name, tmp_path):
    first, second = run_twice(name, tmp_path)
    for one, other in zip(first[0], second[0]):
        assert one == other
    assert first == second


@pytest.mark.parametrize("name", ["transformer", "two-devices", "cuda-graphs"])
def test_the_same_training_twice_gives_the_same_bytes(name, tmp_path):
    """Autograd's threads race with the main one for the order of some frees, here as
    on a card, but not for the bytes."""

    def bytes_of(run):
        entries, segments, printed = run
        requests = sorted((device, e["action"], e["size"]) for device, e in entries if not e["action"].startswith("segment"))
        live = sorted(b["requested_size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")
        return requests, live, printed

    first, second = map(bytes_of, run_twice(name, tmp_path))
    assert first == second and len(first[0]) > 100


def test_two_ranks_take_the_same_twice(tmp_path):
    program = next(p for p in corpus.PROGRAMS if p.name == "fsdp2")
    printed = []
    for turn in ("first", "second"):
        done = support.record(program.command(support.PYTHON), tmp_path / turn, spec=program.spec)
        # The ranks share the pipe: a line of one may end within a line of the other.
        printed.append(sorted(re.findall(r"rank \d of 2 allocated \d+", support.must(done).stdout)))
    assert printed[0] == printed[1] and len(printed[0]) == 2


def test_nvidia_libraries_are_never_mapped():
    done = python(
        "import torch, torch.nn.functional as F\n"
        "x = torch.randn(8, 3, 32, 32, device='cuda')\n"
        "F.conv2d(x, torch.randn(4, 3, 3, 3, device='cuda'))\n"
        "torch.fft.fft(torch.randn(64, 64, device='cuda') @ torch.randn(64, 64, device='cuda'))\n"
        "torch.linalg.svd(torch.randn(64, 64, device='cuda'))\n"
        "for line in open('/proc/self/maps'):\n"
        "    if '/nvidia/' in line or 'libcuda' in line or 'libcu' in line.rsplit('/', 1)[-1]: print(line.split()[-1])",
        record="off",
    )
    mapped = set(support.must(done).stdout.split())
    foreign = {path for path in mapped if os.path.dirname(path) != str(support.build_dir()) and "/nvidia/" in path}
    assert not foreign, foreign


def test_nvidia_wheels_need_not_be_installed(tmp_path):
    """The same PyTorch from a folder of hard links that has no `nvidia` package beside it."""
    packages = sysconfig.get_paths()["purelib"]
    import torch

    packages = os.path.dirname(os.path.dirname(torch.__file__))
    bare = support.ROOT / ".venv-bare-test"  # hard links must stay within one file system
    shutil.rmtree(bare, ignore_errors=True)
    try:
        bare.mkdir()
        for item in os.scandir(packages):
            if item.name.startswith(("nvidia", "cuda")):
                continue
            if item.is_dir():
                shutil.copytree(item.path, bare / item.name, copy_function=os.link)
            else:
                os.link(item.path, bare / item.name)
        code = (
            "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [sys.argv[1]]\n"
            "import torch\n"
            "assert torch.__file__.startswith(sys.argv[1])\n"
            "x = torch.randn(8, 3, 32, 32, device='cuda', requires_grad=True)\n"
            "torch.nn.Conv2d(3, 8, 3).cuda()(x).mean().backward()\n"
            "print('ran on', torch.cuda.get_device_name())\n"
            "import time; time.sleep(0.5)"  # PyTorch aborts if its backward thread still works when Python ends
        )
        done = support.must(python(code, bare, record="off"))
        assert done.stdout.startswith("ran on")
    finally:
        shutil.rmtree(bare, ignore_errors=True)


def test_virtual_says_virtual(tmp_path):
    """A snapshot from a virtual GPU, its summary, and the card's own name
    never pass for a measurement."""
    path, _, _ = support.record_alive("mlp.py", tmp_path, spec="rtx4090")
    virtual = support.load(path)["memtrace"]["virtual"]
    assert "rtx4090" in json.dumps(virtual).lower()
    summary = support.must(support.memtrace("summary", path)).stdout
    assert "virtual" in summary.lower()
    summary = json.loads(support.must(support.memtrace("summary", path, "--json")).stdout)
    assert "rtx4090" in json.dumps(summary).lower()


WORKERS = """
import torch, torch.utils.data
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.full((4,), float(i))
def enter(_):
    torch.empty(1, device="cuda")
if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    alone = torch.cuda.mem_get_info()[0]
    how = dict(num_workers=3, worker_init_fn=enter, multiprocessing_context="forkserver", persistent_workers=True)
    loader = torch.utils.data.DataLoader(Numbers(), **how)
    for batch in loader: pass
    print((alone - torch.cuda.mem_get_info()[0]) >> 20)
"""


def test_contexts_of_workers_take_memory_of_the_card(tmp_path):
    """Issue F, B13: three workers of a loader that each touch the GPU. With the
    recorder, whose threads ask NVML."""
    (tmp_path / "workers.py").write_text(WORKERS)
    done = support.must(support.record([support.PYTHON, tmp_path / "workers.py"], tmp_path / "out", stacks="none"))
    context = next(d for d in json.loads(support.memtrace("devices", "--json").stdout) if d["key"] == "h100")["context_bytes"] >> 20
    assert int(done.stdout) in range(3 * context, 3 * (context + 8)), "three contexts, and a segment in each"
