"""JAX: a training step and a matrix product over two devices."""

import jax._src.hardware_utils
import numpy as np

# JAX looks for a device file before it asks CUDA.
jax._src.hardware_utils.has_visible_nvidia_gpu = lambda: True

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


@jax.jit
def step(weights, x):
    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights, x), strict=True)]


weights = [jnp.ones((1024, 1024)) for _ in range(8)]
x = jnp.ones((4096, 1024))
for _ in range(3):
    weights = step(weights, x)
mesh = Mesh(np.array(jax.devices()), ("x",))
halves = jax.device_put(jnp.ones((8192, 1024)), NamedSharding(mesh, PartitionSpec("x")))
whole = jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh, PartitionSpec()))
total = jax.jit(lambda a, b: (a @ b).sum(0))(halves, whole)
print(len(jax.devices()), weights[0].shape, total.shape)
