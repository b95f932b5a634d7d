"""What can't be a layout is an error that says what could."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxdist

LAYOUTS = [
    ({"w": "1"}, r"layouts=\{'w': '1'\}: layouts map regular expressions to the dimension that is cut"),
    ({"w": True}, r"layouts=\{'w': True\}: layouts map"),
    ({0: 1}, r"layouts=\{0: 1\}: layouts map"),
    ([("w", 1)], r"layouts=\[\('w', 1\)\]: layouts map"),
    ({"(": 1}, r"layouts: '\(' is no regular expression: missing \)"),
    ({"nope": 1}, r"layouts: 'nope' is found in no leaf of the state; its leaves are w"),
    (
        {"w": 2},
        r"layouts=\{'w': 2\}: leaf w has shape \(3, 4\), and no dimension 2 for the 2 devices of the axis 'model'",
    ),
]


@pytest.mark.parametrize(("layouts", "message"), LAYOUTS, ids=str)
def test_errors(layouts: Any, message: str) -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("model",))
    step = jaxdist.parallel(lambda w, x: (w, jnp.mean(x @ w)), mesh=mesh, layouts=layouts)
    with pytest.raises(ValueError, match=message):
        step(jnp.ones((3, 4)), jnp.ones((8, 3)))
