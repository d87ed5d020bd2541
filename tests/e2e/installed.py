"""Runs a script with PyTorch's own allocator or with memtrace's, and writes down
everything that PyTorch says about memory.

    python installed.py native|installed FOLDER SCRIPT [ARGS…]

One file for each process goes into FOLDER. It has the trace and the segments of
`torch.cuda.memory._snapshot()` and the error messages of out of memory. Of each
device it has `memory_stats()`, `memory_summary()` and what is free.
`test_install.py` compares the files of the two.

Backward passes run on the thread that asks for them, because autograd's own threads give memory
back while the program goes on. With them two runs of the same program have two histories, also with
PyTorch alone. With `MEMTRACE_TEST_THREADS=1` they run where they always do.
"""

import json
import os
import runpy
import sys


def entry(e):
    """What must be equal in an entry of the trace."""
    where = e["device_free"] if e["action"] == "oom" else e["addr"]
    frames = [[f["name"], f["filename"], f["line"]] for f in e.get("frames", [])]
    return [e["action"], where, e["size"], e["stream"], list(e["pool_id"]), frames]


def segment(s):
    """What must be equal in a segment. Of its own stack, PyTorch keeps none
    once its first block has been split."""
    blocks = [
        {**b, "frames": [[f["name"], f["filename"], f["line"]] for f in b["frames"]]} for b in s["blocks"]
    ]
    return {**{k: v for k, v in s.items() if k != "frames"}, "blocks": blocks}


def main():
    way, folder, script, *arguments = sys.argv[1:]
    import torch

    if way == "installed":
        import memtrace

        memtrace.install(stacks="python")
        assert memtrace.is_installed()
    messages, observed = [], []
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    torch._C._cuda_attach_out_of_memory_observer(lambda *numbers: observed.append(numbers))

    original = torch.empty

    def empty(*a, **k):
        try:
            return original(*a, **k)
        except torch.cuda.OutOfMemoryError as error:
            messages.append(str(error))
            raise

    if "oom" in script:
        torch.empty = empty
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with torch.autograd.set_multithreading_enabled(os.environ.get("MEMTRACE_TEST_THREADS") == "1"):
        alive = runpy.run_path(script, run_name="__main__")
    # Frees are seen when the next request comes; and threads may still be at it.
    torch.cuda.synchronize()
    snapshot = torch.cuda.memory._snapshot()
    devices = range(torch.cuda.device_count())
    result = {
        "trace": [[entry(e) for e in entries] for entries in snapshot["device_traces"]],
        "segments": [segment(s) for s in snapshot["segments"]],
        "keys": sorted(snapshot),
        "settings": snapshot["allocator_settings"],
        "stats": [torch.cuda.memory_stats(d) for d in devices],
        "summary": [torch.cuda.memory_summary(d) for d in devices],
        "peaks": [[torch.cuda.max_memory_allocated(d), torch.cuda.max_memory_reserved(d)] for d in devices],
        "messages": messages,
        "observed": observed,
        "backend": torch.cuda.get_allocator_backend(),
    }
    del alive
    rank = os.environ.get("RANK", "0")
    with open(os.path.join(folder, f"{way}-{rank}.json"), "w") as file:
        json.dump(result, file)


main()
