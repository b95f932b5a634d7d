"""What is known to be the same on all ranks; tests/mpi/copies.py has the jobs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.agreement import copies
from jaxdist.agreement.copies import Copies, Results
from jaxdist.compat import mark, marks, unmark
from jaxdist.placements.layouts import Cut, Padded, layout


@pytest.fixture(autouse=True)
def _of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_is_of_all", lambda x: isinstance(x, jax.Array))


OUTSIDE = "no recent call of a decorated step"


def unknown(known: Copies, leaves: list[Any]) -> list[int]:
    return known.unknown(leaves, known.numbers(leaves))


def test_what_was_compared_is_known_and_what_is_made_of_it_is_not() -> None:
    known = Copies()
    arrays: list[Any] = [jnp.ones(2), jax.random.key(0), jnp.float32(3)]
    leaves = [*arrays, 1.0, np.ones(2), "text", None]
    assert unknown(known, leaves) == [0, 1, 2]
    known.add(leaves)
    assert unknown(known, leaves) == []
    made = [arrays[0] * 1, jnp.copy(arrays[0]), jax.jit(lambda x: x)(arrays[0]), jax.random.fold_in(arrays[1], 0)]
    assert unknown(known, [*leaves, *made]) == [7, 8, 9, 10]
    unmark([*leaves, *made])
    assert unknown(known, leaves) == [0, 1, 2]


@pytest.mark.parametrize("small", [True, False])
def test_what_a_step_returned_follows(small: bool) -> None:
    known = Copies()
    step = Results(known, "step")
    params: list[Any] = [jnp.ones(2), jnp.zeros(2)]
    for _ in range(3):
        step.returned([*params, jnp.ones(())], [0, 1], small)
        assert step.origins(params) == ((), [])
        changed = [params[0] * 1, params[1]]
        origins, outside = step.origins(changed)
        assert outside == [0]
        assert list(map(known.in_words, origins)) == [OUTSIDE, "leaf 1 of what step 'step' returned"]
        params = [x * 1 for x in params]
    step.returned(params, [0, 1], small)
    step.forget(params)
    assert step.origins(params) == ((-1, -1), [0, 1])


def words(known: Copies, step: Results, leaves: list[Any]) -> list[str]:
    return list(map(known.in_words, step.origins(leaves)[0]))


@pytest.mark.parametrize("small", [True, False])
def test_origins_tell_states_of_one_type_apart(small: bool) -> None:
    known = Copies()
    train, evaluate, other = (Results(known, name) for name in ("train", "evaluate", "other"))
    first: list[Any] = [jnp.ones(2), jnp.zeros(2)]
    train.returned(first, [0, 1], small)
    own = ["leaf 0 of what step 'train' returned", "leaf 1 of what step 'train' returned"]
    assert words(known, train, first[::-1]) == own[::-1]
    assert words(known, evaluate, first) == own
    second: list[Any] = [jnp.ones(2), jnp.zeros(2)]
    known.numbers(first)
    train.returned(second, [0, 1], small)
    assert words(known, other, [first[0], second[1]]) == [f"{own[0]} 1 calls before", own[1]]
    assert words(known, other, [first[0], second[1]]) == ["what it was in the call before", own[1]]
    assert words(known, train, second) == []
    assert words(known, train, first) == [f"{one} 1 calls before" for one in own]
    known.add(first)
    assert words(known, evaluate, [*first, 1.0]) == ["what was restored or compared"] * 2 + [OUTSIDE]


def test_origins_repeat_themselves_in_a_loop() -> None:
    """However many calls there were."""
    known = Copies()
    train, evaluate, seen = Results(known, "train"), Results(known, "evaluate"), list[Any]()
    state: list[Any] = []
    for _ in range(4):
        turn = []
        for _ in range(3):
            state = [jnp.ones(2), jnp.zeros(2)]
            train.returned(state, [0, 1], True)
            turn.append(train.origins(state)[0])
        for _ in range(2):
            turn.append(evaluate.origins(state)[0])
            evaluate.returned([jnp.ones(())], None, True)
        turn.append(train.origins(state)[0])
        seen.append(turn)
    assert all(turn == seen[0] for turn in seen)
    assert seen[0][-1] == ()


def test_of_arrays_with_padding_the_array_counts() -> None:
    known = Copies()
    step, array = Results(known, "step"), jnp.ones(4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    array = jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))
    padded: Any = Padded(array, layout(Cut("data", 2, 0, 1)))
    step.returned([array], None, False)
    assert step.origins([padded]) == step.origins([array])
    step.returned([array], [0], False)
    assert step.origins([padded]) == ((), [])


def test_a_mark_goes_with_its_array() -> None:
    """And with no later one at the same address."""
    gone = []
    for _ in range(100):
        x = jnp.full(2, 3.0)
        assert marks([x]) == [-1]
        mark([x], 5)
        gone.append(weakref.ref(x))
        del x
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_a_donated_array_is_still_marked() -> None:
    """A call that gets one says whose memory it was; that comes first."""
    x = jnp.ones(4)
    mark([x], 5)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    assert marks([x]) == [5]


@pytest.mark.parametrize("key", [False, True])
def test_a_checksum_is_of_bits(key: bool) -> None:
    make: Any = jax.random.key if key else jnp.float32
    assert copies.checksum(make(1)) == copies.checksum(make(1)) != copies.checksum(make(2))
