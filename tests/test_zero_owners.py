"""Work on whole matrices, divided over the devices: ``zero(..., split=)``."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from jax.sharding import Mesh
from matrix_optimizers import MAKERS, parameters, step_of

import jaxdist
from jaxdist.planning import schedule

CHAIN = ((6, 10), (10, 10), (10, 7), (7, 12), (12, 6))
"""Shapes that 2, 3, 4 and 8 devices don't all divide."""


def mesh(devices: int) -> Mesh:
    return Mesh(jax.devices()[:devices], ("data",))


def trained(step: Any, params: Any, opt_state: Any, steps: int = 4) -> Any:
    loss: Any = None
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(24, params[0].shape[-2]))
        params, opt_state, loss = step(params, opt_state, x)
    return params, opt_state, loss


def difference(
    name: str, level: Any, shapes: Any = CHAIN, within: Any = None, split: Any = "owners", **settings: Any
) -> float:
    """The largest one between a step on one device and on several."""
    sharded, params = jaxdist.zero(MAKERS[name](), level, within, split), parameters(*shapes)
    got = trained(jaxdist.data_parallel(step_of(sharded), **settings), params, sharded.init(params))
    return optimizers.gap(_on_one_device(name, shapes), got)


@functools.cache
def _on_one_device(name: str, shapes: Any) -> Any:
    tx, params = MAKERS[name](), parameters(*shapes)
    return trained(jax.jit(step_of(tx)), params, tx.init(params))


# --- as on one device


WAYS = [
    (2, 1, None, "owners"), (3, 2, None, "owners"), (8, 3, None, "owners"), (8, 2, 4, "owners"), (4, 2, None, None),
    (4, 1, None, "slices"), (4, 3, 2, "owners"), (8, 1, 2, "owners"), (8, 3, 4, "slices"),
]  # fmt: skip
"""Devices, level, groups of them, `split`: each optimizer in three, or with JAXDIST_FULL set in all."""
CASES = list(itertools.product(MAKERS, WAYS)) if "JAXDIST_FULL" in os.environ else [
    (name, way) for i, name in enumerate(MAKERS) for way in WAYS[i % 3 :: 3]
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_as_on_one_device(name: str, way: Any) -> None:
    devices, level, within, split = way
    assert difference(name, level, within=within, split=split, mesh=mesh(devices)) < 1e-10


@pytest.mark.parametrize(("layers", "split"), [(8, None), (8, "owners"), (5, None), (2, "owners")])
def test_stacked_layers(layers: int, split: Any) -> None:
    shapes = ((6, 16), (layers, 16, 12), (12, 8))
    assert difference("muon", 2, shapes, split=split, mesh=mesh(4)) < 1e-10


@pytest.mark.parametrize(("shape", "split"), [((6, 8, 8), "owners"), ((6, 6, 4), None), ((5, 6, 4), "owners")], ids=str)
def test_a_loop_over_layers_that_the_devices_do_not_divide(shape: Any, split: Any) -> None:
    """A stack can't be given to them by layers then."""

    def turn(g: Any, _: Any) -> Any:
        return -0.1 * (jax.lax.map(lambda x: jnp.linalg.qr(x)[0] @ (x.T @ x), g) if g.ndim == 3 else g)

    tx, params = optax.stateless_with_tree_map(turn), parameters((6, shape[1]), shape)
    sharded = jaxdist.zero(tx, 2, split=split)
    want = trained(jax.jit(step_of(tx)), params, tx.init(params))
    got = trained(jaxdist.data_parallel(step_of(sharded), mesh=mesh(4)), params, sharded.init(params))
    assert optimizers.gap(want, got) < 1e-10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matrices_of_other_types(dtype: Any) -> None:
    tx = optax.chain(MAKERS["ranks"]())
    params = [p.astype(dtype) for p in parameters(*CHAIN)]
    want = trained(jax.jit(step_of(tx)), params, tx.init(params), 1)
    sharded = jaxdist.zero(tx, 2, split="owners")
    got = trained(jaxdist.data_parallel(step_of(sharded), mesh=mesh(4)), params, sharded.init(params), 1)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]


@pytest.mark.parametrize("level", [1, 3])
def test_of_parameters_alone(level: Any) -> None:
    """A penalty of the model's matrices, in the loss: it has a gradient."""

    def step_with(tx: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            fit = jnp.mean(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) ** 2)
            return fit + sum(jnp.linalg.norm(p.T @ p - jnp.eye(p.shape[1])) + jnp.linalg.norm(p, 2) for p in params)

        def step(params: Any, opt_state: Any, x: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        return step

    tx, params = optax.adam(1e-2), parameters((16, 12), (12, 20))
    sharded = jaxdist.zero(tx, level, split="owners")
    want = trained(jax.jit(step_with(tx)), params, tx.init(params))
    got = trained(jaxdist.data_parallel(step_with(sharded), mesh=mesh(4)), params, sharded.init(params))
    assert optimizers.gap(want, got) < 1e-10


@pytest.mark.parametrize("split", [None, "owners"])
def test_all_divided_by_a_number_of_one(split: Any) -> None:
    def turn(updates: Any, _: Any = None) -> Any:
        scale = jnp.linalg.svd(updates[0], compute_uv=False)[0]
        return [-0.1 * (x @ x.T @ x) for x in (g / scale for g in updates)]

    tx, params = optax.stateless(turn), parameters(*CHAIN)
    sharded = jaxdist.zero(tx, 2, split=split)
    want = trained(jax.jit(step_of(tx)), params, tx.init(params))
    got = trained(jaxdist.data_parallel(step_of(sharded), mesh=mesh(4)), params, sharded.init(params))
    assert optimizers.gap(want, got) < 1e-10


# --- what it takes


SQUARES = ((128, 128),) * 8


def program(name: str, devices: int, shapes: Any = SQUARES, within: Any = None, split: Any = None) -> tuple[Any, Any]:
    """A step on one device and its decorated form, compiled."""
    tx, params = MAKERS[name](), parameters(*shapes)
    sharded = jaxdist.zero(tx, 2, within, split)
    x = np.zeros((32, shapes[0][-2]))
    one = jax.jit(step_of(tx)).lower(params, tx.init(params), x).compile()
    step = jaxdist.data_parallel(step_of(sharded), mesh=mesh(devices))
    return one, step.lower(params, sharded.init(params), x).compile()


def collectives(text: str) -> Counter[str]:
    """Of a compiled program, by kind."""
    return Counter(re.findall(r" (all-to-all|all-gather|all-reduce|reduce-scatter)\(", text))


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("muon", 8), ("galore", 4), ("shampoo", 8), ("soap", 4)])
def test_no_device_computes_what_another_one_does(name: str, devices: int) -> None:
    one, many = program(name, devices)
    assert many.cost_analysis()["flops"] <= 1.1 / devices * one.cost_analysis()["flops"]
    # XLA counts no FLOPs of these, but each is a call, in the program of one device.
    calls = [Counter(re.findall(r'custom_call_target="(lapack_\w+)"', p.as_text())) for p in (one, many)]
    assert calls[0] == calls[1]


@pytest.mark.optimised
@pytest.mark.parametrize("within", [None, 2])
def test_matrices_travel_to_their_owners_and_back(within: Any) -> None:
    _, many = program("muon", 4, SQUARES[:4], within)
    groups = [one.groups for one in schedule.collectives(many.as_text(), 4) if one.kind == "all-to-all"]
    assert groups == [((0, 1), (2, 3)) if within else ((0, 1, 2, 3),)] * 2


def test_a_stack_is_split_along_its_layers() -> None:
    shapes = ((8, 64, 64),)
    tx, params = MAKERS["muon"](), parameters(*shapes)
    sharded = jaxdist.zero(tx, 2)
    step = jaxdist.data_parallel(step_of(sharded), mesh=mesh(4))
    rows = jaxdist.explain(step, params, sharded.init(params), np.zeros((32, 64))).rows
    assert not [row for row in rows if row.what == "all-gather of shards" and row.operation == "dot_general"]


def test_what_is_asked_for_is_done() -> None:
    kinds = {}
    for split in ("owners", "slices"):
        _, many = program("muon", 4, ((32, 32),) * 4, split=split)
        kinds[split] = collectives(many.as_text())
    assert kinds["owners"]["all-to-all"] == 2
    assert kinds["slices"]["all-to-all"] == 0
    assert kinds["slices"]["all-gather"] > kinds["owners"]["all-gather"]


def test_a_penalty_of_parameters_sends_each_once_and_its_gradient_back() -> None:
    def loss(params: Any, x: Any) -> Any:
        fit = jnp.mean(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) ** 2)
        return fit + 1e-3 * sum(jnp.sum((w.T @ w - jnp.eye(w.shape[1])) ** 2) for w in params)

    params, gathered = parameters((64, 64), (64, 64)), {}
    for split in ("owners", "slices"):
        tx = jaxdist.zero(optax.sgd(0.1), 3, split=split)

        def step(params: Any, x: Any, tx: Any = tx) -> Any:
            updates, _ = tx.update(jax.grad(loss)(params, x), tx.init(params), params)
            return optax.apply_updates(params, updates)

        rows = jaxdist.explain(jaxdist.data_parallel(step, mesh=mesh(4)), params, np.zeros((24, 64))).rows
        gathered[split] = sum(row.bytes for row in rows if row.what == "all-gather of shards")
        sent = sum(row.bytes for row in rows if row.operation == "jaxdist_owners")
        assert sent == (2 * sum(x.nbytes for x in params) if split == "owners" else 0)
    assert gathered["owners"] == gathered["slices"]


def test_explain_names_them() -> None:
    tx, params = jaxdist.zero(MAKERS["shampoo"](), 2), parameters(*CHAIN)
    step = jaxdist.data_parallel(step_of(tx), mesh=mesh(4))
    rows = jaxdist.explain(step, params, tx.init(params), np.zeros((24, 6))).rows
    (row,) = [row for row in rows if row.operation == "jaxdist_owners" and row.what == "all-to-all of shards"]
    assert row.bytes > 0
    assert "matrix_optimizers.py" in row.line


# --- errors


@pytest.mark.parametrize("bad", ["owner", 2, True, ("owners",)])
def test_no_such_way(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"split=.*'owners'.*'slices'"):
        jaxdist.zero(optax.sgd(0.1), 2, split=bad)


def test_one_step_has_one_way() -> None:
    txs = [jaxdist.zero(optax.sgd(0.1), 2, split=split) for split in ("owners", "slices")]

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: sum(jnp.mean((x @ w) ** 2) for w in p))(params)
        updates = [tx.update(g, tx.init(p), p)[0] for tx, g, p in zip(txs, grads, params, strict=True)]
        return optax.apply_updates(params, updates)

    with pytest.raises(ValueError, match="same `split`"):
        jaxdist.data_parallel(step, mesh=mesh(2))([jnp.ones((4, 4)), jnp.ones((4, 4))], np.ones((8, 4)))
