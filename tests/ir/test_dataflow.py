"""Programs that compute the same have one digest, whatever the order of their lines; others have others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.ir.dataflow import dataflow, operations

X, Y = jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((4,), "float32")


def of(f: Callable[..., Any]) -> str:
    return dataflow(jax.make_jaxpr(f)(X, Y))


def named(x: Any) -> Any:
    return jnp.sin(x)


SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "order": (lambda x, y: [jnp.sin(x), jnp.cos(y)], lambda x, y: [jnp.cos(y), jnp.sin(x)][::-1]),
    "sides": (lambda x, y: x * y + jnp.sin(y), lambda x, y: jnp.sin(y) + y * x),
    "names": (lambda x, y: jax.jit(named)(x), lambda x, y: jax.jit(lambda z: jnp.sin(z))(x)),
    "dead code": (lambda x, y: x, lambda x, y: [x, jnp.sin(y)][0]),
    "the order of numbers": (lambda x, y: [x * 2.0, y * 3.0], lambda x, y: [y * 3.0, x * 2.0][::-1]),
}
OTHER: dict[str, Callable[..., Any]] = {
    "plain": lambda x, y: jnp.sin(x) - y,
    "another operation": lambda x, y: jnp.cos(x) - y,
    "one more": lambda x, y: jnp.sin(jnp.sin(x)) - y,
    "the other way round": lambda x, y: y - jnp.sin(x),
    "another operand": lambda x, y: jnp.sin(x) - x[0],
    "the outputs exchanged": lambda x, y: [y, jnp.sin(x) - y],
    "the outputs": lambda x, y: [jnp.sin(x) - y, y],
    "cumsum": lambda x, y: jnp.cumsum(x, 0),
    "cumsum, another axis": lambda x, y: jnp.cumsum(x, 1),
    "a number": lambda x, y: x * 2.0,
    "another number": lambda x, y: x * 3.0,
    "an array": lambda x, y: x * jnp.asarray([1.0, 2.0, 3.0, 4.0]),
    "another array": lambda x, y: x * jnp.asarray([1.0, 2.0, 3.0, 5.0]),
    "in a loop": lambda x, y: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) - y, x),
    "in a loop, another": lambda x, y: lax.fori_loop(0, 3, lambda i, x: jnp.cos(x) - y, x),
    "in a branch": lambda x, y: lax.cond(y[0] > 0, lambda: x, lambda: x + y),
    "in the other branch": lambda x, y: lax.cond(y[0] > 0, lambda: x + y, lambda: x),
    "another dtype": lambda x, y: (jnp.sin(x) - y).astype(jnp.bfloat16),
    "another precision": lambda x, y: jnp.dot(x, y, precision="highest"),
    "the usual precision": lambda x, y: jnp.dot(x, y),
    "a key": lambda x, y: jax.random.normal(jax.random.key(0, impl="rbg"), (4,)),
    "a key of another kind": lambda x, y: jax.random.normal(jax.random.key(0, impl="threefry2x32"), (4,)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same(name: str) -> None:
    one, other = SAME[name]
    assert of(one) == of(other)


def test_all_others_differ() -> None:
    digests = {name: of(f) for name, f in OTHER.items()}
    assert [pair for pair in itertools.combinations(digests, 2) if digests[pair[0]] == digests[pair[1]]] == []


def test_operations_stand_in_order_and_say_what_they_hold_and_where_they_are() -> None:
    held = np.arange(4, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x, y: lax.scan(lambda c, r: (jnp.sin(c), r * 2), y + held, x))(X, Y)
    *inner, outer = operations(closed)
    texts = [one.text for one in inner]
    assert re.fullmatch(r"add float32\[4\], float32\[4\] with the checksum [0-9a-f]{8}", texts[0])
    assert texts[1:] == ["in a scan of 4: sin float32[4]", "in a scan of 4: mul float32[4], 2.0"]
    assert outer.text.startswith("scan float32[4], float32[4,4]")


def test_collectives_count_in_their_order_with_what_they_send() -> None:
    def of(*order: int) -> str:
        def step(*xs: Any) -> Any:
            sums = {i: lax.psum(xs[i], "data") for i in order}
            return sums[0], sums[1]

        return dataflow(jax.make_jaxpr(step, axis_env=[("data", 2)])(Y, Y))

    assert of(0, 1) == of(0, 1) != of(1, 0)
