"""A training run to be interrupted: `python training.py PATH STEPS LEVEL [--die-at STEP … --rank R] [--x64]`.

It goes on from the last checkpoint in PATH, saves every 5 steps and after the last, and then the root prints the
parameters and a digest of their bits. The batch of a step is the same on any number of devices.
"""

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist

BATCH = 24


def init(dtype: Any) -> dict[str, Any]:
    """Leaves that devices split evenly, with padding, or not at all; a PRNG key that is state."""
    rng = np.random.default_rng(0)
    shapes = {"in": (7, 33), "hidden": (33, 16), "out": (16, 3), "bias": (16,), "scale": ()}
    params = {name: np.asarray(rng.normal(size=shape) * 0.3, dtype) for name, shape in shapes.items()}
    return {"params": params, "key": jax.random.key(3), "step": 0, "seen": np.zeros((), dtype)}


def run(path: str, steps: int, level: Any, die_at: Sequence[int] = (), rank: int = 0) -> dict[str, Any]:
    """Train until `steps` and return the parameters. The rank dies at one step of each start."""
    ctx, start = jaxdist.get_context(), int(os.environ.get("JAXDIST_RESTARTS", "0"))
    dtype = np.float64 if jax.config.read("jax_enable_x64") else np.float32
    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), level)

    def loss_fn(p: Any, key: Any, x: Any) -> Any:
        hidden = jnp.tanh(jnp.tanh(x @ p["in"]) @ p["hidden"] + p["bias"]) * (1 + p["scale"])
        noise = 1 + 0.1 * jax.random.normal(key, hidden.shape[1:], hidden.dtype)
        return jnp.mean((hidden * noise @ p["out"] - jnp.sin(x[:, :3])) ** 2)

    @jaxdist.data_parallel
    def train(params: Any, opt_state: Any, key: Any, x: Any) -> Any:
        key, now = jax.random.split(key)
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, now, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    state = init(dtype)
    state["opt_state"] = tx.init(state["params"])
    if jaxdist.latest_step(path) is not None:
        state = jaxdist.restore(path, state)
    while state["step"] < steps:
        x = np.random.default_rng(state["step"]).normal(size=(BATCH, 7)).astype(dtype)
        out = train(state["params"], state["opt_state"], state["key"], x[ctx.rows(BATCH)])
        state = dict(zip(("params", "opt_state", "key"), out, strict=True)) | {"step": state["step"] + 1}
        state["seen"] = np.asarray(state["step"] * BATCH, dtype)
        if state["step"] % 5 == 0 or state["step"] == steps:
            jaxdist.save(path, state, state["step"])
        if ([state["step"]], ctx.rank) == (list(die_at[start : start + 1]), rank):
            os.kill(os.getpid(), signal.SIGKILL)
    params = {k: np.asarray(v) for k, v in jaxdist.unshard(state["params"]).items()}
    bits = hashlib.sha256(b"".join(params[k].tobytes() for k in sorted(params))).hexdigest()
    return {"bits": bits, "params": {k: v.tolist() for k, v in params.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("steps", type=int)
    parser.add_argument("level", type=int)
    parser.add_argument("--die-at", type=int, nargs="*", default=[])
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--x64", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.x64)
    ctx = jaxdist.init()
    found = run(args.path, args.steps, args.level, args.die_at, args.rank)
    if ctx.is_root:
        print("FOUND " + json.dumps(found), flush=True)
