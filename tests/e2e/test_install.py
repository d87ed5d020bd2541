"""memtrace as PyTorch's allocator: the same program with either gets the same
addresses, history, statistics and errors."""

import json
import os
import shutil

import corpus
import pytest
import support
import torch

# The algorithm is that of 2.15, and so are the statistics and keys that are compared.
as_2_15 = pytest.mark.skipif(not torch.__version__.startswith("2.15."), reason="other releases have other rules in details")

RUNNER = support.HERE / "installed.py"
PACKAGE = support.ROOT / "python"
# Programs whose history is another one each time, also with PyTorch alone. Threads race for memory.
# Autocast gives its copies back in the order of a hash of pointers. The compiler finds or does not
# find what it has kept. Or there are several ranks.
CHANCE = {"backward-threads", "python-threads", "python-threads-lazy", "dataloader", "sites", "amp", "compiled", "ddp", "fsdp2"}


def environment(extra=None):
    paths = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": paths, "MEMTRACE_LIBRARY": str(support.LIBRARY), **(extra or {})}


def run(program, way, folder, preloaded=False, threads=False):
    """Everything that PyTorch says of memory after the program, by process."""
    # What is compiled for the one must not be found by the other; its name
    # is in the stacks of both.
    shutil.rmtree(folder / "inductor", ignore_errors=True)
    env = environment({**program.env, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "MEMTRACE_OUT": str(folder / "out")})
    if threads:
        env["MEMTRACE_TEST_THREADS"] = "1"
    command = program.command(support.PYTHON, RUNNER, way, folder)
    options = ["--virtual", program.spec, "--out", folder / "out"]
    if not preloaded:
        options += ["--record", "off"]
    done = support.must(support.memtrace("run", *options, "--", *command, env=env))
    assert any(line.startswith(program.closing) for line in done.stdout.splitlines()), done.stdout
    found = {p.name: json.loads(p.read_text()) for p in sorted(folder.glob(f"{way}-*.json"))}
    assert len(found) == program.ranks, done.stderr
    return list(found.values())


def first_difference(ours, theirs):
    for n, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return f"entry {n} of {len(ours)} and {len(theirs)}:\n memtrace {a}\n PyTorch  {b}"
    return f"{len(ours)} and {len(theirs)} entries" if len(ours) != len(theirs) else None


def compare(ours, theirs):
    assert theirs["backend"] == "native" and ours["backend"] == "pluggable"
    for a, b in zip(ours["trace"], theirs["trace"]):
        assert first_difference(a, b) is None, first_difference(a, b)
    assert len(ours["trace"]) == len(theirs["trace"])
    assert ours["stats"] == theirs["stats"]
    assert ours["summary"] == theirs["summary"]
    assert ours["segments"] == theirs["segments"]
    assert ours["peaks"] == theirs["peaks"]
    assert ours["settings"] == theirs["settings"]
    assert ours["keys"] == theirs["keys"]
    assert ours["messages"] == theirs["messages"]
    assert ours["observed"] == theirs["observed"]


PROGRAMS = [p for p in corpus.compared() if p.name not in CHANCE]


@as_2_15
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_same_as_pytorch(program, tmp_path):
    [theirs], [ours] = run(program, "native", tmp_path), run(program, "installed", tmp_path)
    compare(ours, theirs)
    assert sum(map(len, theirs["trace"])) > 20
    if program.script == "oom.py":
        assert len(theirs["messages"]) >= 3 and len(theirs["observed"]) >= 3


@as_2_15
@pytest.mark.parametrize("program", [p for p in corpus.compared() if p.name in CHANCE], ids=lambda p: p.name)
def test_runs_where_chance_decides(program, tmp_path):
    for ours in run(program, "installed", tmp_path, threads=True):
        assert any(stats["allocated_bytes.all.peak"] > 0 for stats in ours["stats"])
        for device, stats in enumerate(ours["stats"]):
            allocated = sum(s["allocated_size"] for s in ours["segments"] if s["device"] == device)
            assert allocated == stats["allocated_bytes.all.current"]
            assert sum(map(len, ours["trace"])) > 20


@as_2_15
def test_same_when_preloaded(tmp_path):
    program = next(p for p in corpus.PROGRAMS if p.name == "transformer")
    [theirs], [ours] = run(program, "native", tmp_path), run(program, "installed", tmp_path, preloaded=True)
    compare(ours, theirs)
    # What memtrace itself writes has the same history, and nothing of
    # PyTorch's is taken for somebody else's.
    snapshot = support.load(support.only_file(tmp_path / "out"))
    assert len(support.history(snapshot)) >= len(ours["trace"][0])
    assert snapshot["memtrace"]["counters"].get("anomalies", 0) == 0


@as_2_15
def test_every_answer_is_pytorchs(tmp_path):
    """Statistics, limits, observers, history as it is asked for in turn,
    settings, pools, a forked child."""
    lines = {}
    for way in ("native", "installed"):
        command = [support.PYTHON, support.HERE / "scripts" / "answers.py", way, tmp_path]
        options = ["--virtual", "h100", "--record", "off"]
        env = environment({"MEMTRACE_OUT": str(tmp_path / "out")})
        lines[way] = support.must(support.memtrace("run", *options, "--", *command, env=env)).stdout.splitlines()
    assert len(lines["native"]) > 50
    for ours, theirs in zip(lines["installed"], lines["native"], strict=True):
        assert ours == theirs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["installed", "alone"])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_abuse_is_answered(way, seed, conf, tmp_path):
    env = environment({"PYTORCH_CUDA_ALLOC_CONF": conf, "MEMTRACE_OUT": str(tmp_path)})
    command = [support.PYTHON, support.HERE / "scripts" / "abuse.py", way, str(seed)]
    done = support.must(support.memtrace("run", "--virtual", "h100", "--record", "off", "--", *command, env=env))
    assert done.stdout.splitlines()[-1] == "still standing"
    assert "invalid device pointer" in done.stderr
    assert "panicked" not in done.stderr


def inline(source, env=None, **options):
    return support.memtrace(
        "run", "--virtual", "h100", "--record", "off", "--", support.PYTHON, "-c", source, env=environment(env), **options
    )


@pytest.mark.parametrize(
    ("source", "env", "said"),
    [
        ("import torch; torch.ones(1).cuda()", {}, "before anything touches CUDA"),
        ("", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:1"}, "max_split_size_mb too small"),
        ("", {"MEMTRACE_LIBRARY": "/nowhere/libmemtrace.so"}, "MEMTRACE_LIBRARY names /nowhere"),
    ],
)
def test_what_cannot_be_is_said(source, env, said, tmp_path):
    done = inline(f"{source}\nimport memtrace\nmemtrace.install()", env, cwd=tmp_path)
    assert done.returncode == 1 and said in done.stderr, done.stderr


SPLIT = "max_split_size_mb:222"
VARIABLES = [
    {"PYTORCH_ALLOC_CONF": SPLIT},
    {"PYTORCH_HIP_ALLOC_CONF": SPLIT},
    {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": SPLIT},
    {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": SPLIT},
    {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4]"},
]


@pytest.mark.parametrize("env", VARIABLES, ids=str)
def test_settings_are_those_that_pytorch_reads(env, tmp_path):
    """Which variable counts, and how it is read, depends on the release: PyTorch
    itself is the oracle."""
    source = "import json, torch; x = torch.empty(9, device='cuda'); print(json.dumps(torch.cuda.memory._snapshot()['allocator_settings']))"
    native, ours = (
        json.loads(support.must(inline(start + source, env, cwd=tmp_path)).stdout) for start in ("", "import memtrace; memtrace.install();")
    )
    assert {key: value for key, value in ours.items() if key in native} == native


@pytest.mark.parametrize("value", ["", "0", "1", "yes"])
@pytest.mark.parametrize("name", ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"])
def test_what_turns_caching_off(name, value, tmp_path):
    source = "import torch; x = torch.empty(9, device='cuda'); print(torch.cuda.memory_reserved() == 0)"
    native = support.must(inline(source, {name: value}, cwd=tmp_path)).stdout.strip()
    ours = inline("import memtrace; memtrace.install();" + source, {name: value}, cwd=tmp_path)
    assert (ours.returncode != 0, name in ours.stderr) == (native == "True", native == "True"), (native, ours)


def test_graph_trees_are_refused_with_what_to_do(tmp_path):
    """`mode="reduce-overhead"` saves and restores the state of a pool, which
    only PyTorch's own allocator can."""
    env = {"PYTORCH_CUDA_ALLOC_CONF": "graph_capture_record_stream_reuse:True"}
    done = support.must(inline("""
import memtrace, torch
memtrace.install(stacks="none")
graph = torch.cuda.CUDAGraph()
x = torch.ones(1000, device="cuda")
with torch.cuda.graph(graph):
    y = x + 1
for name, *more in (("checkPoolLiveAllocations", set()), ("getCheckpointState",), ("setCheckpointPoolState", None, [], [])):
    try:
        getattr(torch._C, "_cuda_" + name)(0, graph.pool(), *more)
    except memtrace.MemtraceError as error:
        assert "max-autotune-no-cudagraphs" in str(error)
        print(name)
""", env, cwd=tmp_path))
    assert done.stdout.split() == ["checkPoolLiveAllocations", "getCheckpointState", "setCheckpointPoolState"]
    assert "graph_capture_record_stream_reuse changes nothing" in done.stderr


def test_a_pool_with_memtrace_as_its_allocator(tmp_path):
    """PyTorch's own allocator stays in charge and takes a pool's segments from memtrace;
    out of memory is PyTorch's to tell."""
    done = support.must(inline(f"""
import torch
from torch.cuda.memory import CUDAPluggableAllocator
allocator = CUDAPluggableAllocator({str(support.LIBRARY)!r}, "memtrace_malloc", "memtrace_free")
pool = torch.cuda.MemPool(allocator.allocator())
with torch.cuda.use_mem_pool(pool):
    x = torch.ones(5 << 20, device="cuda")
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        assert "Tried to allocate 1024.00 GiB" in str(error), error
    else:
        raise SystemExit("1 TiB granted")
import memtrace._library as l, json
ours = json.loads(l.text(l.load().memtrace_allocator_stats(0)))
assert ours["allocated_bytes.all.current"] == 20 << 20, ours
assert torch.cuda.memory_allocated() == 20 << 20
del x
del pool
assert json.loads(l.text(l.load().memtrace_allocator_stats(0)))["allocated_bytes.all.current"] == 0
print("shared")
""", {"MEMTRACE_OUT": str(tmp_path)}, cwd=tmp_path))
    assert done.stdout.splitlines()[-1] == "shared"


def test_a_pool_with_another_allocator(tmp_path):
    """The other way round: memtrace is in charge, and a pool's segments come from somebody else."""
    done = support.must(inline("""
import ctypes, memtrace, torch
memtrace.install(stacks="none")
Malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
runtime = torch.cuda.cudart
calls = []
import memtrace._library as l
real = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=ctypes.RTLD_GLOBAL)
@Malloc
def malloc(size, device, stream):
    addr = ctypes.c_void_p()
    assert real.cudaMalloc(ctypes.byref(addr), ctypes.c_size_t(size)) == 0
    calls.append(("malloc", addr.value, size))
    return addr.value
@Free
def free(addr, size, device, stream):
    calls.append(("free", addr, size))
    assert real.cudaFree(ctypes.c_void_p(addr)) == 0
at = [ctypes.cast(f, ctypes.c_void_p).value for f in (malloc, free)]
allocator = torch._C._cuda_customAllocator(*at)
torch.cuda.init()
pool = torch.cuda.MemPool(allocator)
with torch.cuda.use_mem_pool(pool):
    x = torch.ones(1000, device="cuda")
    assert pool.use_count() == 2
assert calls == [("malloc", x.data_ptr(), 2 << 20)], calls
[segment] = pool.snapshot()
assert segment["segment_pool_id"] == pool.id and segment["allocated_size"] == 4096
del x, pool, segment
assert [c[0] for c in calls] == ["malloc", "free"], calls
print("lent")
""", {"MEMTRACE_OUT": str(tmp_path)}, cwd=tmp_path))
    assert done.stdout.splitlines()[-1] == "lent"


FAILING = """
import sys
if sys.argv[1] == "installed":
    import memtrace; memtrace.install(stacks="none")
import torch
torch.cuda.memory._record_memory_history()
kept = torch.ones(1000, device="cuda")
try:
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
except RuntimeError as e:
    print(type(e).__name__, getattr(e, "error_code", None), str(e).splitlines()[0])
after = torch.ones(5000, device="cuda")
stats = torch.cuda.memory_stats()
print([stats[k] for k in ("num_ooms", "num_alloc_retries", "num_sync_all_streams", "num_device_alloc", "num_device_free")])
print([e["action"] for e in torch.cuda.memory._snapshot()["device_traces"][0]])
"""


# What is refused (scripts/refuses.c), and what PyTorch says to it first.
REFUSED = {
    "cudaMalloc:2": "OutOfMemoryError",
    "cudaMalloc:719": ("AcceleratorError 719 CUDA error: ", "RuntimeError None CUDA error: "),
    "cuMemCreate:2": "[0, 1, 1, ",  # no error: the second attempt succeeds
    "cuMemCreate:719": "RuntimeError None CUDA driver error: ",
    "cuMemMap:2": "RuntimeError None CUDA driver error: out of memory",
    "cuMemSetAccess:1": "RuntimeError None CUDA driver error: invalid argument",
    "cuMemAddressReserve:2": "RuntimeError None CUDA driver error: out of memory",
}


@pytest.mark.parametrize("refused", REFUSED)
def test_an_error_that_is_no_want_of_memory(refused, tmp_path):
    """PyTorch throws it at once, as what it is, and tries nothing else;
    only a want of memory is one."""
    library = tmp_path / "librefuses.so"
    support.must(support.execute(["cc", "-O2", "-shared", "-fPIC", "-o", library, support.HERE / "scripts" / "refuses.c", "-ldl"]))
    between = 'LD_PRELOAD="${LD_PRELOAD%%:*}:$0:${LD_PRELOAD#*:}" exec "$@"'  # behind memtrace, in front of the GPU
    expandable = f"expandable_segments:{not refused.startswith('cudaMalloc')}"
    said = []
    for way in ("native", "installed"):
        command = ["sh", "-c", between, library, support.PYTHON, "-c", FAILING, way]
        options = ["--virtual", "h100", "--stacks", "none", "--out", tmp_path / way]
        env = environment({"REFUSES": refused, "PYTORCH_CUDA_ALLOC_CONF": expandable})
        said.append(support.must(support.memtrace("run", *options, "--", *command, env=env, cwd=tmp_path)).stdout.splitlines())
    if not torch.__version__.startswith("2.15."):  # in 2.6 the documentation lies elsewhere
        said = [[line.partition("  See documentation")[0] for line in lines] for lines in said]
    native, installed = said
    assert installed == native
    assert native[0].startswith(REFUSED[refused])
    assert ("'oom'" in native[-1]) == (refused == "cudaMalloc:2")


def test_the_profiler_sees_memory(tmp_path):
    """PyTorch's profiler sees each block, as it does with PyTorch's own allocator."""
    program = """
import sys
if sys.argv[1] == "installed":
    import memtrace; memtrace.install(stacks="none")
import torch
from torch.profiler import profile, ProfilerActivity
torch.ones(1, device="cuda")
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
    x = torch.ones(1000, device="cuda")
    del x
print([(e.name(), e.nbytes()) for e in p.profiler.kineto_results.events() if e.name() == "[memory]"])
"""
    said = []
    for way in ("native", "installed"):
        command = [support.PYTHON, "-c", program, way]
        run = support.memtrace("run", "--virtual", "h100", "--record", "off", "--", *command, env=environment(), cwd=tmp_path)
        said.append(support.must(run).stdout.splitlines()[-1])
    assert said[0] == said[1] and "4096" in said[0]
