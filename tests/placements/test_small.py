"""Small steps with many messages: computed whole on every device, to the same numbers, and nothing else is."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from catalogue import idioms
from harness import oracle, parity

import jaxdist
from jaxdist.machine import VIRTUAL
from jaxdist.placements.options import ALL
from jaxdist.step.decorated import DataParallel

pytestmark = pytest.mark.usefixtures("messages_take_time")

WAYS = [(2, 0, 24), (3, 3, 20), (4, 1, 20), (8, 2, 24)]
"""Devices, level of ZeRO, examples."""
CHATTY = [
    "accumulation_contrastive", "aux_in_order", "aux_of_all_kinds", "consecutive_differences", "gan_concatenated",
    "graph_messages", "in_batch_softmax", "listwise_ranking", "mmd_median_kernel", "moe_expert_choice",
    "nearest_neighbour", "pairwise_ranking", "ppo_shuffled_minibatches", "quantile_clipping", "scaled_by_largest",
    "spearman_double_argsort",
]  # fmt: skip


def is_whole(step: Any, *args: Any) -> bool:
    decorated: DataParallel = step if isinstance(step, DataParallel) else parity.decorated(step, 4)
    placed = decorated.placed(*args)
    return placed[-1].whole


def ranked(w: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
    """Four gathers, each of which follows from the one before."""

    def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        score = x @ w
        for _ in range(4):
            score = jnp.sort(score) * jnp.tanh(score)
        return score.sum(), score

    (_, score), grad = jax.value_and_grad(loss, has_aux=True)(w)
    return w - 0.1 * grad, score


@pytest.mark.slow  # together
@pytest.mark.parametrize("name", CHATTY)
def test_the_numbers_are_those_of_one_device(name: str) -> None:
    devices, level, rows = WAYS[CHATTY.index(name) % len(WAYS)]
    case = oracle.idiom(name, rows, level)
    step, state = idioms.IDIOMS[name](lambda tx: tx)
    assert is_whole(step, *state, idioms.batch(0, rows)), "it is no example any more"
    got = oracle.run_decorated(case, steps=2, rows=rows, mesh=parity.mesh(devices))
    assert oracle.difference(oracle.run_plain(oracle.idiom(name, rows), 2, rows), got) <= case.tolerance


def test_one_message_in_place_of_many() -> None:
    args = jnp.ones(3), jnp.ones((16, 3))
    assert is_whole(ranked, *args)
    sent = Counter(kind for kind, *_ in parity.collectives(parity.program(ranked, *args, devices=4)))
    assert sent == {"all-gather": 1}


@pytest.mark.parametrize("rows", [16, 18])
def test_what_comes_back_is_kept_as_ever(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    args = jnp.arange(3.0), jnp.arange(rows * 3.0).reshape(rows, 3) / rows
    whole = parity.decorated(ranked, 4)
    got = whole(*args)
    assert is_whole(whole, *args)
    parity.compare(got, jax.jit(ranked)(*args))
    monkeypatch.setattr(jaxdist.get_context(), "kind", dataclasses.replace(VIRTUAL.kind, latency=0))
    apart = parity.decorated(ranked, 4)(*args)
    assert [x.sharding for x in got] == [x.sharding for x in apart]


def test_state_in_shards_stays_so() -> None:
    tx = jaxdist.zero(optax.adam(1e-2), level=3)

    def step(w: jax.Array, opt: Any, x: jax.Array) -> Any:
        new, _ = ranked(w.reshape(-1), x)
        updates, opt = tx.update((w.reshape(-1) - new).reshape(w.shape), opt, w)
        return optax.apply_updates(w, updates), opt

    w = jnp.arange(24.0).reshape(8, 3)
    decorated = parity.decorated(step, 4)
    opt, x = tx.init(w), jnp.ones((16, 24))
    assert is_whole(decorated, w, opt, x)
    new, opt = decorated(w, opt, x)
    assert not new.is_fully_replicated
    assert {x.sharding.is_fully_replicated for x in jax.tree.leaves(opt) if x.ndim} == {False}


def test_work_on_whole_matrices_that_has_owners() -> None:
    """Whole, more of it may be found, from which that follows which has them if the examples are split."""
    tx = jaxdist.zero(optax.adam(1e-2), level=3, split="owners")

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        left = right = jnp.ones(8)
        for _ in range(3):  # a power iteration
            right = w.T @ left
            right /= jnp.linalg.norm(right)
            left = w @ right
            left /= jnp.linalg.norm(left)
        score = x @ (w / (left @ w @ right)).ravel()
        for _ in range(4):
            score = jnp.sort(score) * jnp.tanh(score)
        return score.sum()

    def step(w: jax.Array, opt: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        updates, opt = tx.update(grads, opt, w)
        return optax.apply_updates(w, updates), opt, value

    w, x = jax.random.normal(jax.random.key(0), (8, 8)), jax.random.normal(jax.random.key(1), (16, 64))
    decorated = parity.decorated(step, 4)
    args = w, tx.init(w), x
    assert is_whole(decorated, *args)
    parity.compare(decorated(*args), jax.jit(step)(*args))


@pytest.mark.parametrize(
    ("why", "step", "args"),
    [
        ("nothing couples the examples", lambda w, x: w - jnp.mean(jnp.tanh(x @ w)), (jnp.ones(3), jnp.ones((16, 3)))),
        ("the batch is large", ranked, (jnp.ones(3), jnp.ones((1 << 16, 3)))),
        ("there is much to compute", lambda w, x: ranked(w, jnp.tanh(jnp.tile(x, 512) @ jnp.ones((1536, 3)))),
         (jnp.ones(3), jnp.ones((1024, 3)))),
    ],
)  # fmt: skip
def test_what_is_not_small(why: str, step: Any, args: Any) -> None:
    assert not is_whole(step, *args), why


def test_it_is_said_when_asked_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    args = jnp.ones(3), jnp.ones((16, 3))
    decorated = parity.decorated(ranked, 4)
    text = str(jaxdist.explain(decorated, *args))
    assert "the step is small" in text
    assert f"all of it: {ALL}; otherwise: +" in text
    assert "100.0% of the FLOPs" in text
    with caplog.at_level(logging.WARNING, "jaxdist"):
        decorated(*args)
    assert not caplog.records
