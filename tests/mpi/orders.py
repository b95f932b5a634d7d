"""Calls that every rank knows, in another order on one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

ctx = jaxdist.get_context()


def task(target: float) -> Any:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - target) ** 2))(w)

    step.__qualname__ = f"towards_{target:g}"
    return jaxdist.data_parallel(step)


def main(mode: str, culprit: int) -> None:
    bad = ctx.rank == culprit
    if mode == "x64":
        jax.config.update("jax_enable_x64", bad)
    first, second = task(1.0), task(-5.0)
    x = jnp.ones((4, 3))
    w = jnp.ones((3, 2))
    models = {"a": w, "b": jnp.ones((3, 700))}
    large, large_x = jnp.ones((300, 900)), jnp.ones((4, 300))

    exchange = ctx.control.exchange
    asked: list[str] = []

    def noted(tag: str, *args: Any) -> Any:
        asked.append(tag)
        return exchange(tag, *args)

    for i in range(12):
        wrong = bad and i == 8
        if mode == "pattern":  # 3 of one, 1 of the other, a sum: after two rounds it is known
            if i == 5:
                vars(ctx.control)["exchange"] = noted
            for _ in range(3):
                w = first(w, x)
            w = second(w, x)
        elif mode == "equal shapes":
            for call in (second, first) if wrong else (first, second):
                w = call(w, x)
        elif mode == "other shapes":
            if wrong:
                large = second(large, large_x)
                w = first(w, x)
            else:
                w = first(w, x)
                large = second(large, large_x)
        elif mode == "models":  # one step, two models of one structure
            for model in ("b", "a") if wrong else ("a", "b"):
                models[model] = first(models[model], x)
        elif mode == "x64":  # what travels of a NumPy array of 64 bits is not the same
            w = first(w.astype(jnp.float32), np.ones((4, 3)))
        elif mode == "batch":  # both lengths are known
            w = first(w, x if (i % 2 == 0) != wrong else x[:3])
        elif mode in ("sum", "barrier"):
            meet = ctx.barrier if mode == "barrier" else lambda: jaxdist.allreduce(jnp.ones(2))
            if wrong:
                meet()
            w = first(w, x)
            if not wrong:
                meet()
        jax.block_until_ready((w, large, models))
    assert not asked, asked
