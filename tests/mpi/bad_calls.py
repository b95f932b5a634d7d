"""One rank calls a step differently, of 2 or more."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.control import watchdog

MODE = ""
ctx = jaxdist.get_context()
ODD = ctx.rank == 1
LATE = float(os.environ.get("LATE", "1.5"))  # seconds
DIFFERENT = False  # whether steps are traced differently now


@jaxdist.data_parallel
def step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"]) ** 2))(state)
    if MODE == "slow":
        loss = jax.pure_callback(slowly, jax.ShapeDtypeStruct((), np.float32), loss)
    if DIFFERENT:
        loss = jnp.max(batch["x"] @ state["w"])
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


lower: Any = step.lower  # type: ignore[attr-defined]


def slowly(value: Any) -> Any:  # on the root
    if "slept" not in globals():
        globals()["slept"] = True
        time.sleep(LATE)
    return np.asarray(value)


def stuck_in_the_loader() -> Any:
    if ODD:
        if MODE == "stops":  # the others ask it, and wait for an answer
            os.kill(os.getpid(), signal.SIGSTOP)
        while MODE == "spins":
            pass
        time.sleep(100)
    return batch()


def state(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.zeros(2, jnp.float32)}


def batch(rows: int = 4) -> Any:
    return {"x": np.random.default_rng(ctx.rank).normal(size=(rows, 3)).astype(np.float32)}


finite = jaxdist.data_parallel(check_finite=True)(step.__wrapped__)  # type: ignore[attr-defined]
moved: Any = jaxdist.data_parallel(lambda s, offset, b: s | {"b": s["b"] + b["x"].mean() + offset})


def with_nan(_: Any, s: Any) -> None:
    bad = batch()
    if ODD:
        bad["x"][0, 0] = np.nan
    finite(s, bad)


def from_the_root(step: Any, _: Any) -> None:
    """Each rank starts from other weights; the root's count."""
    s, _ = step(state(ctx.rank), batch(4))
    expected, _ = step(state(0), batch(4))
    for name in s:
        np.testing.assert_array_equal(s[name].addressable_data(0), expected[name].addressable_data(0))
    sums = ctx.control.exchange("sums", float(np.abs(s["w"].addressable_data(0)).sum()))
    assert len(set(sums)) == 1, sums


def read_only(_: Any, __: Any) -> None:
    """What a step does not return has to be the same everywhere."""
    same = np.zeros(2, np.float32)
    for _ in range(3):
        moved(state(), same, batch())
    moved(state(), same + 0.1 * ctx.rank, batch())


CAUGHT: dict[str, Any] = {
    "shape": lambda step, s: step(s, batch(3 if ODD else 4)),
    "dtype": lambda step, s: step(s | {"b": s["b"].astype(jnp.bfloat16)} if ODD else s, batch()),
    "tree": lambda step, s: step(s | {"extra": jnp.zeros(3, jnp.float32)} if ODD else s, batch()),
    "state shape": lambda step, s: step(s | {"w": jnp.zeros((3, 5), jnp.float32) if ODD else s["w"]}, batch()),
    "empty": lambda step, s: step(s, batch(0 if ODD else 4)),
    "scalar": lambda step, s: step(s, {"x": np.float32(1.0)} if ODD else batch()),
    "type": lambda step, s: jaxdist.data_parallel(step.__wrapped__, batch_argnums=1)(  # before it could compare
        s, {"x": "text"} if ODD else batch()
    ),
    "nan": with_nan,
    "read only": read_only,
    "in jit": lambda step, s: jax.jit(lambda s, b: step(s, b))(s, batch()),  # each rank would train by itself
    "the root's": from_the_root,
}
"""What goes wrong and can be caught, on every rank and in the same call."""


def main(mode: str) -> None:
    global DIFFERENT, MODE
    MODE, s = mode, state()
    if MODE == "shape first":
        step(s, batch(3 if ODD else 4))
    elif MODE == "shape later":
        for i in range(4):
            s, _ = step(s, batch(3 if ODD and i == 2 else 4))
    elif MODE == "late shape":  # the odd rank asks long before the others arrive
        s, _ = step(s, batch())
        if not ODD:
            time.sleep(0.7)
        step(s, batch(3 if ODD else 4))
    elif MODE == "leaves early":
        for _ in range(2 if ODD else 5):
            s, _ = jax.block_until_ready(step(s, batch()))
    elif MODE == "caught":  # errors on all ranks lose nothing: the job goes on
        for name, call in CAUGHT.items():
            one: Any = jaxdist.data_parallel(step.__wrapped__)  # type: ignore[attr-defined]
            try:
                call(one, state())
            except (ValueError, TypeError, FloatingPointError, RuntimeError) as error:
                print(f"CAUGHT {ctx.rank} {name}: {error}", flush=True)
            _, aux = one(state(), batch())
            print(f"OK {ctx.rank} {name} {float(aux['loss'].addressable_data(0)):.6f}", flush=True)
        for i in range(1, 40):  # every rank asks at about the same time, again and again: nobody is wrong
            step(state(), batch(i % 7 + 1))
    elif MODE == "type later":  # the others are past comparing: the job ends
        for i in range(3):
            try:
                s, _ = step(s, {"x": "text"} if ODD and i == 1 else batch())
            except TypeError:
                print("CAUGHT", flush=True)
    elif MODE in ("stuck", "spins", "stops", "stuck first"):
        watchdog._ANSWER_SECONDS = 3.0
        for _ in range(0 if MODE == "stuck first" else 2):
            s, _ = step(s, batch())
        for _ in range(100):
            s, _ = jax.block_until_ready(step(s, stuck_in_the_loader()))
    elif MODE in ("late", "slow"):
        for i in range(3):
            if MODE == "late" and ODD and i != 1:
                time.sleep(LATE)
            s, _ = jax.block_until_ready(step(s, batch()))
        ctx.barrier()
    elif MODE == "differs unseen":  # traced before the call, where nobody looks
        DIFFERENT = ODD
        if ODD:
            lower(s, batch())
        jax.block_until_ready(step(s, batch()))
    elif MODE == "traces alone":
        if not ODD:
            sent, ctx.control.post = ctx.control.post, lambda *args, **kwargs: print("SENT", flush=True)
            lower(s, batch())
            ctx.control.post = sent
        for i in range(4):
            if ODD and i == 2:
                jax.clear_caches()
            s, _ = step(s, batch())
        jax.block_until_ready(s)
        ctx.barrier()
    else:
        raise SystemExit(f"no mode {MODE}")
