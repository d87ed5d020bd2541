"""Asks for everything that PyTorch refuses under a pluggable allocator and `memtrace.install()` gives back.

    python answers.py native|installed FOLDER

One line for each answer. `test_install.py` compares the lines of the two.
"""

import json
import os
import pickle
import sys

import torch

way, folder = sys.argv[1:]
if way == "installed":
    import memtrace

    memtrace.install(stacks="python")
cuda, C, MiB = torch.cuda, torch._C, 1 << 20


def plain(value):
    """What JSON can say, with keys of any kind; of a frame its function and line."""
    if isinstance(value, dict) and {"name", "filename", "line"} <= set(value):
        return [value["name"], value["line"]]
    if isinstance(value, dict):
        return sorted(([str(k), plain(v)] for k, v in value.items() if k != "time_us"), key=lambda pair: pair[0])
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


def say(name, ask):
    try:
        answer = plain(ask())
    except Exception as error:
        answer = [type(error).__name__, str(error).splitlines()[0]]
    print(name, json.dumps(answer), flush=True)


def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def numbers():
    return [cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved(), cuda.max_memory_reserved()]


def trace():
    """History: what happened, where by Python's frames, and what a segment and its blocks show of it."""
    shown = cuda.memory._snapshot()
    entries = [[e["action"], e["size"], plain(e.get("frames"))] for e in shown["device_traces"][0]]
    segments = [[plain(s.get("frames")) and len(s["blocks"]) == 1] + [plain(b["frames"]) for b in s["blocks"]] for s in shown["segments"]]
    return [entries, segments, sorted(shown)]


# --- before anything ----------------------------------------------------------------------------------------

say("nothing", lambda: [numbers(), cuda.memory_stats(), cuda.memory_stats_as_nested_dict()])

# --- statistics -------------------------------------------------------------------------------------------

cuda.init()
observed = []
C._cuda_attach_out_of_memory_observer(lambda *n: observed.append(["first", *n]))
C._cuda_attach_out_of_memory_observer(lambda *n: observed.append(["second", *n]))
kept = block(3 * MiB)
gone = block(30 * MiB)
del gone
say("in use", lambda: [numbers(), cuda.memory_stats(), cuda.memory_stats_as_nested_dict()])
say("accelerator", lambda: [torch.accelerator.memory_stats(), torch.accelerator.max_memory_allocated()])
say("summary", lambda: [cuda.memory_summary(), cuda.memory_summary(abbreviated=True)])
cuda.reset_peak_memory_stats()
say("peak reset", lambda: [numbers(), cuda.memory_stats()])
gone = block(7 * MiB)
del gone
torch.accelerator.reset_peak_memory_stats()
say("peak reset by the other name", lambda: [numbers(), cuda.memory_stats()])
cuda.reset_accumulated_memory_stats()
say("sums reset", cuda.memory_stats)
gone = block(7 * MiB)
del gone
torch.accelerator.reset_accumulated_memory_stats()
say("sums reset by the other name", cuda.memory_stats)
used = block(2 * MiB)
used.record_stream(cuda.Stream())
del used
say("used by another stream", lambda: [numbers(), cuda.memory_stats()])
say("the card", lambda: [cuda.mem_get_info(), torch.accelerator.get_memory_info(), cuda.host_memory_stats()])
pointer = cuda.caching_allocator_alloc(5 * MiB)
say("by pointer", numbers)
cuda.caching_allocator_delete(pointer)
cuda.empty_cache()
say("emptied", lambda: [numbers(), cuda.memory_snapshot(), cuda.mem_get_info()])

# --- history ----------------------------------------------------------------------------------------------

say("no history", lambda: [trace(), C._cuda_allocationTraceback(kept.data_ptr())])
for options in (
    {},
    {"context": None},
    {"context": "state"},
    {"context": "alloc", "max_entries": 3},
    {"clear_history": True, "stacks": "python"},
    {"skip_actions": ["free_requested", "snapshot"]},
    {"enabled": "state"},
):
    cuda.memory._record_memory_history(**{"stacks": "python", **options})
    seen = block(2 * MiB)
    say(f"history {options}", lambda: [trace(), C._cuda_isHistoryEnabled(), C._cuda_allocationTraceback(seen.data_ptr())])
    del seen
    say("and after the free", trace)
for more in ({"trace_alloc_record_context": True}, {}):
    cuda.memory._record_memory_history(True, trace_alloc_max_entries=5, **more)
    seen = block(2 * MiB)
    say(f"history as of old {more}", trace)
cuda.memory._record_memory_history(clear_history=True, stacks="python")
cuda.memory._dump_snapshot(os.path.join(folder, f"{way}.pickle"))
with open(os.path.join(folder, f"{way}.pickle"), "rb") as file:
    dumped = pickle.load(file)
say("dumped", lambda: [sorted(dumped), dumped["segments"], dumped["allocator_settings"]])
cuda.memory._record_memory_history(enabled=None)
say("history off", lambda: [trace(), C._cuda_isHistoryEnabled()])
for wrong in ({"enabled": "some"}, {"context": "some"}, {"stacks": "some"}, {"skip_actions": ["some"]}):
    say(f"history {wrong}", lambda: cuda.memory._record_memory_history(**wrong))

# --- limits and failures ----------------------------------------------------------------------------------

say("fraction", cuda.get_per_process_memory_fraction)
cuda.set_per_process_memory_fraction(0.25)
say("a quarter", cuda.get_per_process_memory_fraction)
say("more than that", lambda: block(30 << 30))
say("observed", lambda: observed)
say("too much of a fraction", lambda: C._cuda_setMemoryFraction(3.0, 0))
cuda.set_per_process_memory_fraction(1.0)
say("all of it", cuda.get_per_process_memory_fraction)
say("more than the card has", lambda: block(90 << 30))
say("more than there is", lambda: block(1 << 62))
say("observed both", lambda: observed)
say("after failures", cuda.memory_stats)
for settings in ("roundup_power2_divisions:2", "max_split_size_mb:1", "nonsense:1"):
    say(f"settings {settings}", lambda: C._accelerator_setAllocatorSettings(settings))
rounded = block(5 * MiB)
say("rounded", lambda: [numbers(), cuda.memory._snapshot()["allocator_settings"]])
del rounded
C._accelerator_setAllocatorSettings("roundup_power2_divisions:1")

# --- pools ------------------------------------------------------------------------------------------------


def pools(**options):
    pool = cuda.MemPool(**options)
    with cuda.use_mem_pool(pool):
        inside = [block(3 * MiB), block(MiB // 2)]
        del inside[0]
        inside.append(block(4 * MiB))
        shown = [pool.use_count(), pool.snapshot(), numbers(), cuda.memory_snapshot(pool.id), cuda.memory_stats()]
    shown += [pool.use_count(), len(pool.id), pool.id[0]]
    del inside
    return shown


say("a pool", pools)
say("and without it", lambda: [numbers(), cuda.memory_snapshot(), cuda.memory_stats()])
say("a pool that splits nothing", lambda: pools(no_split=True))


def lends():
    pool = cuda.MemPool(use_on_oom=True)
    with cuda.use_mem_pool(pool):
        lent = block(60 << 30)
    del lent
    return [block(50 << 30).numel(), numbers()]


def does_not_lend():
    pool = cuda.MemPool()
    with cuda.use_mem_pool(pool):
        lent = block(60 << 30)
    del lent
    return block(50 << 30).numel(), pool


say("a pool that lends", lends)
say("one that does not", does_not_lend)

# --- another process --------------------------------------------------------------------------------------

sys.stdout.flush()
child = os.fork()
if child == 0:
    say("a child", lambda: [numbers(), cuda.memory_stats()])
    say("a child's memory", lambda: block(1))
    sys.stdout.flush()
    os._exit(0)
say("the child ended with", lambda: os.waitpid(child, 0)[1])
say("and its parent", lambda: [numbers(), cuda.memory_stats(), cuda.memory_snapshot()])
