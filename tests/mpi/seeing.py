"""Two ranks look at themselves: JAXDIST_LOG=comm, `run_log` that must not wait, `profile`."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxdist
from jaxdist.observe.metrics import read_metrics

ctx = jaxdist.get_context()


@jaxdist.data_parallel
def step(w, batch):
    def loss(w):
        x = batch
        for layer in w:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(w)
    return [a - 0.1 * g for a, g in zip(w, grads, strict=True)], {"loss": value}


def main(path: str) -> None:
    folder = Path(path)
    w = [jnp.ones((64, 64), jnp.float32) / 64, jnp.ones((64, 8), jnp.float32) / 64]
    batch = jnp.ones((4, 64), jnp.float32) * (ctx.rank + 1)
    logged = folder / "logged"
    with jaxdist.run_log(folder / "run", total=4, examples_per_step=8) as log:
        w, aux = step(w, batch)
        log(0, **aux)
        jax.block_until_ready((w, aux))
        # The root's second call can't end before rank 1 makes its own, which it does when the root is done with
        # logging: if `log` waited for the loss, this would be a deadlock. (A barrier would be another call.)
        while not ctx.is_root and not logged.exists():
            time.sleep(0.01)
        w, aux = step(w, batch)
        if ctx.is_root:
            log(1, **aux)
            written = len(read_metrics(folder / "run"))
            print(f"WRITTEN {written}", flush=True)
            logged.touch()
        else:
            log(1, **aux)
        with jaxdist.profile(folder / "trace"):
            for i in (2, 3):
                w, aux = step(w, batch)
                log(i, **aux)
        jaxdist.allreduce(jnp.ones(10, jnp.float32))

    # What can't be written is an error on every rank, though only one tries (or has no access).
    (folder / "file").touch()
    for what in (jaxdist.run_log, jaxdist.profile):
        try:
            with what(folder / "file" / "run"):
                pass
        except OSError as error:
            print(f"REFUSED {what.__name__} on rank {ctx.rank}: {error}", flush=True)
