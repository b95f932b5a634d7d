"""`parallel`: meshes of several axes, as on one device."""

from __future__ import annotations

from typing import Any

import idioms
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
