"""A short training that logs, and prints."""

import jax.numpy as jnp
import numpy as np

import jaxdist

ctx = jaxdist.init()


@jaxdist.data_parallel
def step(w, batch):
    loss = jnp.mean((batch @ w) ** 2)
    return w - 0.1, loss


w = jnp.ones(2)
with jaxdist.run_log("run", total=3, examples_per_step=8) as log:
    for i in (1, 2, 3):
        w, loss = step(w, np.full((8 // ctx.size, 2), ctx.rank + 1.0))
        log(i, loss=loss)
        if ctx.is_root:
            print("printed", i, flush=True)
