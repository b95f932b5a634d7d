"""One rank calls a step differently: `python bad_calls.py MODE [COMMUNICATOR]` under a launcher, 2 ranks or more."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

MODE = sys.argv[1]
ctx = jaxdist.init(communicator=sys.argv[2] if len(sys.argv) > 2 else "auto")
ODD = ctx.rank == 1
LATE = float(os.environ.get("LATE", "1.5"))  # seconds
DIFFERENT = False  # whether steps are traced differently now


@jaxdist.data_parallel(check_finite=MODE == "nan")
def step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"]) ** 2))(state)
    if MODE == "slow":
        loss = jax.pure_callback(slowly, jax.ShapeDtypeStruct((), np.float32), loss)
    if DIFFERENT:
        loss = jnp.max(batch["x"] @ state["w"])
    if MODE == "fails alone" and ODD:
        raise KeyError("boom on purpose")
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


lower: Any = step.lower  # type: ignore[attr-defined]


def slowly(value: Any) -> Any:  # on the root
    if "slept" not in globals():
        globals()["slept"] = True
        time.sleep(LATE)
    return np.asarray(value)


def stuck_in_the_loader() -> Any:
    if ODD:
        if MODE == "stops":
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


def main() -> None:
    global DIFFERENT
    s = state()
    if MODE == "sync":  # each rank starts from other weights; the root's count
        s, _ = step(state(ctx.rank), batch(4))
        expected, _ = step(state(0), batch(4))
        for name in s:
            np.testing.assert_array_equal(s[name].addressable_data(0), expected[name].addressable_data(0))
        sums = ctx.control.exchange("sums", float(np.abs(s["w"].addressable_data(0)).sum()))
        assert len(set(sums)) == 1, sums
        print(f"OK {ctx.rank}", flush=True)
    elif MODE == "shape first":
        step(s, batch(3 if ODD else 4))
    elif MODE == "shape later":
        for i in range(4):
            s, _ = step(s, batch(3 if ODD and i == 2 else 4))
    elif MODE == "late shape":  # the odd rank asks long before the others arrive
        s, _ = step(s, batch())
        if not ODD:
            time.sleep(2)
        step(s, batch(3 if ODD else 4))
    elif MODE == "dtype":
        step({**s, "b": s["b"].astype(jnp.bfloat16)} if ODD else s, batch())
    elif MODE == "tree":
        step({**s, "extra": jnp.zeros(3, jnp.float32)} if ODD else s, batch())
    elif MODE == "state shape":
        step({**s, "w": jnp.zeros((3, 5), jnp.float32) if ODD else s["w"]}, batch())
    elif MODE == "empty":
        step(s, batch(0 if ODD else 4))
    elif MODE == "scalar":
        step(s, {"x": np.float32(1.0)} if ODD else batch())
    elif MODE == "nan":
        s, _ = step(s, batch())
        bad = batch()
        if ODD:
            bad["x"][0, 0] = np.nan
        step(s, bad)
    elif MODE == "leaves early":
        for _ in range(2 if ODD else 5):
            s, _ = step(s, batch())
            jax.block_until_ready(s)
    elif MODE == "caught":  # an error loses nothing: the job goes on
        try:
            step(s, batch(3 if ODD else 4))
        except ValueError as error:
            print(f"CAUGHT {ctx.rank} {error}", flush=True)
        s, aux = step(s, batch())
        print(f"OK {ctx.rank} {float(aux['loss'].addressable_data(0)):.6f}", flush=True)
    elif MODE == "caught type":  # an error of one rank, before it could compare: on all ranks, in the same call
        try:
            step(s, {"x": "text"} if ODD else batch())
        except (TypeError, ValueError) as error:
            print(f"CAUGHT {ctx.rank} {error}", flush=True)
        s, aux = step(s, batch())
        print(f"OK {ctx.rank} {float(aux['loss'].addressable_data(0)):.6f}", flush=True)
    elif MODE == "type later":  # the others are past comparing: the job ends
        for i in range(3):
            try:
                s, _ = step(s, {"x": "text"} if ODD and i == 1 else batch())
            except TypeError:
                print("CAUGHT", flush=True)
    elif MODE == "many shapes":  # every rank asks at about the same time, again and again: nobody is wrong
        for i in range(1, 60):
            step(state(), batch(i % 7 + 1))
        print(f"OK {ctx.rank}", flush=True)
    elif MODE == "read only":  # what a step does not return has to be the same everywhere
        offset = np.full(2, 0.1 * ctx.rank, np.float32)
        moved: Any = jaxdist.data_parallel(lambda s, offset, b: s | {"b": s["b"] + b["x"].mean() + offset})
        try:
            moved(s, offset, batch())
        except ValueError as error:
            print(f"CAUGHT {ctx.rank} {error}", flush=True)
        s = moved(s, offset * 0, batch())
        held = jnp.asarray(offset * 0)
        for _ in range(3):
            s = moved(s, held, batch())
        print(f"OK {ctx.rank}", flush=True)
    elif MODE == "constants":
        own = np.full(2, 0.1 * ctx.rank, np.float32)
        step_of = lambda own: jaxdist.data_parallel(lambda s, b: s | {"b": s["b"] + b["x"].mean() + own})
        s = step_of(own * 0)(s, batch())
        print(f"OK {ctx.rank}", flush=True)
        s = step_of(own)(s, batch())
        jax.block_until_ready(s)
    elif MODE == "in jit":  # each rank would train by itself
        try:
            jax.jit(lambda s, b: step(s, b))(s, batch())
        except Exception as error:
            print(f"CAUGHT {ctx.rank} {error}", flush=True)
        jax.eval_shape(step, s, batch())
        s, _ = step(s, batch())
        print(f"OK {ctx.rank}", flush=True)
    elif MODE in ("stuck", "spins", "stops", "stuck first"):
        for _ in range(0 if MODE == "stuck first" else 2):
            s, _ = step(s, batch())
        for _ in range(100):
            s, aux = step(s, stuck_in_the_loader())
            jax.block_until_ready(aux)
    elif MODE in ("late", "slow"):
        for i in range(3):
            if MODE == "late" and ODD and i != 1:
                time.sleep(LATE)
            s, aux = step(s, batch())
            jax.block_until_ready(aux)
        ctx.barrier()
        print(f"OK {ctx.rank}", flush=True)
    elif MODE == "differs":
        s, _ = step(s, batch())
        DIFFERENT = ODD
        jax.block_until_ready(step(s, batch(5)))
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
        print(f"OK {ctx.rank}", flush=True)
    elif MODE == "fails alone":
        try:
            step(s, batch())
        except KeyError:
            print("CAUGHT", flush=True)
        jax.block_until_ready(step(s, batch()))
    else:
        raise SystemExit(f"no mode {MODE}")


if __name__ == "__main__":
    main()
