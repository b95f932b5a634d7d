"""The accumulation pass: stacks of an inner loop that are added to a sum of the outer one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness.steps import train_step
from jax import lax
from jax.extend.core import jaxpr_as_fun

import jaxdist
from jaxdist.ir.interpreter import subjaxprs
from jaxdist.placements.accumulation import in_place

RNG = np.random.default_rng(0)
WS, XS = jnp.asarray(RNG.normal(size=(3, 64, 64)) / 8), jnp.asarray(RNG.normal(size=(4, 5, 64)))
"""Of three layers, 98 kB; of four microbatches."""


def stack(ws: Any, x: Any, **settings: Any) -> Any:
    """One entry a layer."""
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), w * h.sum()), x, ws, **settings)[1]


def summed(body: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda ws, xs: lax.scan(lambda c, x: (body(c, ws, x), None), jnp.ones_like(ws), xs)[0]


def with_counter(ws: Any, xs: Any) -> Any:
    def turn(c: Any, x: Any) -> Any:
        total, n = c
        h, (ys, zs) = lax.scan(lambda h, w: (h @ w, (w * h.sum(), h.sum() + n)), x, ws)
        return (ys + total, n + 1), (h, zs)

    return lax.scan(turn, (jnp.zeros_like(ws), 0), xs)


def later(c: Any, ws: Any, x: Any) -> Any:
    h, ys = lax.scan(lambda h, w: (jnp.tanh(h @ w), w * h.sum()), x, ws)
    return ys + c * h.sum()


SUMMED: dict[str, Callable[[Any, Any], Any]] = {
    "forwards": summed(lambda c, ws, x: c + stack(ws, x)),
    "from the right": summed(lambda c, ws, x: stack(ws, x) + c),
    "backwards": summed(lambda c, ws, x: c + stack(ws, x, reverse=True)),
    "unrolled": summed(lambda c, ws, x: c + stack(ws, x, unroll=2)),
    "gradients": summed(lambda c, ws, x: c + jax.grad(lambda ws: stack(ws, x).sum())(ws)),
    "twice": summed(lambda c, ws, x: c + stack(ws, x) + stack(ws.mT, x)),
    "two stacks": summed(lambda c, ws, x: c * stack(ws, x) + stack(ws.mT, x)),
    "in a branch": summed(lambda c, ws, x: lax.cond(x.sum() > 0, lambda c: c + stack(ws, x), lambda c: c, c)),
    "remat": summed(lambda c, ws, x: jax.checkpoint(lambda c: c + stack(ws, x))(c)),
    "while": lambda ws, xs: lax.while_loop(
        lambda s: s[0] < 4, lambda s: (s[0] + 1, s[1] + stack(ws, xs[s[0]])), (0, ws)
    ),
    "other results": with_counter,
    "beside a scatter": summed(lambda c, ws, x: c.at[0, 0].add(x.sum(0)) + stack(ws, x)),
}
LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "a stack with another use": summed(lambda c, ws, x: (lambda y: c + y + y.sum())(stack(ws, x))),
    "a sum with another use": summed(lambda c, ws, x: (c + stack(ws, x)) * c),
    "to itself": summed(lambda c, ws, x: (lambda y: y + y)(stack(ws, x)) * c),
    "to what follows": summed(later),
    "in no loop": lambda ws, xs: ws + stack(ws, xs[0]),
    "with effects": summed(
        lambda c, ws, x: c + lax.scan(lambda h, w: (jax.debug.callback(lambda _: None, h) or h, w * h.sum()), x, ws)[1]
    ),
}


def additions(jaxpr: Any) -> int:
    """Of whole stacks."""
    own = sum(eqn.primitive.name in ("add", "add_any") and eqn.outvars[0].aval.shape == WS.shape for eqn in jaxpr.eqns)
    return own + sum(additions(sub) for eqn in jaxpr.eqns for sub in subjaxprs(eqn))


def test_each_slice_is_added_where_it_is_made() -> None:
    """And the sum is the same, but for a product that XLA rounds or not before it is added."""
    before = {name: jax.make_jaxpr(f)(WS, XS) for name, f in SUMMED.items()}
    after = {name: in_place(one, ()) for name, one in before.items()}
    for name in SUMMED:
        assert additions(after[name].jaxpr) == 0 < additions(before[name].jaxpr), name
    run = lambda programs: jax.jit(lambda *xs: {name: jaxpr_as_fun(one)(*xs) for name, one in programs.items()})(WS, XS)
    want, got = run(before), run(after)
    for name in SUMMED:
        for a, b in zip(want[name], got[name], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str) -> None:
    before = jax.make_jaxpr(LEFT[name])(WS, XS)
    assert in_place(before, ()) is before


@pytest.mark.optimised
@pytest.mark.parametrize("level", [0, 2])
def test_a_device_holds_one_gradient(level: Any) -> None:
    """Of all layers, whole, in 32 bits: the sum over the microbatches, and no stack beside it."""
    tx = jaxdist.zero(optax.sgd(0.1), level)

    def loss(ws: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    step: Any = jaxdist.data_parallel(train_step(loss, tx, jaxdist.value_and_grad, microbatches=2))
    ws = jnp.ones((16, 64, 64), jnp.bfloat16)
    args = ws, tx.init(ws), jnp.ones((16, 64), jnp.bfloat16)
    temporaries = jaxdist.memory(args, step.lower(*args).compile()).compiled["temporaries"]
    assert temporaries < 2.5 * 4 * ws.size  # XLA has others of this size
