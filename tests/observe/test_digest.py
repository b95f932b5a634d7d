"""`jaxdist.digest`: a number for all bits of a state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from harness.steps import train_step

import jaxdist

STATE = {
    "w": np.arange(35, dtype=np.float32).reshape(5, 7), "half": np.arange(6).astype(ml_dtypes.bfloat16), "step": 3,
    "key": jax.random.key(1), "name": "a", "none": None, "empty": np.zeros((0, 3)), "flag": True,
}  # fmt: skip


@pytest.mark.parametrize("level", [1, 3])
def test_however_a_state_is_kept(level: int) -> None:
    """On the mesh in shards, some of them padded; whole on the host."""
    tx = jaxdist.zero(optax.adam(0.1), level)  # type: ignore[arg-type]
    params = {"even": jnp.ones((16, 3)), "odd": jnp.ones((9, 5))}
    loss = lambda p, x: jnp.mean((x @ p["even"]) ** 2) + jnp.sum(p["odd"] ** 2)
    state: Any = jaxdist.data_parallel(train_step(loss, tx))(params, tx.init(params), jnp.ones((8, 16)))[:2]
    host = jax.tree.map(np.asarray, jaxdist.unshard(state))
    assert jaxdist.digest(state) == jaxdist.digest(host) < 1 << 53


@pytest.mark.parametrize(
    "change",
    [
        {"w": np.nextafter(STATE["w"], 99)}, {"w": STATE["w"].reshape(7, 5)}, {"w": STATE["w"].view(np.int32)},
        {"half": -STATE["half"]}, {"step": 4}, {"key": jax.random.key(2)}, {"name": "b"}, {"flag": False},
        {"empty": np.zeros((3, 0))}, {"none": 0},
    ],
    ids=str,
)  # fmt: skip
def test_any_change_is_seen(change: dict[str, Any]) -> None:
    assert jaxdist.digest(STATE) == jaxdist.digest(dict(STATE))
    assert jaxdist.digest(STATE | change) != jaxdist.digest(STATE)
