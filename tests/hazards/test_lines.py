"""Which line, which limit, which rank: programs whose memory is easily charged to the
wrong one."""

import gzip
import importlib.util
import json
import os
import pickle
import socket
import sys
import textwrap

import pytest
import support

MIB, GIB = 1 << 20, 1 << 30
# One line whose memory is taken inside of PyTorch's Python.
ONE = 'import torch; x = torch.nn.Linear(1024, 1024, bias=False, device="cuda"); print("ok")\n'
INSTALLED = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"

# A trainer as people install it: its own layers, on PyTorch's.
TRAINER = {
    "acme/__init__.py": "",
    "acme/model.py": """\
        import torch
        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = torch.nn.Linear(512, 512)
            def forward(self, x):
                return self.proj(x)
        """,
    "acme/train.py": """\
        import torch
        from .model import Attention
        def main():
            with torch.no_grad():
                model = Attention().cuda()
                y = model(torch.randn(2048, 512, device="cuda"))
            print("ok")
        if __name__ == "__main__":
            main()
        """,
}


def put(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture
def run(tmp_path):
    """Runs a command on a virtual GPU, recorded; gives the files that it left, and what it said."""

    def run(*command, spec="h100", env=None, **options):
        done = support.must(support.record(command, tmp_path / "out", spec=spec, env=env, **options))
        return support.files(tmp_path / "out"), done

    return run


def lines(path, *options):
    """Who held memory at the peak: file, line and function, with the bytes."""
    summary = json.loads(support.must(support.memtrace("summary", "--json", *options, path)).stdout)
    return {(s["file"], s["line"], s["function"]): s["bytes"] for s in summary["devices"][0]["at_peak"]}


@pytest.mark.parametrize(
    "script",
    [
        "bin/train",
        "run.sh",
        "torch/optim/mine.py",
        "site-packages/train.py",
        f"proj/{INSTALLED.replace('site-packages', 'train.py')}",
        "threading2/threading.py",
    ],
)
def test_a_users_script_is_the_users_wherever_it_lies(run, tmp_path, script):
    put(tmp_path, {script: ONE})
    # A file beside a script hides the standard library's of the same name,
    # which is not what is tested here.
    path = tmp_path / script
    files, _ = run(sys.executable, "-P", path, stacks="all")
    assert lines(files[-1]) == {(str(path), 1, "<module>"): 4 * MIB}


def test_text_that_is_no_file(run):
    files, _ = run(sys.executable, "-c", ONE)
    assert lines(files[-1]) == {("<string>", 1, "<module>"): 4 * MIB}


def test_odd_names_of_functions_and_files(run, tmp_path):
    """Names that no file has are lines like any other; the empty ones, too."""
    odd = [("", ""), ("/p:12", "q:7"), ("no extension", "f"), ("</script><b>", "g"), ("L" * 300, "N" * 300)]
    put(
        tmp_path,
        {
            "odd.py": f"""\
            import torch
            def f():
                return torch.empty(1 << 20, device="cuda")
            kept = []
            for file, name in {odd!r}:
                f.__code__ = f.__code__.replace(co_filename=file, co_name=name)
                kept.append(f())
            print("ok")
            """
        },
    )
    files, _ = run(sys.executable, tmp_path / "odd.py", stacks="all")
    found = {(file, name): size for (file, _, name), size in lines(files[-1]).items()}
    assert found == dict.fromkeys(odd, 4 * MIB)


@pytest.mark.parametrize("folder", ["site-packages", INSTALLED])
def test_a_program_that_is_an_installed_package(run, tmp_path, folder):
    put(tmp_path / folder, TRAINER)
    files, _ = run(sys.executable, "-m", "acme.train", env={"PYTHONPATH": str(tmp_path / folder)}, stacks="all")
    acme = tmp_path / folder / "acme"
    found = {(file, line) for file, line, _ in lines(files[-1])}
    assert found == {(str(acme / "train.py"), n) for n in (5, 6)} | {(str(acme / "model.py"), 7)}


def test_a_command_that_pip_made_is_not_the_program(run, tmp_path):
    """And a script of the user's that calls a package is; its second line is the package's."""
    put(tmp_path / INSTALLED, TRAINER)
    call = "import sys\nfrom acme.train import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    put(tmp_path, {"bin/acme": call, "home/train.py": call})
    env = {"PYTHONPATH": str(tmp_path / INSTALLED)}
    files, _ = run(sys.executable, tmp_path / "bin/acme", env=env)
    assert {os.path.basename(file) for file, _, _ in lines(files[-1])} == {"train.py", "model.py"}
    script = tmp_path / "home/train.py"
    files, _ = run(sys.executable, script, env=env)
    path = next(f for f in files if {file for file, _, _ in lines(f)} == {str(script)})
    summary = json.loads(
        support.must(support.memtrace("summary", "--json", "--by", "module-line", path)).stdout
    )
    modules = {(os.path.basename(s["module"]["file"]), s["module"]["line"]) for s in summary["devices"][0]["at_peak"]}
    assert modules == {("train.py", 5), ("train.py", 6), ("model.py", 7)}
    shown = support.must(support.memtrace("summary", "--by", "module-line", path)).stdout
    assert "model.py:7 forward" in shown and f"{script}:4 <module>" in shown


def test_pytorch_by_another_path_than_its_libraries(run, tmp_path):
    """As of a source tree behind a link: libraries have their real path, the lines
    of Python the one it was found by."""
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    (tmp_path / "links").mkdir()
    (tmp_path / "links/torch").symlink_to(torch)
    # As a program does that has them already.
    paths = [f"{torch}/lib/lib{name}.so" for name in ("torch_global_deps", "torch_python")]
    load = f"import ctypes; [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in {paths}]\n"
    put(tmp_path, {"train.py": load + ONE})
    env = {"PYTHONPATH": str(tmp_path / "links")}
    files, _ = run(sys.executable, tmp_path / "train.py", env=env, stacks="all")
    assert lines(files[-1]) == {(str(tmp_path / "train.py"), 2, "<module>"): 4 * MIB}
    snapshot = support.load(files[-1])
    used = {f["filename"] for e in snapshot["device_traces"][0] for f in e["frames"]}
    assert any(file.startswith(f"{tmp_path}/links/torch/") for file in used)
    assert snapshot["memtrace"]["python"]["pytorch"] == [torch, f"{tmp_path}/links/torch"]


def test_packages_beside_pytorch_are_installed(run, tmp_path):
    """`pip install --target`: a folder that no interpreter knows, for
    which only PyTorch in it speaks."""
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    put(tmp_path / "deps", TRAINER)
    (tmp_path / "deps/torch").symlink_to(torch)
    call = "import sys\nfrom acme.train import main\nsys.exit(main())\n"
    put(tmp_path, {"train.py": call, "deps/bin/acme": call})
    env = {"PYTHONPATH": str(tmp_path / "deps")}
    files, _ = run(sys.executable, tmp_path / "train.py", env=env)
    assert {(file, line) for file, line, _ in lines(files[-1])} == {(str(tmp_path / "train.py"), 3)}
    files, _ = run(sys.executable, tmp_path / "deps/bin/acme", env=env)
    found = {os.path.basename(file) for f in files for file, _, _ in lines(f)}
    assert found == {"train.py", "model.py"}


def test_a_class_in_a_text_is_the_users(run):
    """Of `python -c`: not what `dataclasses` writes, though it is called like that."""
    text = f"""\
import threading, torch
class Model:
    def __init__(self):
        self.x = torch.empty({MIB}, device="cuda")
    def __call__(self):
        self.y = torch.empty({MIB}, device="cuda")
model = Model()
worker = threading.Thread(target=model)
worker.start()
worker.join()
print("ok")
"""
    files, _ = run(sys.executable, "-c", text)
    assert lines(files[-1]) == {("<string>", 4, "__init__"): 4 * MIB, ("<string>", 6, "__call__"): 4 * MIB}


@pytest.mark.parametrize("unknown", [-1, 2**64 - 1])
def test_a_line_that_python_does_not_know(tmp_path, unknown):
    """PyTorch writes −1: no verb shows a number, and whoever writes the
    file again writes the same."""
    with gzip.open(support.ROOT / "tests/data/golden/basic_python_stacks.pickle.gz") as file:
        snapshot = pickle.load(file)
    known = {id(f): f for t in snapshot["device_traces"] for e in t for f in e["frames"]}
    known |= {id(f): f for s in snapshot["segments"] for b in s["blocks"] for f in b["frames"]}
    for frame in known.values():
        frame["line"] = unknown
    # An absolute path, as those have that are libraries; there is one of this name.
    next(iter(known.values()))["filename"] = str(support.LIBRARY)
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    for verb in ("summary", "summary --by module-line", "report", "check", "replay", "tune", "symbolize --out b.pickle"):
        for more in ((),) if verb.startswith("symbolize") else ((), ("--json",)):
            done = support.must(support.memtrace(*verb.split(), *more, path, cwd=tmp_path))
            assert str(2**64 - 1) not in done.stdout + done.stderr, (verb, done.stdout)
    written = support.load(tmp_path / "b.pickle")
    again = {f["line"] for t in written["device_traces"] for e in t for f in e["frames"]}
    assert again == {-1}
    summary = json.loads(support.must(support.memtrace("summary", "--json", path)).stdout)
    sites = summary["devices"][0]["at_peak"]
    assert {s["line"] for s in sites} == {None} and not any(":-1" in s["site"] for s in sites)
    (tmp_path / "a.json").write_text(json.dumps(snapshot))
    support.must(support.memtrace("symbolize", "a.json", "--out", "c.json", cwd=tmp_path))
    text = (tmp_path / "c.json").read_text()
    assert '-1' in text and str(2**64 - 1) not in text


def test_a_history_of_python_has_scripts_of_any_name(tmp_path):
    """Under `memtrace.install()`, where the program asks for frames of Python alone."""
    put(
        tmp_path,
        {
            "bin/train": """\
            import memtrace, torch
            memtrace.install(stacks="all")
            torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
            x = torch.empty(1 << 20, device="cuda")
            [entry] = [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "alloc"]
            print([(f["name"], f["line"]) for f in entry["frames"]])
            """
        },
    )
    env = {"PYTHONPATH": str(support.ROOT / "python"), "MEMTRACE_LIBRARY": str(support.LIBRARY)}
    env["MEMTRACE_OUT"] = str(tmp_path / "out")
    command = ("run", "--virtual", "h100", "--record", "off", "--out", tmp_path / "out", "--")
    done = support.must(support.memtrace(*command, sys.executable, tmp_path / "bin/train", env=env))
    assert done.stdout.splitlines()[-1] == "[('<module>', 4)]"


def test_what_torch_compile_writes_is_no_line(run, tmp_path):
    """Wherever the user keeps it: PyTorch names the file."""
    put(
        tmp_path,
        {
            "train.py": """\
            import importlib.util, os
            from torch._inductor.codecache import code_hash, get_path
            code = "import torch\\ndef call(): return torch.empty(1 << 20, device='cuda')"
            _, folder, path = get_path(code_hash(code), "py")
            os.makedirs(folder)
            open(path, "w").write(code)
            spec = importlib.util.spec_from_file_location("generated", path)
            generated = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(generated)
            x = generated.call()
            print("ok")
            """
        },
    )
    files, _ = run(sys.executable, tmp_path / "train.py", env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    assert lines(files[-1]) == {(str(tmp_path / "train.py"), 10, "<module>"): 4 * MIB}


# --- out of memory --------------------------------------------------------------------------------


def failure(path):
    """The summary's words and the snapshot's own about a failure."""
    summary = json.loads(support.must(support.memtrace("summary", "--json", path)).stdout)
    [oom] = summary["devices"][0]["ooms"]
    return oom, support.load(path)["memtrace"]["out_of_memory"]


def test_what_the_driver_refuses_is_reported_as_it_was(programs, gpu, tmp_path):
    """A program without PyTorch: what was free, and what it held itself."""
    env = {**gpu, "MEMTRACE_OUT": str(tmp_path / "out"), "MEMTRACE_QUIET": "1"}
    done = support.must(support.execute([programs / "too_much"], env=env))
    free = int(done.stdout.split()[-1])
    oom, failed = failure(support.files(tmp_path / "out")[0])
    assert (oom["asked"], oom["device_free"]) == (300 * GIB, free)
    assert (oom["allocated"], oom["reserved"], oom["limited"]) == (100 * MIB, 100 * MIB, False)
    assert (failed["free"], failed["call"], failed["refused_by_driver"]) == (free, "cudaMalloc", True)
    [text] = (tmp_path / "out").glob("*-oom.txt")
    assert "the device had" in text.read_text()


TOO_MUCH = """\
    import sys, torch
    {before}
    x = torch.empty({held} << 30, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("ok")
    """
LIMITED = "torch.cuda.set_per_process_memory_fraction(0.25)"


@pytest.mark.parametrize(
    ("before", "held", "conf", "allowed"),
    [
        (LIMITED, 15, "", None),
        ("", 15, "per_process_memory_fraction:0.25", "19.80 GiB"),
        (LIMITED, 15, "expandable_segments:True", None),
        ("", 75, "", False),
        (LIMITED.replace("0.25", "0.99"), 75, "", False),
    ],
)
def test_which_limit_refused(run, tmp_path, before, held, conf, allowed):
    """The card, or one that PyTorch has set itself."""
    put(tmp_path, {"train.py": TOO_MUCH.format(before=before, held=held)})
    files, _ = run(sys.executable, tmp_path / "train.py", env={"PYTORCH_CUDA_ALLOC_CONF": conf})
    oom, _ = failure(files[0])
    [text] = (tmp_path / "out").glob("*-oom.txt")
    text = text.read_text()
    report = support.must(support.memtrace("report", files[0])).stdout
    limited = allowed is not False
    assert (oom["limited"], "a higher limit" in text) == (limited, limited)
    assert ["PyTorch's own limit" in said for said in (text, report)] == [limited, limited]
    assert not allowed or f"own limit of {allowed}" in text


@pytest.mark.parametrize("how", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "program", None])
def test_advice_names_no_setting_that_is_on(run, tmp_path, how):
    """Most of the card is free in pieces of 16 MiB: expandable segments
    are advised, unless they are there."""
    setting = "expandable_segments:True"
    before = f'torch._C._accelerator_setAllocatorSettings("{setting}")' if how == "program" else ""
    put(
        tmp_path,
        {
            "train.py": f"""\
            import torch
            {before}
            kept = [torch.empty(4 << 20, dtype=torch.uint8, device="cuda") for _ in range(700)][::5]
            try:
                torch.empty(1200 << 20, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                print("ok")
            """
        },
    )
    env = {how: setting} if how and how != "program" else {}
    files, _ = run(sys.executable, tmp_path / "train.py", env=env, spec="sm_90,4GiB,132SM")
    texts = [support.must(support.memtrace("report", files[0])).stdout]
    texts += [path.read_text() for path in (tmp_path / "out").glob("*-oom.txt")]
    assert len(texts) == 2 or how, "it runs out of memory"
    assert [f"={setting}" in said for said in texts] == [how is None] * len(texts), texts
    tune = json.loads(support.memtrace("tune", "--json", files[0]).stdout)
    assert tune["recorded"] == ("" if how is None else setting)
    confs = [sorted(row["conf"].split(",")) for row in tune["tried"]]
    assert len(confs) == len({tuple(c) for c in confs}), "a line twice"


def test_tune_counts_what_is_reserved(run, tmp_path):
    """The same smallest card, and thirty times the memory: no reason to leave the settings."""
    put(
        tmp_path,
        {
            "train.py": """\
            import torch
            keep, MIB = [], 1 << 20
            for _ in range(60):
                a = torch.empty(91 * MIB, dtype=torch.uint8, device="cuda")
                b = torch.empty(45 * MIB, dtype=torch.uint8, device="cuda")
                keep.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
                del a, b
            print("ok")
            """
        },
    )
    conf = "expandable_segments:True,max_split_size_mb:90"
    files, _ = run(sys.executable, tmp_path / "train.py", env={"PYTORCH_CUDA_ALLOC_CONF": conf})
    advice = support.must(support.memtrace("tune", files[-1])).stdout
    assert "reserved at most instead of 8.09 GiB" in advice and "leave them" not in advice, advice
    assert conf in advice, "the recorded line is among those listed"


# --- ranks ----------------------------------------------------------------------------------------

RANKS = """\
    import os, torch, torch.multiprocessing as mp, torch.distributed as dist
    def work(rank, world):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", rank=rank, world_size=world)
        dist.all_reduce(torch.ones(8, device="cuda"))
        # A part of the world, in which everybody is somebody else.
        pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
        dist.all_reduce(torch.ones(8, device="cuda"), group=pairs[rank // 2])
        dist.destroy_process_group()
    if __name__ == "__main__":
        mp.spawn(work, args=(4,), nprocs=4)
    """


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_ranks_that_no_launcher_named(run, tmp_path):
    """`mp.spawn` passes the rank as an argument; NCCL gets it, and a
    smaller communicator changes nothing."""
    put(tmp_path, {"train.py": RANKS.format(port=free_port())})
    files, _ = run(sys.executable, tmp_path / "train.py", spec="h100*4")
    ranks = {}
    for path in files:
        about = support.load(path)["memtrace"]
        rank = about["rank"]
        ranks[rank] = (about["world_size"], about["rank_device"])
        assert f"-rank{rank}-" in path.name
        for verb in ("summary", "report"):
            shown = support.must(support.memtrace(verb, path)).stdout
            assert f"rank {rank} of 4 on device {rank}" in shown, shown
    assert ranks == {rank: (4, rank) for rank in range(4)}
