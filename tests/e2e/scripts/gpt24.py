"""The hand check: what a 24-layer GPT-like model must hold after one step, worked out on paper.

With V tokens, T positions, L layers of width d and a tied head the model has

    P = V·d + T·d + L·(12·d² + 13·d) + 2·d

parameters (a block: fused qkv 3d²+3d, output d²+d, up 4d²+4d, down 4d²+d, two norms 4d). After a step in
float32 with AdamW, before the gradients are cleared, 4·P bytes each of parameters, gradients, first and second
moments are alive; AdamW's step counters live on the host. Beside them only the token ids and the loss. A snapshot is taken at
that point; one JSON object is printed for the test to compare.
"""

import json

import torch
from here import snapshot_here
from models import GPT, lm_loss, token_batch

VOCAB, CONTEXT, LAYERS, WIDTH, BATCH = 50257, 256, 24, 1024, 2

torch.manual_seed(0)
net = GPT(VOCAB, CONTEXT, LAYERS, WIDTH, heads=16).cuda()
optimizer = torch.optim.AdamW(net.parameters())
ids, targets = token_batch(VOCAB, BATCH, CONTEXT)
loss = lm_loss(net(ids), targets)
loss.backward()
optimizer.step()
torch.cuda.synchronize()
snapshot_here()

parameters = GPT.parameter_count(VOCAB, CONTEXT, LAYERS, WIDTH)
print(
    json.dumps(
        {
            "parameters": parameters,
            "torch": [int(n) for n in torch.__version__.split(".")[:2]],
            "requested_bytes": torch.cuda.memory_stats()["requested_bytes.all.current"],
        }
    )
)
