"""Two ranks train under DDP or FSDP2 while a MemTracker looks on; each writes what it says and what is true into a folder."""

import json
import os
import sys

os.environ.update(CUBLAS_WORKSPACE_CONFIG=":0:0", CUBLASLT_WORKSPACE_SIZE="0")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trackers_model import Net

import memtrace

how, folder = sys.argv[1:]
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=device)
torch.manual_seed(0)
model = Net(512, layers=4).cuda()
if how == "ddp":
    model = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True)
else:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(256, 512, device="cuda")
tracker = memtrace.MemTracker()
tracker.track_external(model, optimizer, batch)
said = []


def rounded(tensors):
    """What these take of the allocator; of a sharded one, this rank's part."""
    mine = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in mine if t.is_cuda}
    return sum(-(-n // 512) * 512 for n in storages.values())


def look(when):
    torch.cuda.synchronize()
    # The watchdog of PyTorch's older group holds what a collective worked on until it has seen that it is done: DDP's old buckets.
    group = dist.distributed_c10d._get_default_group()
    if group._get_backend(device).name() == "nccl":
        group._wait_for_pending_works()
    stats = torch.cuda.memory_stats(device)
    now, peak = tracker.get_tracker_snapshot()[device], tracker.get_tracker_snapshot("peak")[device]
    said.append(
        {
            "when": when,
            "now": now,
            "peak": peak,
            "allocated": stats["active_bytes.all.current"],
            "most": stats["active_bytes.all.peak"],
            "Parameter": rounded(model.parameters()),
            "Gradient": rounded(p.grad for p in model.parameters() if p.grad is not None),
            "Optstate": rounded(v for s in optimizer.state.values() for v in s.values()),
        }
    )


torch.cuda.reset_peak_memory_stats()
with tracker:
    look("begin")
    for step in range(2):
        loss = model(batch).square().mean()
        look(f"{step} forward")
        loss.backward()
        del loss
        look(f"{step} backward")
        optimizer.step()
        look(f"{step} step")
        optimizer.zero_grad()
        look(f"{step} zero_grad")
torch.cuda.synchronize()
with open(os.path.join(folder, f"{rank}.json"), "w") as file:
    json.dump(said, file)
dist.destroy_process_group()
