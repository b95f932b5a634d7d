"""Ranks whose programs differ in one way or another, in a script that saves whatever happens.

Arguments: what differs, where to save.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxdist

MODE, FOLDER = sys.argv[1:]
ctx = jaxdist.init()
ODD = ctx.rank == 1
RAISES = MODE in (
    "types",
    "types on both",
    "eager",
    "settings",
    "kept",
    "option",
    "donation",
    "raises",
)  # on all ranks, or it ends: nothing is wrong with a state that is saved
SCALE = 1.0
tx = optax.adam(0.1)


def loss_fn(w: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


def plain(w: Any, opt: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(w, batch)
    updates, opt = tx.update(grads, opt, w)
    return optax.apply_updates(w, updates), opt, loss * SCALE


@jaxdist.data_parallel
def loss(w: Any, opt: Any, batch: Any) -> Any:
    w, opt, value = plain(w, opt, batch)
    return w, opt, value + ctx.rank  # LINE loss


@jaxdist.data_parallel
def inside(w: Any, opt: Any, batch: Any) -> Any:
    grads = jax.grad(loss_fn)(jnp.tanh(w) if ODD else jnp.sin(w), batch)  # LINE inside
    return w - grads, opt, jnp.sum(w)


@jaxdist.data_parallel
def after(w: Any, opt: Any, batch: Any) -> Any:
    w, opt, value = plain(w, opt, batch)
    return (jnp.cos(w) if ODD else w), opt, value  # LINE after


@jaxdist.data_parallel
def constant(w: Any, opt: Any, batch: Any) -> Any:
    return w - jax.grad(loss_fn)(w, batch) * np.full(4, ctx.rank, np.float32), opt, jnp.sum(w)  # LINE constant


@jaxdist.data_parallel
def later(w: Any, opt: Any, batch: Any) -> Any:
    w, opt, value = plain(w, opt, batch)
    return w, opt, (jnp.exp(value) if ODD and batch[0].shape[0] > 32 * ctx.size else value)  # LINE later


@jaxdist.data_parallel
def library(w: Any, opt: Any, batch: Any) -> Any:
    grads = jax.grad(loss_fn)(w, batch)
    updates, _ = optax.scale(0.1 + ctx.rank).update(grads, optax.ScaleState())  # LINE library
    return optax.apply_updates(w, updates), opt, jnp.sum(w)


@jaxdist.data_parallel
def on_each(w: Any, opt: Any, batch: Any) -> Any:
    total = lax.pmax if ODD else lax.psum
    f = jaxdist.per_device(lambda x: total(x.sum(), "data"), in_specs=jax.P("data"), out_specs=jax.P())  # LINE on_each
    return w - f(batch[0]), opt, jnp.sum(w)


@jaxdist.data_parallel
def in_a_library(w: Any, opt: Any, batch: Any) -> Any:
    grads = jax.grad(loss_fn)(jnp.roll(w, 1 + ctx.rank), batch)  # LINE in_a_library
    return w - grads, opt, jnp.sum(w)


@jaxdist.data_parallel
def microbatches(w: Any, opt: Any, batch: Any) -> Any:
    grads = jaxdist.grad(loss_fn, microbatches=2 + 2 * ctx.rank)(w, batch)  # LINE microbatches
    return w - grads, opt, jnp.sum(w)


@jaxdist.data_parallel
def level(w: Any, opt: Any, batch: Any) -> Any:
    grads = jax.grad(loss_fn)(w, batch)
    updates, opt = jaxdist.zero(tx, 3 if ODD else 1).update(grads, opt, w)  # LINE level
    return optax.apply_updates(w, updates), opt, jnp.sum(w)


@functools.partial(jaxdist.data_parallel, bucket_bytes=1000 * ctx.rank)
def option(w: Any, opt: Any, batch: Any) -> Any:
    return plain(w, opt, batch)


@functools.partial(jaxdist.data_parallel, donate=not ODD)
def donation(w: Any, opt: Any, batch: Any) -> Any:
    return plain(w, opt, batch)


@functools.partial(jaxdist.data_parallel, bucket_bytes=0)
def order(w: Any, opt: Any, batch: Any) -> Any:
    x, y = batch
    sums = {name: jnp.sum(jnp.sin(v * 2.0)[:, None] if v.ndim == 1 else v) for name, v in both(x, y)}  # LINE order
    return w - sums["x"] + 2 * sums["y"], opt, jnp.sum(w)


def both(x: Any, y: Any) -> Any:
    pairs = [("x", x), ("y", y)]
    return pairs[::-1] if ODD else pairs


@jaxdist.data_parallel
def raises(w: Any, opt: Any, batch: Any) -> Any:
    if ODD:
        raise ValueError("of one rank")
    return plain(w, opt, batch)


@functools.partial(jaxdist.data_parallel, donate=False)
def scaled(w: Any, opt: Any, batch: Any) -> Any:
    return plain(w, opt, batch)  # LINE scaled


def data(rows: int = 32) -> Any:
    rng = np.random.default_rng(ctx.rank)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return x, x.sum(1)


def train(step: Any, w: Any, opt: Any, times: int = 2, rows: int = 32) -> Any:
    for i in range(times):
        w, opt, value = step(w, opt, data(rows))
        print(f"rank {ctx.rank} {step.__name__} {rows} call {i} returned {float(value):.3f}", flush=True)
    return w, opt


def body() -> Any:
    global SCALE
    w = jnp.zeros(4)
    opt = tx.init(w)
    if MODE == "later":
        w, opt = train(later, w, opt)
        train(later, w, opt, rows=48)
    elif MODE == "several":
        w, opt = train(scaled, w, opt)
        train(loss, w, opt)
    elif MODE == "extra":
        if not ODD:
            train(after, w, opt, 1)
        train(scaled, w, opt)
    elif MODE in ("retraced", "retraced alone"):
        for scale in (1.0, 2.0):
            SCALE = scale
            scaled.clear_cache()  # type: ignore[attr-defined]
            w, opt = train(scaled, w, opt)
        if MODE == "retraced" or ODD:
            SCALE = 1.0 + ctx.rank if MODE == "retraced" else 7.0
            scaled.clear_cache()  # type: ignore[attr-defined]
        train(scaled, w, opt)
    elif MODE == "types":
        w, opt = train(scaled, w, opt)
        train(scaled, w.astype(jnp.bfloat16) if ODD else w, opt)
    elif MODE == "types on both":
        w, opt = train(scaled, w, opt)
        train(scaled, w.astype(jnp.bfloat16 if ODD else jnp.float16), opt)
    elif MODE == "settings":
        alike, other = contextlib.nullcontext(), jax.default_matmul_precision("highest")
        w, opt = train(scaled, w, opt)
        with other:
            w, opt = train(scaled, w, opt)
        with jax.default_matmul_precision("highest") if ODD else alike:
            train(scaled, w, opt)
    elif MODE == "kept":
        w, opt = train(scaled, w, opt)
        shards = jaxdist.shard(w)
        train(scaled, shards, opt)
        train(scaled, w, opt)
        train(scaled, shards if ODD else w, opt)
    elif MODE == "eager":
        jaxdist.allreduce(np.ones(3), op="max" if ODD else "sum")
    else:
        train(globals()[MODE], w, opt)
    return w


def save(why: str) -> None:
    print(f"rank {ctx.rank} saves {why}", flush=True)
    jaxdist.save(FOLDER, {"w": jnp.ones(4)}, 3)
    print(f"rank {ctx.rank} SAVED {why}", flush=True)


if not RAISES:
    atexit.register(save, "at exit")
try:
    body()
    save("after")
except BaseException as error:
    print(f"rank {ctx.rank} caught {type(error).__name__}", flush=True)
    if not RAISES:
        save("in the handler")
    raise
finally:
    if not RAISES:
        save("finally")
