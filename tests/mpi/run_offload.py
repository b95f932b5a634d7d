"""State in the host's memory, in one MPI job: `python run_offload.py COMMUNICATOR FOLDER`; JSON from the root.

It goes there from shards on the devices, and back by way of a checkpoint. CPU devices say that their memory is apart.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist
from jaxdist.machine import Machine
from jaxdist.step import program_cache


def step_of(tx: Any) -> Any:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] * p["c"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    Machine.has_own_memory = True  # type: ignore[method-assign]
    program_cache.check_host_memory = lambda mesh: None
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(16, 24)), "b": rng.normal(size=(24, 9)), "c": rng.normal(size=9)}
    x = rng.normal(size=(12, 16))
    n = len(x) // ctx.size
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    want: Any = jax.tree.map(jnp.asarray, params)
    want = want, tx.init(want)
    for _ in range(5):
        *want, _ = jax.jit(step_of(tx))(*want, x)
    state: Any = jax.tree.map(jnp.asarray, params)
    state = state, tx.init(state)
    kinds = []
    for i, (level, offload) in enumerate([(2, False), (1, True), (3, True), (2, True), (1, False)]):
        step = jaxdist.data_parallel(step_of(jaxdist.zero(tx, level, offload=offload)))  # type: ignore[arg-type]
        *state, _ = step(*state, x[ctx.rank * n : (ctx.rank + 1) * n])
        kinds.append(sorted({leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}))
        jaxdist.check_sync(state)
        jaxdist.save(sys.argv[2], state, step=i, wait=False)
        state = jaxdist.restore(sys.argv[2], state)
    gaps = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(jaxdist.unshard(state)), strict=True)
    ]
    if ctx.is_root:
        print("REPORT " + json.dumps({"gap": max(gaps), "kinds": kinds}), flush=True)


if __name__ == "__main__":
    main()
