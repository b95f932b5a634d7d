"""What a program holds at once, before a compiler has touched it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.ir.liveness import held_at_once

N = 1000
X = jnp.ones(N, jnp.float32)


def chain(x: Any) -> Any:
    for _ in range(5):
        x = jnp.sin(x)  # the one before is not needed any more
    return x


def kept(x: Any) -> Any:
    several = [jnp.sin(x + 0) for _ in range(5)]
    return [jnp.cos(one) for one in several]


def loop(x: Any) -> Any:
    """Seven rows come out; in a turn there are two values."""
    return lax.scan(lambda c, _: (jnp.sin(jnp.cos(c)), c), x, None, length=7)[1]


def nested(x: Any) -> Any:
    return jax.jit(chain)(x) + x


def made_where_used(x: Any) -> Any:
    return x + jnp.zeros((N,), jnp.float32) + lax.iota(jnp.float32, N)


@pytest.mark.parametrize(
    ("function", "arrays"), [(chain, 2), (kept, 6), (loop, 7 + 2), (nested, 3), (made_where_used, 2)]
)
def test_held_at_once(function: Callable[[Any], Any], arrays: int) -> None:
    assert held_at_once(jax.make_jaxpr(function)(X).jaxpr) == arrays * 4 * N


def test_nothing_is_made() -> None:
    assert held_at_once(jax.make_jaxpr(lambda x: x)(X).jaxpr) == 0
    assert held_at_once(jax.make_jaxpr(lambda x: (jnp.sin(x), x)[1])(X).jaxpr) == 0  # nobody wants the sine
