"""Ranks whose programs differ in one way or another, in a script that saves whatever happens.

Arguments: where to save, and what differs. After the first one the job ends; of several, each is an error on all ranks.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist

FOLDER, *MODES = sys.argv[1:]
ctx = jaxdist.init()
ODD = ctx.rank == 1
SAVES = not {"settings", "kept", "types"} & set(MODES)
"""Of the others some are errors on all ranks: nothing is wrong with a state that is saved then."""
SCALE = 1.0
tx = optax.adam(0.1)


def plain(w: Any, opt: Any, batch: Any) -> Any:
    x, y = batch
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    updates, opt = tx.update(grads, opt, w)
    return optax.apply_updates(w, updates), opt, loss * SCALE


@functools.partial(jaxdist.data_parallel, donate=False)
def scaled(w: Any, opt: Any, batch: Any) -> Any:
    return plain(w, opt, batch)


@jaxdist.data_parallel
def shifted(w: Any, opt: Any, batch: Any) -> Any:
    w, opt, value = plain(w, opt, batch)
    return w, opt, value + ctx.rank  # LINE several


@jaxdist.data_parallel
def later(w: Any, opt: Any, batch: Any) -> Any:
    w, opt, value = plain(w, opt, batch)
    return w, opt, (jnp.exp(value) if ODD and batch[0].shape[0] > 32 * ctx.size else value)  # LINE later


option = jaxdist.data_parallel(plain, bucket_bytes=1000 * ctx.rank)
donation = jaxdist.data_parallel(plain, donate=not ODD)


@jaxdist.data_parallel
def raises(w: Any, opt: Any, batch: Any) -> Any:
    if ODD:
        raise ValueError("of one rank")
    return plain(w, opt, batch)


def data(rows: int = 32) -> Any:
    x = np.random.default_rng(ctx.rank).normal(size=(rows, 4)).astype(np.float32)
    return x, x.sum(1)


def train(step: Any, w: Any, opt: Any, rows: int = 32) -> Any:
    for i in range(2):
        w, opt, value = step(w, opt, data(rows))
        print(f"rank {ctx.rank} {step.__name__} {rows} call {i} returned {float(value):.3f}", flush=True)
    return w, opt


def differ(mode: str) -> None:
    global SCALE
    w = jnp.zeros(4)
    opt = tx.init(w)
    if mode == "later":
        train(later, *train(later, w, opt), rows=48)
    elif mode == "several":
        train(shifted, *train(scaled, w, opt))
    elif mode in ("retraced", "retraced alone"):
        for scale in (1.0, 2.0):
            SCALE = scale
            scaled.clear_cache()  # type: ignore[attr-defined]
            w, opt = train(scaled, w, opt)
        if mode == "retraced" or ODD:
            SCALE = 1.0 + ctx.rank if mode == "retraced" else 7.0
            scaled.clear_cache()  # type: ignore[attr-defined]
        train(scaled, w, opt)
    elif mode == "types":
        w, opt = train(scaled, w, opt)
        train(scaled, w.astype(jnp.bfloat16) if ODD else w, opt)
    elif mode == "types on both":
        w, opt = train(scaled, w, opt)
        train(scaled, w.astype(jnp.bfloat16 if ODD else jnp.float16), opt)
    elif mode == "settings":
        w, opt = train(scaled, w, opt)
        with jax.default_matmul_precision("highest"):
            w, opt = train(scaled, w, opt)
        with jax.default_matmul_precision("highest" if ODD else None):  # type: ignore[arg-type]
            train(scaled, w, opt)
    elif mode == "kept":
        w, opt = train(scaled, w, opt)
        shards = jaxdist.shard(w)
        train(scaled, shards, opt)
        train(scaled, w, opt)
        train(scaled, shards if ODD else w, opt)
    elif mode == "eager":
        jaxdist.allreduce(np.ones(3), op="max" if ODD else "sum")
    else:
        train(globals()[mode], w, opt)


def save(why: str) -> None:
    print(f"rank {ctx.rank} saves {why}", flush=True)
    jaxdist.save(FOLDER, {"w": jnp.ones(4)}, 3)
    print(f"rank {ctx.rank} SAVED {why}", flush=True)


if len(MODES) > 1:
    for mode in MODES:
        try:
            differ(mode)
        except Exception as error:
            print(f"rank {ctx.rank} {mode}: {type(error).__name__}: {error}", flush=True)
    sys.exit()
if SAVES:
    atexit.register(save, "at exit")
try:
    differ(MODES[0])
    save("after")
except BaseException as error:
    print(f"rank {ctx.rank} caught {type(error).__name__}", flush=True)
    if SAVES:
        save("in the handler")
    raise
finally:
    if SAVES:
        save("finally")
