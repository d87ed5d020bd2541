"""Numba: a kernel of its own."""

import numpy as np
from numba import cuda


@cuda.jit
def add_one(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += 1


on_device = cuda.to_device(np.zeros(1 << 20, np.float32))
add_one[1024, 1024](on_device)
print(on_device.copy_to_host().shape)
