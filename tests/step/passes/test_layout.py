"""The *layout* pass alone: what varies, and how it depends on the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxdist.step.trace as trace
from jaxdist.step.passes.layout import Flow, infer

STATE, BATCH = Flow(deps=1), Flow(varying=True)


def flow(f: Callable[..., Any]) -> Flow:
    """Of f(state, batch), in an untyped trace."""
    avals = [jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.float32)]
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    closed = trace.capture(lambda s, x: [f(s, x)], avals, [P(), P("data")], mesh, check=False)
    return infer(closed, [STATE, BATCH])[0]


REPLICATED = {
    "state": lambda s, x: jnp.sin(s) * 2,
    "psum": lambda s, x: lax.psum(x, "data"),
    "pmax": lambda s, x: lax.pmax(x, "data") + s,
    "all_gather": lambda s, x: lax.all_gather(x, "data").sum(),
    "in jit": lambda s, x: jax.jit(lambda x: lax.pmean(x, "data"))(x),
    "in scan": lambda s, x: lax.scan(lambda c, t: (c + lax.psum(t, "data"), None), s[0], x)[0],
    "constant": lambda s, x: jnp.zeros(x.shape),
}
VARYING = {
    "batch": lambda s, x: x,
    "axis_index": lambda s, x: s + lax.axis_index("data"),
    "subset": lambda s, x: lax.psum(x, "data", axis_index_groups=[[0], [1]]),
    "scan carry, third turn": lambda s, x: lax.scan(
        lambda c, _: ((c[1], c[2], c[2]), None), (s[0], s[0], x[0]), None, length=3
    )[0][0],
    "while count": lambda s, x: lax.while_loop(lambda c: c < x[0], lambda c: c + 1, s[0]),
    "cond predicate": lambda s, x: lax.cond(x[0] > 0, lambda: s, lambda: -s),
    "select": lambda s, x: jnp.where(x[0] > 0, s, 0),
    "callback": lambda s, x: io_callback(lambda: np.float32(0), jax.ShapeDtypeStruct((), jnp.float32)) + s,
}


@pytest.mark.parametrize("name", REPLICATED)
def test_replicated(name: str) -> None:
    assert not flow(REPLICATED[name]).varying


@pytest.mark.parametrize("name", VARYING)
def test_varying(name: str) -> None:
    assert flow(VARYING[name]).varying


AFFINE = {
    "moving average": lambda s, x: 0.9 * s + 0.1 * x[:3],
    "of a statistic": lambda s, x: s - 0.1 * (s - jnp.var(x)),
    "cast, reshape, select by state-free predicate": lambda s, x: jnp.where(
        jnp.arange(3) > 1, s.reshape(3, 1)[:, 0].astype(jnp.bfloat16).astype(jnp.float32), x[:3]
    ),
    "in scan": lambda s, x: lax.scan(lambda c, t: (0.9 * c + t, None), s, jnp.stack([x, x]))[0],
    "in cond": lambda s, x: lax.cond(True, lambda s: 0.5 * s + x[0], lambda s: s, s),
}
BENT = {
    "product with local data": lambda s, x: s * x[:3],
    "gradient of its own": lambda s, x: s - 0.1 * jax.grad(lambda s: jnp.sum((s * x[:3]) ** 2))(s),
    "square": lambda s, x: s**2 + x[:3],
    "quotient": lambda s, x: x[:3] / s,
    "integer cast": lambda s, x: s.astype(int) + x[:3],
    "predicate": lambda s, x: jnp.where(s > 0, s, x[:3]),
}


@pytest.mark.parametrize("name", AFFINE)
def test_running_statistics_are_affine(name: str) -> None:
    got = flow(AFFINE[name])
    assert got.varying
    assert not got.bent


@pytest.mark.parametrize("name", BENT)
def test_everything_else_is_not(name: str) -> None:
    got = flow(BENT[name])
    assert got.varying
    assert got.bent == 1
