"""The catalogue of ordinary train steps: each, unchanged, on several devices is what it is on one.

Each idiom once, with a number of devices, a level of ZeRO and a batch that these divide or not, by turns, so that all
pairs of these occur; with JAXDIST_FULL set, each in every way.
"""

from __future__ import annotations

import itertools
import os

import idioms
import oracle
import parity
import pytest

pytestmark = pytest.mark.slow  # together

STEPS = 2
NAMES = list(idioms.IDIOMS)
SIZES = {True: 24, False: 20}
"""Examples: 2, 3, 4 and 8 devices divide the first, and 3 and 8 do not divide the second (both are multiples of 4)."""
ODD = 21
"""For those that take any number."""
WAYS = list(itertools.product((2, 3, 4, 8), (0, 1, 2, 3), (True, False)))
"""Devices, level of ZeRO, whether the devices divide the batch."""

# In this order neighbours differ in everything, and 32 of them are all ways.
TURNS = [WAYS[(i * 13) % len(WAYS)] for i in range(len(WAYS))]
CASES = (
    list(itertools.product(NAMES, WAYS))
    if "JAXDIST_FULL" in os.environ
    else [(name, TURNS[i % len(TURNS)]) for i, name in enumerate(NAMES)]
)


def examples(name: str, even: bool) -> int:
    return SIZES[even] if even or name in idioms.DIVISIBLE else ODD


@pytest.mark.parametrize(("name", "way"), CASES)
def test_as_on_one_device(name: str, way: tuple[int, int, bool]) -> None:
    devices, level, even = way
    size = examples(name, even)
    case = oracle.idiom(name, size, level)
    got = oracle.run_decorated(case, steps=STEPS, rows=size, mesh=parity.mesh(devices))
    assert oracle.difference(oracle.run_plain(oracle.idiom(name, size), STEPS, size), got) <= case.tolerance


SOUGHT = (
    "masked_mean", "cnn_batchnorm", "infonce", "ppo_advantage_normalised", "vicreg", "concordance_loss",
    "topk_hard_mining", "quantile_clipping", "mixup_reverse", "private_vmap", "moco_queue", "examples_seen_schedule",
    "flax_batchnorm_dropout", "adversarial_examples", "aux_of_all_kinds", "moe_top1_capacity", "transformer",
    "tilted_loss",
)  # fmt: skip
"""What a step that is traced as one device's part gets wrong, or has to refuse."""


def test_the_catalogue_is_large_and_couples_examples() -> None:
    assert len(NAMES) >= 100
    assert set(SOUGHT) <= set(NAMES)
    assert len(idioms.COUPLED) >= 18
    assert not (idioms.COUPLED | idioms.DIVISIBLE) - set(NAMES)
    assert len({(d, level) for _, (d, level, _) in CASES}) == 16
