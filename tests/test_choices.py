"""The oracle of choices: whatever devices and links cost, a step returns what it does on one device.

Each case is placed for a machine at random, on which a message, a byte or a FLOP may be next to nothing or a second, so
that every way to run an operation is taken sooner or later. With JAXDIST_FULL set, all steps of the catalogue, for
JAXDIST_SEEDS (40) machines each.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import idioms
import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh

import jaxdist
from jaxdist.machine import VIRTUAL, Kind
from jaxdist.placements import small

NAMES = sorted(idioms.IDIOMS)
MESHES: list[dict[str, int]] = [
    {"data": 2}, {"data": 3}, {"data": 4}, {"data": 8}, {"data": 2, "model": 2}, {"model": 4}, {"data": 2, "sequence": 2},
    {"data": 2, "sequence": 2, "model": 2}, {"data": 4, "model": 2},
]  # fmt: skip
PART = 36
FULL = "JAXDIST_FULL" in os.environ
CASES = (
    [(name, seed) for seed in range(int(os.environ.get("JAXDIST_SEEDS", "40"))) for name in NAMES]
    if FULL
    else [(NAMES[(7 * seed) % len(NAMES)], seed) for seed in range(PART)]
)


def at_random(rng: random.Random) -> Kind:
    """A kind of device that does anything between next to nothing and all in a second."""
    scale = lambda low, high: 10 ** rng.uniform(low, high)
    return dataclasses.replace(
        VIRTUAL.kind, link=scale(5, 13), network=scale(5, 13), latency=scale(-9, 0), network_latency=scale(-9, 0),
        flops=scale(7, 17), bandwidth=scale(7, 14),
    )  # fmt: skip


@pytest.mark.slow  # together
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_choices_do_not_matter(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{name}{seed}")
    sizes, level = rng.choice(MESHES), rng.randrange(4)
    within = rng.choice([None, 2]) if level and sizes.get("data", 1) % 4 == 0 else None
    rows = rng.choice([24, 20 if name in idioms.DIVISIBLE else 21])
    monkeypatch.setattr(jaxdist.get_context(), "kind", at_random(rng))
    monkeypatch.setattr(small, "fewer", rng.choice([0, 2, 10**9]))
    case = oracle.idiom(name, rows, level, within)
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(*sizes.values()), tuple(sizes))
    run: Any = jaxdist.data_parallel if tuple(sizes) == ("data",) else jaxdist.parallel
    got = oracle.run_decorated(case, steps=2, rows=rows, with_=run, mesh=mesh)
    assert oracle.difference(oracle.run_plain(oracle.idiom(name, rows), 2, rows), got) <= case.tolerance
