"""Scaled dot-product attention, forward and backward, on each backend that the card offers."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
ran = []
for backend in (
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
):
    for causal in (False, True):
        q, k, v = (
            torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.float16, requires_grad=True)
            for _ in range(3)
        )
        try:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        except RuntimeError as error:  # the card does not have this kernel
            print(backend.name, "refused:", str(error).splitlines()[0])
            continue
        y.backward(torch.ones_like(y))
        ran.append(backend.name)
mask = torch.zeros(256, 256, device="cuda", dtype=torch.float16)
masked = F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), attn_mask=mask)
assert "MATH" in ran and "EFFICIENT_ATTENTION" in ran, ran
print("ran", ran)
