"""Work on whole matrices, divided over the devices: ``zero(..., split=)``."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue.matrix_optimizers import MAKERS, difference, parameters, step_of, trained
from harness.parity import mesh

import jaxdist
from jaxdist.planning import schedule

CHAIN = ((6, 10), (10, 10), (10, 7), (7, 12), (12, 6))
"""Shapes that 2, 3, 4 and 8 devices don't all divide."""


# --- as on one device


WAYS = [
    (2, 1, None, "owners"), (3, 2, None, "owners"), (8, 3, None, "owners"), (8, 2, 4, "owners"), (4, 2, None, None),
    (4, 1, None, "slices"), (4, 3, 2, "owners"), (8, 1, 2, "owners"), (8, 3, 4, "slices"),
]  # fmt: skip
"""Devices, level, groups of them, `split`: each optimizer in two, or with JAXDIST_FULL set in all."""
CASES = list(itertools.product(MAKERS, WAYS)) if "JAXDIST_FULL" in os.environ else [
    (name, WAYS[(2 * i + k) % len(WAYS)]) for i, name in enumerate(MAKERS) for k in range(2)
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_as_on_one_device(name: str, way: Any) -> None:
    devices, level, within, split = way
    assert difference(MAKERS[name](), CHAIN, devices, level, within=within, split=split) < 1e-10


@pytest.mark.parametrize(("layers", "split"), [(8, None), (5, None), (2, "owners")])
def test_stacked_layers(layers: int, split: Any) -> None:
    assert difference(MAKERS["muon"](), ((6, 16), (layers, 16, 12), (12, 8)), split=split) < 1e-10


@pytest.mark.parametrize(("shape", "split"), [((6, 6, 4), None), ((5, 6, 4), "owners")], ids=str)
def test_a_loop_over_layers_that_the_devices_do_not_divide(shape: Any, split: Any) -> None:
    """A stack can't be given to them by layers then."""

    def turn(g: Any, _: Any) -> Any:
        return -0.1 * (jax.lax.map(lambda x: jnp.linalg.qr(x)[0] @ (x.T @ x), g) if g.ndim == 3 else g)

    assert difference(optax.stateless_with_tree_map(turn), ((6, shape[1]), shape), split=split) < 1e-10


def test_matrices_of_other_types() -> None:
    tx = MAKERS["ranks"]()
    params = [p.astype(jnp.bfloat16) for p in parameters(*CHAIN)]
    want = jax.eval_shape(step_of(tx), params, tx.init(params), np.zeros((24, 6)))
    sharded = jaxdist.zero(tx, 2, split="owners")
    got = trained(jaxdist.data_parallel(step_of(sharded), mesh=mesh(4)), params, sharded.init(params), 1)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]


def with_a_penalty(penalty: Any) -> Any:
    """A loss of two matrices, one after the other, and of each by itself."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) ** 2) + sum(map(penalty, params))

    return loss


def test_of_parameters_alone() -> None:
    """A penalty of the model's matrices, in the loss: it has a gradient."""
    loss = with_a_penalty(lambda p: jnp.linalg.norm(p.T @ p - jnp.eye(p.shape[1])) + jnp.linalg.norm(p, 2))
    assert difference(optax.adam(1e-2), ((16, 12), (12, 20)), level=3, loss=loss, split="owners") < 1e-10


def test_all_divided_by_a_number_of_one() -> None:
    def turn(updates: Any, _: Any = None) -> Any:
        scale = jnp.linalg.svd(updates[0], compute_uv=False)[0]
        return [-0.1 * (x @ x.T @ x) for x in (g / scale for g in updates)]

    assert difference(optax.stateless(turn), CHAIN, split="owners") < 1e-10


# --- what it takes


SQUARES = ((128, 128),) * 8


def program(name: str, devices: int, shapes: Any = SQUARES, **asked: Any) -> Any:
    """A decorated step, compiled."""
    tx, params = jaxdist.zero(MAKERS[name](), 2, **asked), parameters(*shapes)
    step = jaxdist.data_parallel(step_of(tx), mesh=mesh(devices))
    return step.lower(params, tx.init(params), np.zeros((32, shapes[0][-2]))).compile()


def collectives(text: str) -> Counter[str]:
    """Of a compiled program, by kind."""
    return Counter(re.findall(r" (all-to-all|all-gather|all-reduce|reduce-scatter)\(", text))


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("muon", 8), ("soap", 4)])
def test_no_device_computes_what_another_one_does(name: str, devices: int) -> None:
    tx, params = MAKERS[name](), parameters(*SQUARES)
    one: Any = jax.jit(step_of(tx)).lower(params, tx.init(params), np.zeros((32, 128))).compile()
    many = program(name, devices)
    assert many.cost_analysis()["flops"] <= 1.1 / devices * one.cost_analysis()["flops"]
    # XLA counts no FLOPs of these, but each is a call, in the program of one device.
    calls = [Counter(re.findall(r'custom_call_target="(lapack_\w+)"', p.as_text())) for p in (one, many)]
    assert calls[0] == calls[1]


@pytest.mark.optimised
@pytest.mark.parametrize("within", [None, 2])
def test_matrices_travel_to_their_owners_and_back(within: Any) -> None:
    many = program("muon", 4, SQUARES[:4], within=within)
    groups = [one.groups for one in schedule.collectives(many.as_text(), 4) if one.kind == "all-to-all"]
    assert groups == [((0, 1), (2, 3)) if within else ((0, 1, 2, 3),)] * 2


def explained(tx: Any, shapes: Any) -> Any:
    params = parameters(*shapes)
    step = jaxdist.data_parallel(step_of(tx), mesh=mesh(4))
    return jaxdist.explain(step, params, tx.init(params), np.zeros((32, shapes[0][-2]))).rows


def test_a_stack_is_split_along_its_layers() -> None:
    rows = explained(jaxdist.zero(MAKERS["muon"](), 2), ((8, 64, 64),))
    assert not [row for row in rows if row.what == "all-gather of shards" and row.operation == "dot_general"]


def test_what_is_asked_for_is_done() -> None:
    owners, slices = (
        collectives(program("muon", 4, ((32, 32),) * 4, split=split).as_text()) for split in ("owners", "slices")
    )
    assert owners["all-to-all"] == 2
    assert slices["all-to-all"] == 0
    assert slices["all-gather"] > owners["all-gather"]


def test_a_penalty_of_parameters_sends_each_once_and_its_gradient_back() -> None:
    loss = with_a_penalty(lambda w: 1e-3 * jnp.sum((w.T @ w - jnp.eye(w.shape[1])) ** 2))
    params, gathered = parameters((64, 64), (64, 64)), {}
    for split in ("owners", "slices"):
        tx = jaxdist.zero(optax.sgd(0.1), 3, split=split)
        step = jaxdist.data_parallel(step_of(tx, loss), mesh=mesh(4))
        rows = jaxdist.explain(step, params, tx.init(params), np.zeros((24, 64))).rows
        gathered[split] = sum(row.bytes for row in rows if row.what == "all-gather of shards")
        sent = sum(row.bytes for row in rows if row.operation == "jaxdist_owners")
        assert sent == (2 * sum(x.nbytes for x in params) if split == "owners" else 0)
    assert gathered["owners"] == gathered["slices"]


def test_explain_names_them() -> None:
    rows = explained(jaxdist.zero(MAKERS["shampoo"](), 2), CHAIN)
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
