"""Private pools: MemPools of the program's own on two streams, nested, emptied; a graph's pool, shared; the default one between."""

import torch

torch.manual_seed(0)
first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
side = torch.cuda.Stream()
keep = []
for step in range(12):
    outside = torch.empty(3_000 + 512 * step, device="cuda")
    with torch.cuda.use_mem_pool(first):
        a = torch.empty(100_000 + 4_096 * step, device="cuda")
        with torch.cuda.use_mem_pool(second):
            b = torch.empty(400_000, device="cuda")
            small = torch.empty(64, device="cuda")
        c = a * 2
        with torch.cuda.stream(side):
            d = torch.empty(2_000_000, device="cuda")
    keep.append((outside, b) if step % 2 else (c, d))
    del a, b, c, d, small, outside
del keep[::3]
torch.cuda.synchronize()

x = torch.ones(1_000, device="cuda")
graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2 + 1
with torch.cuda.graph(other, pool=graph.pool()):
    z = y + torch.ones(300_000, device="cuda").sum()
graph.replay()
other.replay()
torch.cuda.synchronize()
del y, z, graph, other
torch.cuda.empty_cache()
after = torch.empty(5_000_000, device="cuda")
try:
    with torch.cuda.use_mem_pool(second):
        torch.empty(1 << 42, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("pools done")
