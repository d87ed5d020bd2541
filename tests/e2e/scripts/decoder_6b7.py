"""One training step of a 6.7-billion-parameter decoder in bfloat16 with fused AdamW: does it fit on 80 GB?

Blocks are checkpointed. Prints one JSON object: parameters, peak bytes, and this process's peak host memory.
"""

import json
import resource

import torch
from models import GPT, lm_loss, token_batch
from torch.utils.checkpoint import checkpoint

VOCAB, CONTEXT, LAYERS, WIDTH = 50257, 2048, 32, 4096

torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    net = GPT(VOCAB, CONTEXT, LAYERS, WIDTH, heads=32)
net = net.to_empty(device="cuda")
net.head.weight = net.tokens.weight
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
ids, targets = token_batch(VOCAB, 1, CONTEXT)
x = net.tokens(ids) + net.positions.weight
for block in net.blocks:
    x = checkpoint(block, x, use_reentrant=False)
loss = lm_loss(net.head(net.norm(x)), targets)
loss.backward()
optimizer.step()
torch.cuda.synchronize()
print(
    json.dumps(
        {
            "parameters": sum(p.numel() for p in net.parameters()),
            "expected_parameters": GPT.parameter_count(VOCAB, CONTEXT, LAYERS, WIDTH),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "host_peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        }
    )
)
