"""What is known to be the same on all ranks; tests/mpi/run_copies.py has the jobs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.agreement import copies
from jaxdist.agreement.copies import Copies
from jaxdist.compat import mark, unmark, unmarked


@pytest.fixture(autouse=True)
def _of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_is_of_all", lambda x: isinstance(x, jax.Array))


def test_what_was_compared_is_known_and_what_is_made_of_it_is_not() -> None:
    known = Copies()
    arrays: list[Any] = [jnp.ones(2), jax.random.key(0), jnp.float32(3)]
    leaves = [*arrays, 1.0, np.ones(2), "text", None]
    assert known.unknown(leaves) == [0, 1, 2]
    copies.add(leaves)
    assert known.unknown(leaves) == []
    made = [arrays[0] * 1, jnp.copy(arrays[0]), jax.jit(lambda x: x)(arrays[0]), jax.random.fold_in(arrays[1], 0)]
    assert known.unknown([*leaves, *made]) == [7, 8, 9, 10]
    unmark([*leaves, *made])
    assert known.unknown(leaves) == [0, 1, 2]


def test_what_a_step_returned_follows_or_is_known() -> None:
    known, by, other = Copies(), object(), object()
    params, loss = [jnp.ones(2), jnp.zeros(2)], jnp.ones(())
    pick: Any = lambda outs: outs[:2]
    for small in (True, False):
        known.returned(by, [*params, loss], small)
        assert known.follow(by, params, pick) == small
        assert not known.follow(by, [params[0] * 1, params[1]], pick)
        assert known.unknown([*params, loss, params[0] * 1]) == [3]
        known.returned(other, [jnp.ones(3)], small)
        assert known.unknown([*params, loss]) == []
        assert not known.follow(by, params, pick)
        known.returned(by, params, small)
        known.forget(params)
        assert not known.follow(by, params, pick)
        assert known.unknown([*params, loss]) == [0, 1]
        params, loss = [x * 1 for x in params], loss * 1


def test_a_mark_goes_with_its_array() -> None:
    """And with no later one at the same address."""
    gone = []
    for _ in range(100):
        x = jnp.full(2, 3.0)
        assert unmarked([x]) == [0]
        mark([x])
        gone.append(weakref.ref(x))
        del x
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_donated_array_is_still_marked() -> None:
    """A call that gets one says whose memory it was; that comes first."""
    x = jnp.ones(4)
    mark([x])
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert unmarked([x]) == []


@pytest.mark.parametrize("key", [False, True])
def test_a_checksum_is_of_bits(key: bool) -> None:
    make: Any = jax.random.key if key else jnp.float32
    assert copies.checksum(make(1)) == copies.checksum(make(1)) != copies.checksum(make(2))
