"""A seeded random program on three streams: 100,000 trace entries and more from one loop.

Sizes from 1 byte to 128 MiB, record_stream, synchronize and empty_cache; the live set is bounded, so that the
program fits any card. Arguments: the seed and the number of operations.
"""

import random
import sys

import torch

seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
operations = int(sys.argv[2]) if len(sys.argv) > 2 else 70_000
LIMIT = 6 << 30

rng = random.Random(seed)
streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
live, live_bytes = [], 0


def size():
    """Mostly small, sometimes large, uniform in the exponent."""
    return int(2 ** rng.uniform(0, 27)) if rng.random() < 0.3 else int(2 ** rng.uniform(0, 18))


for _ in range(operations):
    choice = rng.random()
    if choice < 0.52 or not live:
        n = size()
        while live and (live_bytes + n > LIMIT or len(live) > 2000):
            live_bytes -= live.pop(rng.randrange(len(live))).numel()
        with torch.cuda.stream(rng.choice(streams)):
            live.append(torch.empty(n, dtype=torch.uint8, device="cuda"))
        live_bytes += n
    elif choice < 0.93:
        live_bytes -= live.pop(rng.randrange(len(live))).numel()
    elif choice < 0.995:
        rng.choice(live).record_stream(rng.choice(streams))
    elif choice < 0.9990:
        torch.cuda.synchronize()
    else:
        torch.cuda.empty_cache()
print("live", len(live), "blocks of", live_bytes, "bytes")
