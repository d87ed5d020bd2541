"""Random programs for PyTorch's allocator: what was asked, and everything that PyTorch did.

Runs inside a process that sees the virtual GPU, and writes one JSON file that
`crates/caching/examples/differential.rs` repeats and compares, event for event:

    memtrace run --virtual SPEC --record off -- python allocator_differential.py NAME SEED COUNT FILE

`SPEC` and the environment of each NAME are in `PROGRAMS`;
`test_allocator.py` puts the two together.
"""

import gc
import json
import random
import sys
import warnings

SMALL_CARD = "sm_90,3GiB,132SM"

# name → (configuration, lazy streams, what the program does besides allocating on several streams)
PROGRAMS = {
    "plain": ("", False, ""),
    "plain_lazy": ("", True, "streams"),
    "streams": ("", False, "streams"),
    "pools": ("", False, "streams pools"),
    "pools_lazy": ("", True, "streams pools"),
    "captures": ("", False, "streams captures"),
    "captures_pools": ("", False, "streams pools captures"),
    "expandable": ("expandable_segments:True", False, "streams"),
    "expandable_lazy": ("expandable_segments:True", True, "streams pools"),
    "expandable_pools": ("expandable_segments:True", False, "streams pools captures"),
    "expandable_large": ("expandable_segments:True,large_segment_size_mb:64", True, "streams"),
    "expandable_reserve": ("expandable_segments:True,expandable_segments_reserve:0.1", False, "streams"),
    "expandable_reserve_g": ("expandable_segments:True,expandable_segments_reserve:1G", False, "streams"),
    "max_split": ("max_split_size_mb:64", True, "streams pools"),
    "max_split_round": ("max_split_size_mb:40,max_non_split_rounding_mb:30", False, "streams"),
    "gc": ("garbage_collection_threshold:0.6,per_process_memory_fraction:0.5", False, "streams"),
    "gc_lazy": ("garbage_collection_threshold:0.4,per_process_memory_fraction:0.6", True, "streams pools"),
    "gc_split": (
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.6,max_split_size_mb:40",
        False,
        "streams pools",
    ),
    "gc_expandable": (
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.6,expandable_segments:True",
        False,
        "streams",
    ),
    "fraction": ("per_process_memory_fraction:0.5", False, "streams"),
    "roundup": ("roundup_power2_divisions:[1:2,4:4,64:8,>:16]", False, "streams"),
    "roundup_8": ("roundup_power2_divisions:8,max_split_size_mb:128", False, "streams pools"),
    "large_segment": ("large_segment_size_mb:64", False, "streams pools captures"),
    "throw": ("throw_on_cudamalloc_oom:True", False, "streams pools"),
    "switching": ("", False, "streams pools switches"),
    "exact": ("", False, "streams exact"),
    "exact_expandable": ("expandable_segments:True", True, "streams exact"),
    "fractions": ("garbage_collection_threshold:0.7", True, "streams fractions"),
}

# What a program that switches settings switches between.
SETTINGS = ["expandable_segments:True", "expandable_segments:False", "roundup_power2_divisions:4", "roundup_power2_divisions:[1:2,>:8]"]


class Program:
    """A random program, its operations as they are done."""

    def __init__(self, torch, seed, configuration, features):
        self.torch = torch
        self.random = random.Random(seed)
        self.features = set(features.split())
        self.expandable = "expandable_segments:True" in configuration or "switches" in self.features
        self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(4))]
        self.capture_stream = torch.cuda.Stream()
        self.tensors = {}  # slot → (tensor, stream it was made on)
        self.named_in_capture = set()
        self.used_elsewhere = set()
        self.waiting = 0  # frees that wait for the end of the capture
        self.pools = []
        self.routes = []
        self.graphs = []
        self.captured = None  # (graph, pool id, streams that take part)
        self.operations = []
        self.slots = 0
        self.weight = self.random.choice([0.5, 1.0])

    def size(self):
        r = self.random
        kind = r.random()
        if kind < 0.45:
            return int(2 ** r.uniform(0, 17))
        if kind < 0.65:
            return int(2 ** r.uniform(17, 21))
        if kind < 0.95:
            return int(2 ** r.uniform(20, 26.5))
        return int(2 ** r.uniform(26, 29.5))

    def note(self, *operation):
        self.operations.append(operation)

    def on_stream(self, stream):
        """Makes a stream the current one, and says whether it is being captured."""
        self.torch.cuda.set_stream(stream)
        return bool(self.captured and stream in self.captured[2])

    def some_stream(self):
        # While capturing, those that take part: with the others PyTorch soon
        # touches an event that CUDA does not allow.
        return self.random.choice(self.captured[2] if self.captured else self.streams)

    def allocate(self):
        stream, size, slot = self.some_stream(), self.size(), self.slots
        self.slots += 1
        capturing = self.on_stream(stream)
        addr = None
        try:
            tensor = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
            addr = tensor.data_ptr()
            self.tensors[slot] = (tensor, stream)
        except self.torch.cuda.OutOfMemoryError:
            pass
        self.note("alloc", slot, size, stream.cuda_stream, addr, capturing)

    def allocate_at(self):
        """At an exact address behind something that is there: free or not."""
        slot = self.pick()
        if slot is None:
            return
        neighbour, stream = self.tensors[slot]
        size = self.size() // 4 + 1
        addr = neighbour.data_ptr() + (neighbour.nbytes + 511) // 512 * 512 + 512 * self.random.choice([0, 0, 1, 16, 2048, 9000])
        slot, self.slots = self.slots, self.slots + 1
        capturing = self.on_stream(stream)
        storage = self.torch.UntypedStorage(0, device="cuda")
        try:
            storage._resize_with_addr_(size, addr)
            self.tensors[slot] = (self.torch.empty(0, dtype=self.torch.uint8, device="cuda").set_(storage), stream)
        except RuntimeError as e:
            if "exact address" not in str(e):
                raise
        self.note("at", slot, size, stream.cuda_stream, addr, slot in self.tensors, capturing)

    def pick(self):
        return self.random.choice(list(self.tensors)) if self.tensors else None

    def free(self):
        slot = self.pick()
        # PyTorch remembers streams named during a capture by the address of its record of
        # the block. It forgets them only if the block is freed during a capture. Else
        # another block may inherit them, by chance.
        if slot is None or (slot in self.named_in_capture and not self.captured):
            return
        # The order of those that have to wait for a capture's end is
        # chance too: few, so that it can be found.
        if self.captured and slot in self.used_elsewhere:
            if self.waiting == 4:
                return
            self.waiting += 1
        capturing = self.on_stream(self.some_stream())
        del self.tensors[slot]
        self.note("free", slot, capturing)

    def record_stream(self):
        slot = self.pick()
        if slot is None:
            return
        stream = self.some_stream()
        capturing = self.on_stream(stream)
        self.tensors[slot][0].record_stream(stream)
        if stream != self.tensors[slot][1]:
            self.used_elsewhere.add(slot)
        if capturing:
            self.named_in_capture.add(slot)
        self.note("use", slot, stream.cuda_stream, capturing)

    def empty_cache(self):
        self.torch.cuda.empty_cache()
        self.note("empty")

    def wait(self):
        self.torch.cuda.synchronize()
        self.note("wait")

    def leave(self, pool_id):
        """Frees what lives in a pool that is about to go.

        With expandable segments PyTorch 2.15 miscounts a pool's segments. It may
        delete a pool in which blocks are still alive, and crashes at the free of the
        last one. Says no if something must live on.
        """
        if not self.expandable:
            return True
        segments = self.torch.cuda.memory_snapshot(pool_id, include_traces=False)
        there = {b["address"] for s in segments for b in s["blocks"] if b["state"] != "inactive"}
        slots = [slot for slot, (tensor, _) in self.tensors.items() if tensor.data_ptr() in there]
        if self.named_in_capture.intersection(slots):
            return False
        for slot in slots:
            capturing = self.on_stream(self.streams[0])
            del self.tensors[slot]
            self.note("free", slot, capturing)
        return True

    def pool(self):
        cuda, c = self.torch.cuda, self.torch._C
        r = self.random.random()
        idle = [p for p in self.pools if p.id not in self.routes]
        if r < 0.25 and len(self.pools) < 5:
            on_oom, no_split = self.random.random() < 0.3, self.random.random() < 0.3
            pool = cuda.MemPool(use_on_oom=on_oom, no_split=no_split)
            self.pools.append(pool)
            self.note("pool", pool.id, on_oom, no_split)
        elif r < 0.55 and idle:
            pool = self.random.choice(idle)
            c._cuda_beginAllocateCurrentThreadToPool(0, pool.id)
            self.routes.append(pool.id)
            self.note("begin", pool.id)
        elif r < 0.9 and self.routes:
            self.end_route()
        elif idle:
            pool = self.random.choice(idle)
            pool_id = pool.id
            if self.leave(pool_id):
                self.pools.remove(pool)
                del pool, idle
                self.note("drop", pool_id)

    def end_route(self):
        pool_id = self.random.choice(self.routes)
        self.torch._C._cuda_endAllocateToPool(0, pool_id)
        self.torch._C._cuda_releasePool(0, pool_id)
        self.routes.remove(pool_id)
        self.note("end", pool_id)

    def capture(self):
        if self.captured:
            return self.end_capture()
        if self.graphs and self.random.random() < 0.4:
            graph, handle = self.random.choice(self.graphs)
            others = [other for other in self.graphs if other[0] is not graph]
            if handle in [other for _, other in others] or self.leave(handle):
                self.graphs = others
                graph.reset()
                self.note("release", handle)
            return None
        if len(self.graphs) > 4:
            return None
        graph = self.torch.cuda.CUDAGraph()
        handle = self.torch.cuda.graph_pool_handle()
        if self.graphs and self.random.random() < 0.4:
            handle = self.random.choice(self.graphs)[1]
        self.on_stream(self.capture_stream)
        before = self.torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.capture_begin(pool=handle, capture_error_mode="relaxed")
        hidden = self.torch.cuda.memory_stats()["allocation.all.allocated"] - before
        streams = [self.capture_stream]
        if self.random.random() < 0.6:
            fork = self.random.choice(self.streams[1:])
            fork.wait_stream(self.capture_stream)
            streams.append(fork)
        self.captured = (graph, handle, streams)
        self.waiting = 0
        return self.note("capture", handle, [s.cuda_stream for s in streams], hidden)

    def end_capture(self):
        graph, handle, streams = self.captured
        self.torch.cuda.set_stream(self.capture_stream)
        for fork in streams[1:]:
            self.capture_stream.wait_stream(fork)
        graph.capture_end()
        self.captured = None
        self.graphs.append((graph, handle))
        self.note("captured", handle)

    def settings(self):
        conf = self.random.choice(SETTINGS)
        self.torch._C._accelerator_setAllocatorSettings(conf)
        self.note("settings", conf)

    def fraction(self):
        fraction = self.random.choice([0.3, 0.5, 0.75, 1.0])
        self.torch.cuda.set_per_process_memory_fraction(fraction)
        self.note("fraction", fraction)

    def step(self):
        r = self.random.random()
        live = len(self.tensors)
        if r < 0.002 and not self.captured:
            self.empty_cache()
        elif r < 0.01 and not self.captured:
            self.wait()
        elif r < 0.03 and "streams" in self.features:
            for _ in range(self.random.randint(1, 4)):
                self.record_stream()
        elif r < 0.045 and "pools" in self.features and not self.captured:
            self.pool()
        elif r < 0.052 and "captures" in self.features and not self.routes:
            self.capture()
        elif r < 0.053 and "switches" in self.features:
            self.settings()
        elif r < 0.12 and "exact" in self.features:
            self.allocate_at()
        elif r < 0.0535 and "fractions" in self.features:
            self.fraction()
        elif self.random.random() < 0.5 + self.weight * (0.1 if live < 250 else -0.1):
            self.allocate()
        else:
            self.free()

    def finish(self):
        if self.captured:
            self.end_capture()
        while self.routes:
            self.end_route()
        self.torch.cuda.set_stream(self.streams[0])


def main(name, seed, count, path):
    import torch

    warnings.simplefilter("ignore")
    gc.disable()
    configuration, lazy, features = PROGRAMS[name]
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    program = Program(torch, f"{name}-{seed}", configuration, features)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1 << 40)
    while len(program.operations) < count:
        program.step()
    program.finish()
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    keep = ["action", "addr", "size", "stream", "pool_id"]
    events = [
        [e["action"], e.get("addr", e.get("device_free")), *(e[k] for k in keep[2:]), e.get("internal_metadata")] for e in snapshot["device_traces"][0]
    ]
    segments = [
        [s["address"], s["total_size"], s["stream"], s["segment_type"], s["is_expandable"], s["segment_pool_id"]]
        + [[[b["address"], b["size"], b["requested_size"], b["state"]] for b in s["blocks"]]]
        for s in snapshot["segments"]
    ]
    every = [*program.streams, program.capture_stream]
    result = {
        "name": name,
        "seed": seed,
        "torch": torch.__version__,
        "conf": configuration,
        "lazy": lazy,
        "total": total,
        "free": free,
        # What PyTorch's hash tables place a stream by.
        "hashes": [[s.cuda_stream, 1 << 56 | s.stream_id] for s in every],
        "operations": program.operations,
        "events": events,
        "stats": stats,
        "segments": segments,
        "settings": snapshot["allocator_settings"],
    }
    with open(path, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
