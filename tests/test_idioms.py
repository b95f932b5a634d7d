"""The catalogue of ordinary train steps: each, unchanged, on several devices is what it is on one, whatever they cost.

Each idiom once, with a mesh, a level of ZeRO and a batch that these divide or not, by turns, so that all pairs of these
occur, the model cut at random or as is found. Two of three are placed for a machine at random, on which a message, a
byte or a FLOP may be next to nothing or a second, or by prices at random, so that every option of an operation is taken
sooner or later. With JAXDIST_FULL set, each idiom so with JAXDIST_SEEDS seeds (40).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from typing import Any

import pytest
from catalogue import idioms
from harness import oracle
from harness.meshes import layouts, mesh

import jaxdist
from jaxdist.machine import VIRTUAL, Kind
from jaxdist.placements import options

NAMES = list(idioms.IDIOMS)
MESHES: list[dict[str, int]] = [
    {"data": 2}, {"data": 3}, {"data": 4}, {"data": 8}, {"data": 2, "model": 2}, {"model": 4},
    {"data": 2, "sequence": 2}, {"data": 2, "model": 2, "sequence": 2}, {"model": 2, "data": 3},
]  # fmt: skip
EVEN, UNEVEN, ODD = 24, 20, 21
"""Examples: 2, 3, 4 and 8 devices divide the first, 3 and 8 not the second; the last where any number will do."""
WAYS = list(itertools.product(MESHES, (0, 1, 2, 3), (True, False)))
"""Mesh, level of ZeRO, whether the devices divide the batch."""
SEEDS = int(os.environ.get("JAXDIST_SEEDS", "40")) if "JAXDIST_FULL" in os.environ else 1

# In this order the first fifty have all pairs of a mesh, a level and an evenness.
TURNS = [WAYS[(i * 5) % len(WAYS)] for i in range(len(WAYS))]
CASES = [(name, seed, TURNS[(i + 31 * seed) % len(TURNS)]) for seed in range(SEEDS) for i, name in enumerate(NAMES)]


def machine(rng: random.Random) -> Kind:
    """Devices as in the other tests, or such as do anything between next to nothing and all in a second."""
    if not rng.randrange(3):
        return VIRTUAL.kind
    scale = lambda low, high: 10 ** rng.uniform(low, high)
    return dataclasses.replace(
        VIRTUAL.kind, link=scale(5, 13), network=scale(5, 13), latency=scale(-9, 0), network_latency=scale(-9, 0),
        flops=scale(7, 17), bandwidth=scale(7, 14),
    )  # fmt: skip


@pytest.mark.slow  # together
@pytest.mark.parametrize(("name", "seed", "way"), CASES)
def test_as_on_one_device(name: str, seed: int, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{name}{seed}")
    sizes, level, even = way
    rows = EVEN if even else UNEVEN if name in idioms.DIVISIBLE else ODD
    within = rng.choice([None, 2]) if level and sizes.get("data", 1) % 4 == 0 else None
    monkeypatch.setattr(jaxdist.get_context(), "kind", machine(rng))
    if rng.randrange(2):
        monkeypatch.setattr(options, "cost", lambda *_, **__: rng.random())
    steps = rng.choice([1, 2])  # the state of the second comes as the first has left it: another program
    case = oracle.idiom(name, rows, level, within)
    run: Any = jaxdist.data_parallel if tuple(sizes) == ("data",) else jaxdist.parallel
    given: dict[str, Any] = {"mesh": mesh(sizes)}
    if "model" in sizes and rng.randrange(2):
        given["layouts"] = layouts(case.step, (*case.state, case.batch(0)), f"{name}{seed}", sizes["model"])
    got = oracle.run_decorated(case, steps=steps, rows=rows, with_=run, **given)
    want = oracle.run_plain(oracle.idiom(name, rows), steps, rows)
    assert oracle.difference(want, got, narrow=1e4) <= case.tolerance  # float32: metrics


def test_the_catalogue_has_what_one_devices_part_gets_wrong() -> None:
    """Or has to refuse; and all pairs of a mesh and a level occur."""
    assert len(NAMES) >= 50
    assert set(NAMES) > {
        "masked_mean", "cnn_batchnorm", "infonce", "ppo_advantage_normalised", "vicreg", "concordance_loss",
        "topk_hard_mining", "quantile_clipping", "mixup_reverse", "private_vmap", "moco_queue",
        "examples_seen_schedule", "flax_batchnorm_dropout", "adversarial_examples", "aux_of_all_kinds",
        "moe_top1_capacity", "transformer", "tilted_loss",
    }  # fmt: skip
    assert len({(str(sizes), level) for _, _, (sizes, level, _) in CASES}) == 4 * len(MESHES)
