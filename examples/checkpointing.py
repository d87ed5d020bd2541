"""Gradient checkpointing: less memory for more work, in numbers. What is computed
again belongs to the backward pass."""

import memtrace
from model import Transformer, batch

peaks = []
for checkpointed in (False, True):
    model = Transformer(checkpointed=checkpointed).cuda()
    with memtrace.watch(model), memtrace.peak() as peak:
        model(batch()).square().mean().backward()
    peaks.append(peak.increase)
    print(f"checkpointed {checkpointed}: {peak}")
    del model
assert peaks[1] < peaks[0], peaks
