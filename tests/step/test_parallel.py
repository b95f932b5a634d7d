"""`parallel`: meshes of several axes, as on one device."""

from __future__ import annotations

from typing import Any

import idioms
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from meshes import layouts, mesh

import jaxdist

MESHES: list[dict[str, int]] = [
    {"data": 2, "model": 2},
    {"model": 4},
    {"data": 2, "sequence": 2},
    {"data": 2, "model": 2, "sequence": 2},
    {"model": 2, "data": 3},
]
NAMES = list(idioms.IDIOMS)
STEPS = 2


def check(name: str, sizes: dict[str, int], level: Any, rows: int) -> None:
    want = oracle.run_plain(oracle.idiom(name, rows), STEPS, rows)
    case = oracle.idiom(name, rows, level)
    given = layouts(case.step, (*case.state, case.batch(0)), name, sizes["model"]) if "model" in sizes else None
    decorated = jaxdist.parallel(case.step, mesh=mesh(sizes), layouts=given)
    state, losses = oracle._run(lambda state, i: decorated(*state, case.batch(i)), case.state, STEPS)
    got = jaxdist.unshard(state), losses
    assert oracle.difference(want, got) <= max(case.tolerance, 1e-10)


TURNS = [(sizes, level) for level in (0, 3, 1, 2) for sizes in MESHES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "level"), [(name, *TURNS[i % len(TURNS)]) for i, name in enumerate(NAMES)], ids=str
)
def test_idioms(name: str, sizes: dict[str, int], level: Any) -> None:
    check(name, sizes, level, 20 if name in idioms.DIVISIBLE else 21 if level % 2 else 24)


@pytest.mark.parametrize("length", [12, 13])
def test_gradients_of_gathered_keys_and_values_are_reduced_into_slices(length: int) -> None:
    """Each device has use for those of its part of the sequence, and computes no more of what comes before them."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            q, k, v = (jnp.tanh(x) @ w["in"] @ w[name] for name in "qkv")
            return jnp.mean(jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v)

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda w, g: w - g, w, grads), value

    rng = np.random.default_rng(0)
    w = {name: rng.normal(size=(6, 6)) for name in ("in", "q", "k", "v")}
    x = rng.normal(size=(2, length, 6))
    want = jax.jit(step)(w, x)
    for sizes in ({"sequence": 3}, {"sequence": 2, "data": 2}):
        decorated = jaxdist.parallel(step, mesh=mesh(sizes), donate=False)
        found = jaxdist.explain(decorated, w, x)
        kinds = {row.what for row in found.rows}
        assert "reduce-scatter" in kinds, found
        assert "repeated" not in kinds, found
        assert oracle.difference(want, jaxdist.unshard(decorated(w, x))) < 1e-10
