"""A training run to be interrupted: `python training.py PATH STEPS LEVEL [--die-at STEP …] [--rank R]`.

It goes on from the last checkpoint in PATH, saves every 5 steps and after the last, and then the root prints the
parameters' sum of squares and a digest of their bits. The batch of a step is the same on any number of devices.
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


def batch(step: int, dtype: Any) -> dict[str, np.ndarray]:
    """What this process passes of a step's batch."""
    own, parts = jaxdist.get_context().parts()
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, 7)).astype(dtype)
    whole = {"x": x, "y": np.sin(x[:, :3])}
    return {name: np.concatenate([np.split(x, parts)[k] for k in own]) for name, x in whole.items()}


def make_step(level: int) -> tuple[Any, Any]:
    """The optimizer, and a decorated step: (params, optimizer's state, key, batch) -> the same and the loss."""
    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), level)  # type: ignore[arg-type]

    def loss_fn(p: Any, key: Any, batch: Any) -> Any:
        hidden = jnp.tanh(jnp.tanh(batch["x"] @ p["in"]) @ p["hidden"] + p["bias"]) * (1 + p["scale"])
        noise = 1 + 0.1 * jax.random.normal(key, hidden.shape[1:], hidden.dtype)
        return jnp.mean((hidden * noise @ p["out"] - batch["y"]) ** 2)

    @jaxdist.data_parallel
    def train(params: Any, opt_state: Any, key: Any, batch: Any) -> Any:
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, now, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, loss

    return tx, train


def run(path: str, steps: int, level: int, die_at: Sequence[int] = (), rank: int | None = None) -> dict[str, Any]:
    """Train until `steps`; what the parameters have become. The rank dies at one step of each start."""
    ctx, start = jaxdist.get_context(), int(os.environ.get("JAXDIST_RESTARTS", "0"))
    dtype = np.float64 if jax.config.read("jax_enable_x64") else np.float32
    tx, train = make_step(level)
    state = init(dtype)
    state["opt_state"] = tx.init(state["params"])
    if jaxdist.latest_step(path) is not None:
        state = jaxdist.restore(path, state)
    while state["step"] < steps:
        out = train(state["params"], state["opt_state"], state["key"], batch(state["step"], dtype))
        state = dict(zip(("params", "opt_state", "key", "loss"), out, strict=True)) | {"step": state["step"] + 1}
        state["seen"] = np.asarray(state["step"] * BATCH, dtype)
        state.pop("loss")
        if state["step"] % 5 == 0 or state["step"] == steps:
            jaxdist.save(path, state, state["step"])
        if [state["step"]] == list(die_at[start : start + 1]) and rank in (None, ctx.rank):
            os.kill(os.getpid(), signal.SIGKILL)
    params = {k: np.asarray(v) for k, v in jaxdist.unshard(state["params"]).items()}
    bits = hashlib.sha256(b"".join(params[k].tobytes() for k in sorted(params))).hexdigest()
    return {"bits": bits, "params": {k: v.tolist() for k, v in params.items()}, "devices": ctx.num_devices}


def main() -> None:
    """As a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("steps", type=int)
    parser.add_argument("level", type=int)
    parser.add_argument("--die-at", type=int, nargs="*", default=[])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--x64", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.x64)
    ctx = jaxdist.init()
    found = run(args.path, args.steps, args.level, args.die_at, args.rank)
    if ctx.is_root:
        print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
