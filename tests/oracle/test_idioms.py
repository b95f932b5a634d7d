"""The one promise: ordinary train steps, unchanged, on several devices are what they are on one, whatever they cost.

Each idiom once, with a mesh, a level of ZeRO and a batch that these divide or not, by turns, so that all pairs of these
occur; the model cut at random or as is found. Two of three are placed for a machine at random, on which a message, a
byte or a FLOP may be next to nothing or a second, or by prices at random, so that every option of an operation is taken
sooner or later. With JAXDIST_FULL set, each idiom so with JAXDIST_SEEDS seeds (40).
"""

import os
import random
from typing import Any

import pytest
from catalogue import idioms
from harness import oracle, quick
from harness.check import gap, mesh
from harness.generated import machine

import jaxdist

FULL = "JAXDIST_FULL" in os.environ
NAMES = list(idioms.IDIOMS)
MESHES: list[dict[str, int]] = [
    {"data": 2}, {"data": 3}, {"data": 4}, {"data": 8}, {"data": 2, "model": 2}, {"model": 4},
    {"data": 2, "sequence": 2}, {"data": 2, "model": 2, "sequence": 2}, {"model": 2, "data": 3},
]  # fmt: skip
EVEN, UNEVEN, ODD = 24, 20, 21
"""Examples: 2, 3, 4 and 8 devices divide the first, 3 and 8 not the second; the last where any number will do."""
SEEDS = int(os.environ.get("JAXDIST_SEEDS", "40")) if FULL else 1
# Mesh, level of ZeRO, whether the devices divide the batch; half of them have all pairs of these.
TURNS = [(MESHES[i % 9], i % 4, bool((i // 9 + i // 36) % 2)) for i in range(72)]
CASES = [
    (NAMES[i % len(NAMES)], seed, TURNS[(i + 31 * seed) % len(TURNS)])
    for seed in range(SEEDS) for i in range(max(36, len(NAMES)))
]  # fmt: skip


@pytest.mark.parametrize(("name", "seed", "way"), CASES)
def test_idioms(name: str, seed: int, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxdist.placements.search import options  # private: that each option is exact shows if prices are random

    rng = random.Random(f"{name}{seed}")
    sizes, level, even = way
    rows = EVEN if even else UNEVEN if name in idioms.DIVISIBLE else ODD
    within = rng.choice([None, 2]) if level and sizes.get("data", 1) % 4 == 0 else None
    context = jaxdist.get_context()
    monkeypatch.setattr(context, "kind", machine(rng, context.kind))
    if rng.randrange(2):
        monkeypatch.setattr(options, "cost", lambda *_, **__: rng.random())
    steps = rng.choice([1, 1, 1, 2])  # the state of the second comes as the first has left it: another program
    case = oracle.idiom(name, rows, level, within)
    given: dict[str, Any] = {"mesh": mesh(sizes)}
    run: Any = jaxdist.data_parallel if tuple(sizes) == ("data",) else jaxdist.parallel
    if "model" in sizes and rng.randrange(2):
        given["layouts"] = oracle.layouts(case.state, f"{name}{seed}", sizes["model"])
    got = oracle.run_decorated(case, steps=steps, rows=rows, with_=run, **given)
    want = oracle.run_plain(oracle.idiom(name, rows), steps, rows)
    assert gap(want, got, narrow=1e4) <= case.tolerance  # float32: metrics


@pytest.mark.parametrize(
    ("name", "level", "devices", "rows"),
    [
        ("clip_adamw", 1, 8, oracle.BATCH),
        ("microbatches", 0, 4, oracle.BATCH),
        ("few_examples", 3, 8, oracle.UNEVEN),
    ],
)
def test_cases(name: str, level: int, devices: int, rows: int) -> None:
    """Five steps, one case compiled as a user's step is."""
    with quick.compilation(name != "microbatches"):
        case = oracle.case(name, level)
        got = oracle.run_decorated(case, rows=rows, mesh=mesh(devices))
        assert gap(oracle.expected(name, rows), got) <= case.tolerance


def test_all_pairs_of_a_mesh_and_a_level_occur() -> None:
    assert len({(str(sizes), level) for _, _, (sizes, level, _) in CASES}) == 4 * len(MESHES)
