"""Options of operations are taken for what the whole block costs, not one by one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import parity
from harness.steps import train_step

import jaxdist


def pair_and_many(params: tuple[Any, Any], x: Any) -> Any:
    """One weight in two products, on two lines; another one in twenty."""
    pair, many = params
    x = jnp.tanh(x @ pair)
    x = jnp.tanh(x @ pair.T)
    for _ in range(20):
        x = jnp.tanh(x @ many)
    return jnp.mean(x**2)


def normed(params: tuple[Any, Any], x: Any) -> Any:
    x = x @ params[0]
    return jnp.mean(((x / jnp.sqrt(jnp.mean(x**2, 0))) @ params[1]) ** 2)


@pytest.mark.parametrize(
    ("width", "rows", "gathered", "why"),
    [
        (512, 32, 2, "neither product of the pair is worth it alone, and all twenty of the other weight are not"),
        (1536, 16, 0, "what the rows are gathered for by one weight's products the other's need as well"),
    ],
)
def test_what_is_worth_it_together_is_taken_together(width: int, rows: int, gathered: int, why: str) -> None:
    tx = jaxdist.zero(optax.sgd(0.1), level=3)
    params, x = (jnp.zeros((width, width), "f"),) * 2, jnp.zeros((rows, width), "f")
    program = parity.program(train_step(pair_and_many, tx), params, tx.init(params), x, devices=4)
    found = [math.prod(shape) for kind, shape, _ in parity.collectives(program) if kind == "all-gather"]
    assert found.count(width * width) == gathered, why


def test_which_messages_hold_up_what_is_computed() -> None:
    """Statistics that the next product needs; not gradients, nor weights, which are fetched ahead."""
    tx = jaxdist.zero(optax.sgd(0.1), level=3)
    params, x = (jnp.ones((16, 16)),) * 2, jnp.ones((32, 16))
    decorated: Any = parity.decorated(train_step(normed, tx), 4)
    (placed,) = decorated.placed(params, tx.init(params), x)
    waits = {True: set[tuple[str, int]](), False: set[tuple[str, int]]()}
    for move in placed.moves:
        waits[move.waited_for].add((move.kind, math.prod(move.aval.shape)))
    assert ("all-reduce", 16) in waits[True]
    assert {("all-gather", 256), ("reduce-scatter", 256)} <= waits[False]
    assert not {size for _, size in waits[True]} & {256}


@pytest.mark.parametrize(("rows", "travels"), [(512, True), (1024, False)])
def test_what_saves_little_is_left_as_usual(rows: int, travels: bool) -> None:
    """The examples of 1024 rows are fewer bytes than the gradient's sum, by less than an estimate can tell."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    program = parity.program(step, jnp.zeros((2048, 2048), "f"), jnp.zeros((rows, 2048), "f"), devices=2)
    kinds = {kind for kind, _, _ in parity.collectives(program)}
    assert kinds == ({"all-gather", "all-to-all"} if travels else {"all-reduce"})
