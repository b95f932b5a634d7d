"""`jaxdist.zero` with every transformation of optax: N devices compute what one does without it.

One compiled step trains several of them, since compiling is most of the work. Each is tested at one level on one number
of devices, another one for each; with JAXDIST_FULL set, at all levels on all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import optax
import optax.contrib
import optimizers
import pytest
from optimizers import ENTRIES
from parity import mesh

pytestmark = pytest.mark.slow  # together

EVERYTHING = "JAXDIST_FULL" in os.environ
COMBINATIONS = [(level, n) for n, level in itertools.product((2, 3, 4, 8), (1, 2, 3))]
# Parts that are tested with the optimizer of their name, unless another entry is compared with them.
PARTS = {f"scale_by_{name}" for name in ENTRIES} - {entry.unlike for entry in ENTRIES.values()}
NAMES = [name for name in ENTRIES if EVERYTHING or name not in PARTS]
GROUPS = [NAMES[i :: len(COMBINATIONS)] for i in range(len(COMBINATIONS))]
CASES = [
    (i, *combination)
    for i in range(len(GROUPS))
    for combination in (COMBINATIONS if EVERYTHING else COMBINATIONS[i : i + 1])
]


@functools.cache
def expected(group: int) -> dict[str, tuple[Any, Any]]:
    """Parameters and state of each of a group, on one device."""
    out = optimizers.run_plain(GROUPS[group])
    return {name: (out[2 * i], out[2 * i + 1]) for i, name in enumerate(GROUPS[group])}


def trained(name: str) -> dict[str, np.ndarray]:
    """The model's parameters after training on one device."""
    entry = ENTRIES[name]
    params, _ = expected(next(i for i, group in enumerate(GROUPS) if name in group))[name]
    return {k: np.asarray(p) for k, p in entry.model(entry.trained(params)).items()}


@pytest.mark.parametrize(("group", "level", "devices"), CASES)
def test_as_on_one_device(group: int, level: int, devices: int) -> None:
    names = GROUPS[group]
    got = optimizers.run_sharded(names, [level] * len(names), mesh=mesh(devices))
    gaps = {name: optimizers.gap(expected(group)[name], got[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    assert {name: gap for name, gap in gaps.items() if gap > 1e-10} == {}


@pytest.mark.parametrize("name", NAMES)
def test_it_does_its_work_here(name: str) -> None:
    entry = ENTRIES[name]
    params, state = next(expected(i)[name] for i, group in enumerate(GROUPS) if name in group)
    assert entry.fired(params, state)
    if entry.unlike is not None:
        ours, theirs = trained(name), trained(entry.unlike)
        assert max(np.abs(ours[k] - theirs[k]).max() for k in ours.keys() & theirs.keys()) > 1e-4


@pytest.mark.parametrize(
    ("name", "level", "devices"),
    list(itertools.product(("adam", "adafactor", "lamb"), (1, 2, 3), (2, 3, 4, 8)))
    if EVERYTHING
    else [("adafactor", 2, 3)],
)
def test_large_matrices(name: str, level: int, devices: int) -> None:
    """Of which the devices divide no dimension, or only the short one."""
    got = optimizers.run_sharded([name], [level], shapes=optimizers.BIG, mesh=mesh(devices))
    assert optimizers.gap(_large(name), got) <= 1e-10


@functools.cache
def _large(name: str) -> Any:
    return optimizers.run_plain([name], shapes=optimizers.BIG)


@pytest.mark.parametrize("name", ["adam", "chain", "adafactor", "flatten", "prodigy", "muon"])
def test_the_documentation_says_how_they_run(name: str) -> None:
    spec = importlib.util.spec_from_file_location("zero_table", Path(__file__).parents[1] / "docs" / "zero_table.py")
    assert spec is not None
    assert spec.loader is not None
    zero_table = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = zero_table
    spec.loader.exec_module(zero_table)
    row = zero_table.row(name)
    assert row.others < 1.02  # the new parameters, and rows and columns of adafactor: nothing that goes unsaid
    assert f"| {name} | {row.line}" in zero_table.FILE.read_text().splitlines()


def test_the_documentation_has_them_all() -> None:
    lines = (Path(__file__).parents[1] / "docs" / "zero-optimizers.md").read_text().splitlines()
    assert [line.split(" | ")[0][2:] for line in lines if line.startswith("| ")][1:] == list(ENTRIES)


def test_every_public_name_is_known() -> None:
    public = {
        name
        for module in (optax, optax.contrib)
        for name, value in vars(module).items()
        if not (name.startswith("_") or inspect.ismodule(value) or (name[0].isupper() and name != "MultiSteps"))
    }
    tested = {name.split(",")[0] for name in ENTRIES}
    others = optimizers.NO_TRANSFORMATIONS | optimizers.PER_EXAMPLE
    assert not tested & others
    assert public == tested | others
