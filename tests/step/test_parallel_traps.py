"""What may go wrong on several axes: each leaf of two calls as on one device, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness.meshes import mesh
from harness.parity import compare
from jax import lax

import jaxdist

X = np.random.default_rng(0).normal(size=(2, 21, 6))
TOKENS = np.random.default_rng(1).integers(0, 11, (2, 21, 7))
Step = Callable[..., Any]


def array(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / math.sqrt(shape[0]))


def same(
    step: Step, state: Any, layouts: Any = None, on: dict[str, int] | None = None, batches: Any = X,
    plain: Step | None = None,
) -> Any:  # fmt: skip
    """Compare two calls, one after the other, with those of one device; the state after them on the mesh."""
    one = jax.jit(plain or step)
    decorated = jaxdist.parallel(step, mesh=mesh(on or {"data": 2, "model": 2}), layouts=layouts)
    want = got = before = state
    for batch in batches:
        before, (want, expected), (got, aux) = got, one(want, batch), decorated(got, batch)
        compare(jaxdist.unshard((got, aux)), (want, expected))
    assert all(x.is_deleted() for x in jax.tree.leaves(before) if x.size > 1), "what the first call returned"
    return got


def training(loss_fn: Step, tx: Any) -> Step:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    return step


PARAMS = {"in": array(6, 10), "b": array(10), "out": array(10, 4)}
LAYOUTS = {"'in'": 1, "'b'": 0, "'out'": 0}
ADAM = optax.adam(1e-2, eps=1e-2)


def mlp(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ p["in"] + p["b"]) @ p["out"]) ** 2)


@pytest.mark.parametrize("one_dim", [True, False])
def test_sizes_that_neither_axis_divides(one_dim: bool) -> None:
    """21 rows over 2, a leaf of 7 over 3 devices, and again over 2 in the same dimension, or in another one."""
    params = {"a": array(7, 5), "b": array(5, 7), "c": array(7)}

    def loss_fn(p: Any, x: Any) -> Any:
        h = jnp.pad(x, ((0, 0), (0, 1))) @ p["a"] @ p["b"] + p["c"]
        return jnp.mean(h @ p["b"].T @ p["a"].T) ** 2 + jnp.mean(jax.nn.logsumexp(h, -1)) + jnp.max(p["c"])

    layouts = {"'a'": 0, "'b'": 0, "'c'": 0} if one_dim else {"'a'": 1, "'b'": 1}
    step = training(loss_fn, jaxdist.zero(ADAM, 3))
    got = same(step, (params, ADAM.init(params)), layouts, {"data": 2, "model": 3})
    assert got[0]["a"].shape == (7, 5)


def test_gradients_of_gathered_keys_and_values_are_reduced_into_slices() -> None:
    """Each device has use for those of its part of the sequence, and computes no more of what comes before them."""

    def loss_fn(w: Any, x: Any) -> Any:
        q, k, v = (jnp.tanh(x) @ w["in"] @ w[name] for name in "qkv")
        return jnp.mean(jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v)

    w = {name: array(6, 6) for name in ("in", "q", "k", "v")}
    step, x, sizes = training(loss_fn, optax.sgd(1.0)), array(2, 2, 13, 6), {"sequence": 2, "data": 2}
    state = w, optax.sgd(1.0).init(w)
    kinds = {row.what for row in jaxdist.explain(jaxdist.parallel(step, mesh=mesh(sizes)), state, x[0]).rows}
    assert "reduce-scatter" in kinds
    assert "repeated" not in kinds
    same(step, state, None, sizes, x)


@pytest.mark.parametrize("sizes", [{"sequence": 2}, {"model": 4}])
def test_one_example(sizes: dict[str, int]) -> None:
    params = {"table": array(11, 6), "q": array(6, 6), "k": array(6, 6), "out": array(6, 11)}

    def loss_fn(p: Any, tokens: Any) -> Any:
        x = p["table"][tokens]
        scores = jnp.einsum("btd,bsd->bts", x @ p["q"], x @ p["k"])
        x = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((7, 7), bool)), scores, -1e9)) @ x
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ p["out"], tokens)
        return loss.mean() + 0.1 * jnp.max(x @ p["table"].T)

    layouts = {"'table'": 0, "'q'": 1, "'k'": 1, "'out'": 1} if "model" in sizes else None
    same(training(loss_fn, ADAM), (params, ADAM.init(params)), layouts, sizes, TOKENS[:, :1])


def test_statistics_with_fewer_dimensions_than_their_parameter() -> None:
    """An expression finds them too; a dimension that they lack, they are not cut along."""
    params = {"in": array(6, 8), "b": array(8), "out": array(8, 4)}
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    got = same(training(mlp, tx), (params, tx.init(params)), {"in": 1, "out": -2, "b": 0})
    assert got[0]["in"].sharding.spec[1] == "model"
    assert {x.ndim for x in jax.tree.leaves(got[1]) if x.size > 1} == {1}


def test_keys_integers_and_numbers() -> None:
    def step(state: Any, x: Any) -> Any:
        key, sub = jax.random.split(state["key"])
        noise = jax.random.normal(sub, state["w"].shape)
        counts = state["counts"].at[jnp.argmax(x @ state["w"], -1)].add(1)
        return {
            "w": state["w"] - state["rate"] * jnp.mean(x) * noise, "key": key, "rate": state["rate"] * 0.9,
            "keys": jax.vmap(lambda key: jax.random.fold_in(key, 1))(state["keys"]), "n": state["n"] + 1,
            "counts": counts, "bytes": state["bytes"] * 3 + jnp.uint8(200), "even": state["even"] ^ (counts > 2),
        }, {"bits": jax.random.bits(sub, (5,)), "whole": counts // 2, "each": x @ state["w"]}  # fmt: skip

    state = {
        "w": array(6, 9), "key": jax.random.key(0), "rate": 0.1, "keys": jax.random.split(jax.random.key(1), 6), "n": 0,
        "counts": jnp.zeros(9, int), "bytes": jnp.arange(7, dtype=jnp.uint8), "even": jnp.zeros(9, bool),
    }  # fmt: skip
    layouts = {"'w'": 1, "'keys'": 0, "'counts'": 0, "'bytes'": 0, "'even'": 0}
    same(step, state, layouts, {"model": 2, "data": 2, "sequence": 2})


@pytest.mark.parametrize("layout", [0, 1])
def test_extremes_keep_nan(layout: int) -> None:
    def step(w: Any, x: Any) -> Any:
        return w, (jnp.max(x @ w), jnp.max(w), jnp.min(w, 0), jnp.argmax(w), jnp.max(x[:, :, None] * w, (0, 1)))

    same(step, array(6, 9).at[3, 7].set(jnp.nan), {"w": layout})


def test_a_loss_in_bfloat16() -> None:
    """Summands of 16-bit floats are added up in 32 bits over each axis."""
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)

    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(mlp)(state, x.astype(jnp.bfloat16) * 100)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    want, loss = jax.jit(step)(params, X[0])
    got, found = jaxdist.parallel(step, mesh=mesh({"data": 2, "model": 2}), layouts=LAYOUTS)(params, X[0])
    compare(jaxdist.unshard((got, found)), (want, loss), 2e-2)


@pytest.mark.parametrize("level", [0, 3])
def test_clipping_counts_each_slice_once(level: Any) -> None:
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, eps=1e-2))

    def norms(tx: Any) -> Step:
        def step(state: Any, x: Any) -> Any:
            grads = jax.grad(mlp)(state[0], x)
            updates, opt_state = tx.update(grads, state[1], state[0])
            each = jax.tree.map(jnp.linalg.norm, grads)
            return (optax.apply_updates(state[0], updates), opt_state), (optax.global_norm(grads), each)

        return step

    state = PARAMS, tx.init(PARAMS)
    same(norms(jaxdist.zero(tx, level) if level else tx), state, LAYOUTS, plain=norms(tx))


@pytest.mark.parametrize(("level", "offload"), [(1, True), (3, False)])
def test_owners_and_offload_under_a_model_axis(level: Any, offload: bool) -> None:
    params = {"a": array(6, 10), "b": array(10, 10), "c": array(10, 10)}

    def loss_fn(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2 + jnp.mean((x @ p["a"]) ** 2)

    tx = optax.contrib.muon(1e-2, ns_steps=2)
    step = training(loss_fn, jaxdist.zero(tx, level, offload=offload))
    same(step, (params, tx.init(params)), {"'a'": 1, "'b'": 0}, plain=training(loss_fn, tx))


def test_within_under_a_model_axis() -> None:
    step = training(mlp, jaxdist.zero(ADAM, 3, within=2))
    got = same(step, (PARAMS, ADAM.init(PARAMS)), LAYOUTS, {"data": 4, "model": 2}, plain=training(mlp, ADAM))
    assert {shard.data.size for shard in jax.tree.leaves(got)[-1].addressable_shards} == {10}


def test_what_is_not_finite_is_counted_by_device() -> None:
    step = training(mlp, ADAM)
    params = {**PARAMS, "in": PARAMS["in"].at[2, 7].set(jnp.inf)}
    decorated = jaxdist.parallel(step, mesh=mesh({"data": 2, "model": 2}), layouts=LAYOUTS, check_finite=True)
    with pytest.raises(FloatingPointError, match=r"result\[0\]\[0\]\['in'\] is not finite: .* on device 2, 3\."):
        decorated((params, ADAM.init(params)), X[0])


def test_loops_split_by_one_axis_and_summed_over_the_other() -> None:
    """A gradient that is added up in a loop is in slices of the model axis, and a summand of the data axis."""

    def step(params: Any, x: Any) -> Any:
        def body(total: Any, scale: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(mlp)(params, x * scale)), scale * 2

        grads, scales = lax.scan(body, jax.tree.map(jnp.zeros_like, params), jnp.arange(1.0, 4.0))

        def turn(i: Any, carried: Any) -> Any:
            p, total = carried
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), total + mlp(p, x) + i * jnp.sum(x)

        params, total = lax.fori_loop(0, 3, turn, (params, 0.0))
        small = lax.while_loop(
            lambda p: jnp.linalg.norm(p["out"]) > 0.5, lambda p: jax.tree.map(lambda w: 0.7 * w, p), params
        )
        return small, (total, scales)

    same(step, PARAMS, LAYOUTS)


def test_branches_on_what_one_axis_knows() -> None:
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(mlp)(params, x)
        halve = lambda tree: jax.tree.map(lambda g: g / 2, tree)
        grads = lax.cond(jnp.max(params["in"]) > 0.5, halve, lambda tree: tree, grads)  # that of the model
        grads = lax.cond(jnp.sum(x) > 0, halve, lambda tree: tree, grads)  # that of data
        k = jnp.argmax(params["b"]) % 3
        picked = lax.switch(k, [jnp.sum, jnp.max, lambda x: x[0]], x[:, 0])
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), picked

    same(step, PARAMS, LAYOUTS)


def test_names_of_axes_have_size_one() -> None:
    """Those of all axes at once, beside one name of the user's own."""

    def named(of: Any, at: Any) -> Step:
        def step(params: Any, x: Any) -> Any:
            grads = of(jax.grad(mlp)(params, x))
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), at(x)

        return step

    step = named(
        lambda grads: lax.pmean(lax.psum(grads, ("data", "model")), "batch"),
        lambda x: (lax.all_gather(x.mean(), "sequence"), lax.axis_index("model"), lax.pmax(x.max(), "model")),
    )
    plain = named(lambda grads: grads, lambda x: (x.mean()[None], jnp.int32(0), x.max()))
    same(step, PARAMS, LAYOUTS, plain=plain)
    same(step, PARAMS, on={"data": 2}, plain=plain)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mesh": None}, TypeError, r"mesh=None: the sizes of its axes"),
    ({"mesh": 3}, TypeError, "or 'auto'"),
    ({"mesh": "automatic"}, ValueError, r"mesh='automatic': the sizes of its axes.* or 'auto'"),
    ({"mesh": ""}, ValueError, "or 'auto'"),
    ({"mesh": {}}, ValueError, r"mesh=\{\}: expected the size of each axis"),
    ({"mesh": {"tensor": 8}}, ValueError, "there is no axis 'tensor'; valid: data, model, sequence"),
    ({"mesh": {"data": 3, "model": 2}}, ValueError, "the job has 8 devices, which these sizes don't make"),
    ({"layouts": [("in", 1)]}, TypeError, r"layouts=.*: a dictionary, as"),
    ({"layouts": {"(": 1}}, ValueError, r"'\(' is no regular expression: missing \)"),
    ({"layouts": {"in": "1"}}, TypeError, "the dimension to cut, a number, or None"),
    ({"layouts": {"in": True}}, TypeError, "the dimension to cut, a number, or None"),
    ({"layouts": {"'b'": 1}}, ValueError, r"leaf params\['b'\] has shape \(10,\), and no dimension 1 for the 2 dev"),
    ({"layouts": {"up": 1}}, ValueError, "'up' is found in no leaf of the state"),
    ({"batch_argnum": 1}, TypeError, "there is no option 'batch_argnum'; valid: batch_argnums, "),
    ({"check_every": -1}, ValueError, "check_every=-1"),
]


@pytest.mark.parametrize(("given", "kind", "said"), WRONG, ids=[str(given) for given, _, _ in WRONG])
def test_what_means_nothing_is_refused(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    step = lambda params, x: jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(mlp)(params, x))
    options: Any = {"mesh": {"data": 4, "model": 2}, **given}
    with pytest.raises(kind, match=said):
        jaxdist.parallel(step, **options)(PARAMS, X[0])
