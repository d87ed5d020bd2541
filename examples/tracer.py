"""The tracer: what each phase, module and operator takes, and what is kept
for the backward pass."""

import json
import sys

import memtrace
import torch
from model import Transformer, batch

model = Transformer().cuda()
optimizer = torch.optim.AdamW(model.parameters())

with memtrace.Tracer(model, optimizer, saved_tensors=True) as tracer:
    for _ in range(2):
        with tracer.track_phase("forward"):
            loss = model(batch()).square().mean()
        with tracer.track_phase("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

report = tracer.report()
report.print(top=5)
backward = report.phases["backward"]["cuda:0"]
print(f"backward: peak {backward.max} bytes, of which {report.devices['cuda:0'].categories['Activation']} are activations")
if len(sys.argv) > 1:
    with open(sys.argv[1], "w") as file:
        json.dump(report.to_dict(), file)
