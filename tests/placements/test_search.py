"""The leaves that the model axis cuts, where nobody says them, and what it says of others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jaxdist
from jaxdist.mesh import Axis
from jaxdist.placements.cost import sent_by

WIDTH, HIDDEN, ROWS = 64, 1024, 64


def step(params: dict[str, Any], x: Any) -> Any:
    """Two wide layers in a row."""

    def loss(params: dict[str, Any]) -> Any:
        out = x
        for up, down in ("ab", "cd"):
            out = jax.nn.relu(out @ params[up]) @ params[down]
        return jnp.mean(out**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_what_it_would_take_to_cut_others_is_said() -> None:
    shapes = {"a": (WIDTH, HIDDEN), "b": (HIDDEN, WIDTH), "c": (WIDTH, HIDDEN), "d": (HIDDEN, WIDTH)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    args = params, jnp.zeros((ROWS, WIDTH))
    mesh = {"data": 2, "model": 4}
    found = jaxdist.explain(jaxdist.parallel(step, mesh=mesh), *args)
    pairs = [line for line in found.choices if line.startswith("params['c'] along 1, params['d'] along 0:")]
    assert len(pairs) == 1, found
    assert "cut by 'model'; otherwise: +" in pairs[0]
    assert any("as usual; if cut by 'model': +" in line for line in found.choices)


def test_it_is_what_it_takes() -> None:
    """The bytes of the other way are those of the layout that it is, given by hand."""
    params = {name: jnp.zeros(shape) for name, shape in {"c": (WIDTH, HIDDEN), "d": (HIDDEN, WIDTH)}.items()}
    args = params, jnp.zeros((ROWS, WIDTH))

    def one_layer(params: dict[str, Any], x: Any) -> Any:
        return step({**params, "a": params["c"], "b": params["d"]}, x)

    def sent(layouts: dict[str, int | None] | None) -> tuple[float, Any]:
        decorated: Any = jaxdist.parallel(one_layer, mesh={"model": 8}, layouts=layouts)
        placed = decorated.placed(*args)[0]
        infer = decorated.program(*args)._step.infer.over([Axis("model", 8)], 0)
        return sent_by(placed, infer), placed.weighed

    found, weighed = sent(None)
    (one,) = [one for one in weighed if one.of == ["params['c'] along 1", "params['d'] along 0"]]
    assert one.taken
    assert found + one.bytes == sent({".*": None})[0]
