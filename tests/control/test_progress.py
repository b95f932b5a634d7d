"""How far a rank is with a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxdist.control.progress import ActiveCall


@pytest.mark.parametrize("result", [lambda: (jnp.ones(3), jax.random.key(0)), lambda: jax.random.key(0)])
def test_a_call_that_returns_a_key_is_asked_all_the_same(result) -> None:
    call = ActiveCall(1, 0.0)
    call.finish(jax.block_until_ready(result()))
    assert call.finished()
