"""`parallel`: meshes of several axes, as on one device."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import idioms
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh

import jaxdist
from jaxdist.step.data_parallel import parallel

MESHES: list[dict[str, int]] = [
    {"data": 2, "model": 2},
    {"model": 4},
    {"data": 2, "sequence": 2},
    {"data": 2, "model": 2, "sequence": 2},
    {"model": 2, "data": 3},
]
NAMES = list(idioms.IDIOMS)
STEPS = 2


def mesh(sizes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(devices.reshape(list(sizes.values())), tuple(sizes))


def names_of(step: Any, *args: Any) -> list[tuple[str, Any]]:
    """The leaves of a step's state, as messages call them."""
    decorated: Any = jaxdist.data_parallel(step)
    decorated._bind_context()
    signature, leaves = decorated._signature(*decorated._arguments(args, {}))
    return [(signature.names[i], leaves[i]) for i in signature.state]


def layouts(step: Any, args: Any, seed: str, parts: int) -> dict[str, int | None]:
    """A dimension of each leaf of the state, or None."""
    rng = random.Random(seed)

    def dim(x: Any) -> int | None:
        shape = () if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) else np.shape(x)
        return rng.choice([None, *(d for d, n in enumerate(shape) if n >= parts)])

    return {f"^{re.escape(name)}$": dim(x) for name, x in names_of(step, *args)}


def check(name: str, sizes: dict[str, int], level: Any, rows: int) -> None:
    want = oracle.run_plain(oracle.idiom(name, rows), STEPS, rows)
    case = oracle.idiom(name, rows, level)
    given = layouts(case.step, (*case.state, case.batch(0)), name, sizes["model"]) if "model" in sizes else None
    decorated = parallel(case.step, mesh=mesh(sizes), layouts=given)
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
