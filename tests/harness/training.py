"""A training run to be interrupted: `python training.py PATH STEPS LEVEL [--die-at STEP … --rank R] [--x64]`.

It goes on from the last checkpoint in PATH, saves every 5 steps and after the last, and then the root prints the
parameters, a digest of their bits, and the losses of this run's steps. The batch of a step is the same on any number of
devices, which few numbers divide: of an epoch of five steps the last has 13 examples.
"""

import argparse
import hashlib
import itertools
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

BATCH, EXAMPLES = 22, 101


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
        return jnp.mean((hidden * noise @ p["out"] - jnp.sin(x[:, :3])) ** 2), len(x)

    @jaxdist.data_parallel
    def train(params: Any, opt_state: Any, key: Any, x: Any) -> Any:
        key, now = jax.random.split(key)
        aux, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, now, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), aux

    state = init(dtype)
    state["opt_state"] = tx.init(state["params"])
    x = np.random.default_rng(1).normal(size=(EXAMPLES, 7)).astype(dtype)
    batches, losses = jaxdist.loader(x, BATCH, seed=5, tail="keep"), list[Any]()
    state["data"] = batches.get_state()
    if jaxdist.latest_step(path) is not None:
        state = jaxdist.restore(path, state)
        batches.set_state(state["data"])
    for x in itertools.chain.from_iterable(itertools.repeat(batches)) if state["step"] < steps else ():
        out, (loss, rows) = train(state["params"], state["opt_state"], state["key"], x)
        losses.append(loss)
        seen, data = np.asarray(state["seen"] + rows, dtype), batches.get_state()
        state = dict(zip(("params", "opt_state", "key"), out, strict=True)) | {"step": state["step"] + 1}
        state |= {"seen": seen, "data": data}
        if state["step"] % 5 == 0 or state["step"] == steps:
            jaxdist.save(path, state, state["step"])
        if ([state["step"]], ctx.rank) == (list(die_at[start : start + 1]), rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if state["step"] == steps:
            break
    params = {k: np.asarray(v) for k, v in jaxdist.unshard(state["params"]).items()}
    bits = hashlib.sha256(b"".join(params[k].tobytes() for k in sorted(params))).hexdigest()
    return {"bits": bits, "params": {k: v.tolist() for k, v in params.items()}, "losses": [*map(float, losses)]}


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
