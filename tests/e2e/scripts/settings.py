"""Prints the settings that PyTorch says are in force after the program has set some."""

import json
import sys

import torch

at_start = torch.empty(1 << 20, device="cuda")
for conf in sys.argv[1:]:
    torch.cuda.memory._set_allocator_settings(conf)
print(json.dumps(torch.cuda.memory._snapshot()["allocator_settings"]))
