"""Buckets: which reductions travel together, and in which order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import parity
from harness.steps import train_step
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Jaxpr

import jaxdist
from jaxdist.ir.interpreter import subjaxprs
from jaxdist.ir.primitives import all_reduce_p
from jaxdist.mesh import AXIS, Axis
from jaxdist.placements.buckets import Fuse, _before_form

AXES = [(AXIS, 4)]


def all_reduce(x: Any, wire: str | None = None) -> Any:
    return all_reduce_p.bind(x, axes=(AXIS,), wire=wire)


def fused(f: Any, shapes: Sequence[tuple[int, ...]], bucket_bytes: int, dtypes: Any = None) -> list[tuple[str, int]]:
    """(dtype, size) of each reduction of f(*varying arrays), in order."""
    dtypes = dtypes or [jnp.float32] * len(shapes)
    avals = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    closed = jax.make_jaxpr(f, axis_env=AXES)(*avals)
    closed = Fuse(bucket_bytes, [Axis(AXIS, 4)])(closed)
    found: list[tuple[str, int]] = []

    def visit(jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jaxdist_all_reduce":
                aval: Any = eqn.invars[0].aval
                found.append((str(aval.dtype), aval.size))
            for sub in subjaxprs(eqn):
                visit(sub)

    visit(closed.jaxpr)
    return found


def each(*xs: Any) -> Any:
    return [all_reduce(jnp.sin(x)) for x in xs]


@pytest.mark.parametrize(
    ("counts", "messages"),
    [
        ([10, 10, 10], [30]),
        ([50, 50], [100]),
        ([50, 51], [50, 51]),  # one byte too many
        ([200, 10, 10], [200, 20]),  # the first larger than a bucket
        ([10, 200, 10], [200, 20]),  # a large one does not close the bucket around it
        ([10, 10, 200], [20, 200]),
        ([60, 60, 10], [60, 70]),
        ([90, 10, 5], [100, 5]),  # a tail of one
        ([100], [100]),  # exactly a bucket
        ([1000], [1000]),  # one huge one
        ([1] * 350, [100, 100, 100, 50]),  # hundreds of tiny ones
    ],
)
def test_bucket_edges(counts: list[int], messages: list[int]) -> None:
    """Gradients of so many float32 each."""
    got = [n for _, n in fused(each, [(n,) for n in counts], 400)]
    assert sum(got) == sum(counts)
    assert sorted(got) == sorted(messages)


def chain(x: Any, y: Any) -> Any:
    first = all_reduce(x)
    return all_reduce(x * first), all_reduce(y)


def alone(x: Any, y: Any) -> Any:
    own = all_reduce(y)
    return all_reduce(jnp.sin(all_reduce(x))), own


def late_and_early(x: Any, y: Any) -> Any:
    """As an optimizer reads them: in another order than they were made, scaled at the last moment."""
    late, early = jnp.sin(x), jnp.sin(y)
    return all_reduce(early * 2), all_reduce(jnp.sin(late) * 2)


def in_a_loop(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, _: (c, (all_reduce(c), all_reduce(2 * c))), x, None, length=3), all_reduce(y)


F32, F16 = "float32", "float16"
ORDER: dict[str, tuple[Any, list[int], int, list[tuple[str, int]]]] = {
    "none": (each, [1, 2, 3], 0, [(F32, 1), (F32, 2), (F32, 3)]),
    "on the wire of one dtype": (
        lambda x, y: (all_reduce(x), all_reduce(y, "bfloat16")), [3, 4], 1000, [(F32, 3), (F32, 4)],
    ),
    "what follows from one is in a later one": (chain, [3, 5], 1000, [(F32, 3), (F32, 8)]),
    # It may share a bucket with the last of a chain; with one of its own it is sent as soon as it is there.
    "what nothing follows from does not wait": (alone, [3, 5], 1, [(F32, 5), (F32, 3), (F32, 3)]),
    "but shares one": (alone, [3, 5], 1000, [(F32, 3), (F32, 8)]),
    "that of the backward pass": (late_and_early, [3, 5], 0, [(F32, 5), (F32, 3)]),
    "a loop has its own": (in_a_loop, [3, 5], 1000, [(F32, 5), (F32, 6)]),
}  # fmt: skip
"""A function of varying arrays of so many float32, the size of a bucket, and the messages in order."""


@pytest.mark.parametrize("name", ORDER)
def test_order(name: str) -> None:
    f, counts, bucket, messages = ORDER[name]
    found = fused(f, [(n,) for n in counts], bucket)
    assert (sorted(found) if name == "a loop has its own" else found) == messages


def test_one_dtype_a_bucket() -> None:
    assert fused(each, [(3,)] * 4, 1000, [F32, F16, F32, F16]) == [(F32, 6), (F16, 6)]


@pytest.mark.parametrize("within", [None, 2])
def test_gradients_of_layers_that_talk_to_each_other_share_a_bucket(within: Any) -> None:
    """Each follows from more statistics than the one before; within groups it is also added up across them."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x @ w
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return jnp.sum(x[:, 0] ** 3)

    tx = jaxdist.zero(optax.sgd(0.1), 2, within)
    params = [jnp.asarray(np.random.default_rng(k).normal(size=(8, 8))) for k in range(4)]
    args = params, tx.init(params), jnp.asarray(np.random.default_rng(9).normal(size=(64, 8)))
    found = parity.collectives(parity.program(train_step(loss, tx), *args, devices=4))
    assert [shape for kind, shape, _ in found if kind == "reduce-scatter"] == [(1, 4 * 64 // (within or 4))]
    assert [shape for kind, shape, _ in found if kind == "all-reduce"].count((4 * 64 // 2,)) == bool(within)


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=12),
    st.sampled_from([0, 1, 8, 64, 100, 4096]),
    st.sampled_from([None, "bf16"]),
)
def test_buckets_change_no_number(shapes: list[tuple[int, int]], bucket_bytes: int, compress: Any) -> None:
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=s)) for s in shapes]
    x = rng.normal(size=(16, 3))

    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda ps: sum(jnp.sum(jnp.sin(p * x.mean())) for p in ps))(params)
        return optax.apply_updates(params, grads), {"loss": loss, "count": jnp.asarray(x.shape[0])}

    runs = [jaxdist.data_parallel(step, donate=False, bucket_bytes=b, compress=compress) for b in (bucket_bytes, 0)]
    got, alone = (run(params, x) for run in runs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)  # around its messages XLA may round otherwise


@pytest.mark.parametrize("bucket_bytes", [-1, 1.5, True, "big"])
def test_bad_bucket_bytes(bucket_bytes: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="bucket_bytes"):
        jaxdist.data_parallel(lambda s, x: s, bucket_bytes=bucket_bytes)


def test_what_a_gather_waits_for() -> None:
    """No reshape of it: XLA folds those into the product that takes them, and then nothing holds the gather back."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.transpose(x @ w, (1, 0)).reshape(-1, 4) @ w

    jaxpr = jax.make_jaxpr(layer)(jnp.ones((8, 4)), jnp.ones((4, 4))).jaxpr
    producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    first, last = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert last.invars[0] is not first.outvars[0]
    assert _before_form(last.invars[0], producers) is first.outvars[0]
    assert _before_form(first.outvars[0], producers) is first.outvars[0]
    assert _before_form(jaxpr.invars[0], producers) is jaxpr.invars[0]


def test_shards_that_change_form_before_they_are_gathered_travel_together() -> None:
    """Biases are broadcast as shards, each just before its use: one message for all. Six for the matrices, and five of
    these are gathered again for the backward pass.
    """
    params = [{"w": jnp.ones((64, 64)) / 64, "b": jnp.zeros(64)} for _ in range(6)]

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean(x**2)

    tx = jaxdist.zero(optax.sgd(0.1), 3)
    program = parity.program(train_step(loss, tx), params, tx.init(params), np.ones((16, 64)), bucket_bytes=1 << 20)
    assert [kind for kind, *_ in parity.collectives(program)].count("all-gather") == 12


@pytest.mark.optimised
def test_alike_parameters_are_updated_by_one_kernel() -> None:
    """XLA compiles a kernel for each place in a bucket that it knows of."""

    def step(ws: list[jax.Array], batch: jax.Array) -> list[jax.Array]:
        grads = jax.grad(lambda ws: sum(jnp.mean(batch * w) for w in ws))(ws)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

    decorated: Any = jaxdist.data_parallel(step)
    text = decorated.lower([jnp.ones(8)] * 20, jnp.ones((16, 8))).compile().as_text()
    bodies = re.findall(r"^%(?:fused|wrapped)_\S+ .*?^}", text, re.MULTILINE | re.DOTALL)
    updates = [re.sub(r"%[\w.\-]+|param_[\w.]+|, metadata=.*", "", body) for body in bodies if "dynamic-slice(" in body]
    assert len(updates) == 20
    assert len(set(updates)) == 1


def test_many_pieces_of_any_dtype() -> None:
    numbers = np.random.default_rng(0).integers(0, 2, (8, 11))
    dtypes = ("bool", "int4", "uint8", "int64", "float8_e4m3fn", "bfloat16", "float64", "complex64")
    batch = [numbers[:, : i + 1].astype(jnp.dtype(dtype)) for dtype in dtypes for i in range(9)]
    rows = parity.decorated(lambda _, batch: [x[jnp.asarray([3, 0, 0])] for x in batch], 4)(0.0, batch)
    for got, x in zip(rows, batch, strict=True):
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(got), x[[3, 0, 0]])
