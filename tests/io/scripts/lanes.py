"""Trains for ten steps in lanes, logs a hash of each third, saves each fourth: `lanes.py FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness.check import train_step

import jaxdist

ctx = jaxdist.init()
tx = jaxdist.zero(optax.adam(0.01), level=3)
step = jaxdist.data_parallel(train_step(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), tx))
w = np.random.default_rng(0).normal(size=(37, 23)).astype("f")
state: dict[str, Any] = {"w": w, "opt": tx.init(jax.numpy.asarray(w)), "step": 0}
path, (own, parts) = sys.argv[1] + "/checkpoints", ctx.parts()
if jaxdist.latest_step(path) is not None:
    state = jaxdist.restore(path, state)
with jaxdist.run_log(sys.argv[1], hash_every=3) as log:
    for k in range(state["step"], 10):
        x = np.split(np.random.default_rng(k).normal(size=(24, 37)).astype("f"), parts)
        w, opt, loss = step(state["w"], state["opt"], np.concatenate([x[i] for i in own]))
        state = {"w": w, "opt": opt, "step": k + 1}
        log(k, loss=loss, state=state)
        if k % 4 == 3:
            jaxdist.save(path, state, k + 1)
