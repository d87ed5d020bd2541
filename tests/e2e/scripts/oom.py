"""Out of memory, caught and retried: at a set fraction of the card, and at its real capacity."""

import torch

GIB = 1 << 30


def fill(block, limit=10_000):
    """Allocates blocks until the card refuses; the blocks that were granted."""
    granted = []
    try:
        while len(granted) < limit:
            granted.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        print("refused after", len(granted), "blocks of", block)
        return granted
    raise SystemExit("the card never refused")


total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
held = fill(200 << 20)
del held[::2]
retried = torch.empty(400 << 20, dtype=torch.uint8, device="cuda")  # granted once the cache is flushed
del held, retried
torch.cuda.set_per_process_memory_fraction(1.0)

try:
    torch.empty(total * 4, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    print("refused at once:", type(error).__name__)
held = fill(total // 16)
del held[0]
retried = torch.empty(total // 24, dtype=torch.uint8, device="cuda")
crumbs = fill(64 << 20)
del held, crumbs
torch.cuda.empty_cache()
after = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
print("went on after", torch.cuda.memory_stats()["num_ooms"], "refusals")
