"""Optimizers in their three forms: one parameter at a time, foreach, and fused."""

import torch
import torch.nn as nn

torch.manual_seed(0)
FORMS = [
    (torch.optim.SGD, {"momentum": 0.9}, True),
    (torch.optim.Adam, {}, True),
    (torch.optim.AdamW, {"amsgrad": True}, True),
    (torch.optim.Adagrad, {}, False),
    (torch.optim.RMSprop, {"momentum": 0.9}, False),
    (torch.optim.Adadelta, {}, False),
    (torch.optim.NAdam, {}, False),
]
ran = 0
for kind, options, has_fused in FORMS:
    for form in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        if "fused" in form and not has_fused:
            continue
        net = nn.Sequential(*(nn.Linear(200 + i, 201 + i) for i in range(6))).cuda()
        optimizer = kind(net.parameters(), lr=1e-3, **options, **form)
        for step in range(3):
            net(torch.randn(16, 200, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ran += 1
print("ran", ran, "optimizers")
