"""The offload pass: when what is in the host's memory comes, and what runs in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.errors import StepError
from jaxdist.ir.interpreter import Interpreter
from jaxdist.ir.primitives import FETCHED, mark
from jaxdist.mesh import AXIS, Axis
from jaxdist.placements.offload import staged

AXES = [Axis(AXIS, 4)]
SIZES = [64, 8, 64, 2]


def program(clip: bool = False, coupled: bool = False, sizes: Sequence[int] = SIZES) -> Any:
    """Of momentum for leaves whose gradients come in backward order; the arguments are the momenta and the batch."""

    def update(*args: Any) -> Any:
        *states, x = args
        gradients: list[Any] = [None] * len(states)
        for k in reversed(range(len(states))):
            x = jnp.tanh(x)
            gradients[k] = jnp.outer(x, jnp.arange(1.0, len(states[k]) + 1)).sum(0)
        gradients = [mark(g, "gradient", 1, offload=True) for g in gradients]
        if clip:
            norm = sum(jnp.sum(g**2) for g in gradients)
            gradients = [g / norm for g in gradients]
        new = [0.9 * s + g for s, g in zip(states, gradients, strict=True)]
        return [s / (1 + sum(map(jnp.sum, new))) for s in new] if coupled else new

    return jax.make_jaxpr(update)(*map(jnp.ones, sizes), jnp.ones(3))


def fetches(closed: Any) -> list[tuple[list[int], set[str]]]:
    """Of each stage the arguments that come, and by what the others that it waits for are made."""
    made = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    found = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "jaxdist_fetch":
            count = eqn.params["count"]
            positions = [closed.jaxpr.invars.index(v) for v in eqn.invars[:count]]
            found.append((positions, {made[v].primitive.name for v in eqn.invars[count:]}))
    return found


def test_in_the_order_of_gradients() -> None:
    closed = staged(program(), {i: i for i in range(4)}, AXES)
    # The last one is small, and comes with the one before; each stage waits for the update of that before.
    assert fetches(closed) == [([3, 2], {"jaxdist_shard"}), ([1, 0], {"jaxdist_shard", "add"})]
    args = [jnp.full(n, 2.0) for n in SIZES] + [jnp.ones(3)]
    want = Interpreter({}).run(program(), *args)
    names = [eqn.primitive.name for eqn in closed.jaxpr.eqns]
    assert names.index("jaxdist_fetch") > max(i for i, name in enumerate(names) if name == "jaxdist_shard")
    run = Interpreter(FETCHED).run
    got = jax.jit(lambda *xs: run(closed, *xs))(*args)
    assert all(jnp.allclose(a, b) for a, b in zip(got, want, strict=True))


def test_at_most_16() -> None:
    """As is documented; each has a sixteenth of the bytes, or more."""
    for sizes, count in [([8] * 32, 16), ([8] * 33, 11), ([8, 64] * 32, 16), ([8] * 5, 5)]:
        stages = fetches(staged(program(sizes=sizes), {i: i for i in range(len(sizes))}, AXES))
        assert len(stages) == count
        assert sorted(i for stage, _ in stages for i in stage) == list(range(len(sizes)))


def test_not_before_what_all_gradients_make() -> None:
    stages = fetches(staged(program(clip=True), {i: i for i in range(4)}, AXES))
    assert [stage for stage, _ in stages] == [[0], [1, 2], [3]]
    assert [after for _, after in stages] == [{"add"}] * 3, "the norm, and the update before"


def test_what_follows_from_each_other_comes_together() -> None:
    (stage,) = fetches(staged(program(coupled=True), {i: i for i in range(4)}, AXES))
    assert sorted(stage[0]) == [0, 1, 2, 3]


def test_without_a_next_value_and_without_gradients() -> None:
    closed = jax.make_jaxpr(lambda a, b, c: (a.sum() + c, b))(*map(jnp.ones, (8, 8)), 1.0)
    assert fetches(staged(closed, {0: None, 1: 1}, AXES)) == [([0], set()), ([1], set())]
    assert staged(closed, {}, AXES) is closed


def test_ordered_effects() -> None:
    def shown(x: Any) -> Any:
        jax.debug.callback(lambda _: None, lax.neg(x), ordered=True)
        return x

    with pytest.raises(StepError, match="ordered=True"):
        staged(jax.make_jaxpr(shown)(1.0), {0: 0}, AXES)


def test_calls_are_looked_into() -> None:
    """An optimizer may update all of its state in one."""
    calls = jax.make_jaxpr(jax.jit(Interpreter(FETCHED).run, static_argnums=0), static_argnums=0)(
        program(), *map(jnp.ones, SIZES), jnp.ones(3)
    )
    assert [eqn.primitive.name for eqn in calls.jaxpr.eqns] == ["jit"]
    assert len(fetches(staged(calls, {i: i for i in range(4)}, ()))) == 2
