"""`parallel`: meshes of several axes, as on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from meshes import mesh

import jaxdist


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
