"""One rank calls a step differently: `python bad_calls.py MODE [COMMUNICATOR]` under a launcher, 2 ranks or more."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

MODE = sys.argv[1]
ctx = jaxdist.init(communicator=sys.argv[2] if len(sys.argv) > 2 else "auto")
ODD = ctx.rank == 1


@jaxdist.data_parallel(check_finite=MODE == "nan")
def step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), {"loss": loss}


def state(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), "b": jnp.zeros(2, jnp.float32)}


def batch(rows: int = 4) -> Any:
    return {"x": np.random.default_rng(ctx.rank).normal(size=(rows, 3)).astype(np.float32)}


def main() -> None:
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
            import time

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
    else:
        raise SystemExit(f"no mode {MODE}")


if __name__ == "__main__":
    main()
