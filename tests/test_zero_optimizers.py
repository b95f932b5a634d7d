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
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import optax
import optax.contrib
import pytest
from catalogue import optimizers
from catalogue.optimizers import ENTRIES, FEW, SHAPES
from harness.parity import mesh

pytestmark = pytest.mark.slow  # together

EVERYTHING = "JAXDIST_FULL" in os.environ
DOCS = Path(__file__).parents[1] / "docs"
ELEMENTWISE = "slices, elementwise | | |"
TABLE, _, REST = (DOCS / "zero-optimizers.md").read_text().partition("\n## Elementwise\n")
ROWS = dict(
    line[2:].split(" | ", 1)
    for line in TABLE.splitlines()
    if line.startswith("| ") and not line.startswith("| transformation")
) | dict.fromkeys(re.findall(r"`([^`]+)`", REST.replace("\n", " ")), ELEMENTWISE)
# Parts that are tested with the optimizer of their name, unless another entry is compared with them.
PARTS = {f"scale_by_{name}" for name in ENTRIES} - {entry.unlike for entry in ENTRIES.values()}
NAMES = [name for name in ENTRIES if EVERYTHING or name not in PARTS]
LOOPS = [name for name in NAMES if ENTRIES[name].extra is optimizers.line_search]
# What works on slices needs few leaves, and loops over losses take long to compile; but some want all.
OF_FEW = {name for name, row in ROWS.items() if re.match(r"slices(, elementwise)? \|", row)} | {*LOOPS}
ON_SLICES = [name for name in NAMES if name in OF_FEW - optimizers.OF_ALL]
OTHERS = [name for name in NAMES if name not in ON_SLICES]
GROUPS = [(ON_SLICES[i::8], FEW) for i in range(8)] + [(OTHERS[i::4], SHAPES) for i in range(4)]
COMBINATIONS = list(itertools.product((2, 3, 4, 8), (1, 2, 3)))
CASES = (
    [(i, *combination) for i in range(len(GROUPS)) for combination in COMBINATIONS]
    if EVERYTHING
    else [(i, *COMBINATIONS[5 * i % len(COMBINATIONS)]) for i in range(len(GROUPS))]
)


@functools.cache
def expected(group: int) -> dict[str, tuple[Any, Any]]:
    """Parameters and state of each of a group, on one device."""
    names, shapes = GROUPS[group]
    out = optimizers.run_plain(names, shapes)
    return {name: (out[2 * i], out[2 * i + 1]) for i, name in enumerate(names)}


def of(name: str) -> tuple[Any, Any]:
    return next(expected(i)[name] for i, (names, _) in enumerate(GROUPS) if name in names)


def trained(name: str) -> dict[str, np.ndarray]:
    """The model's parameters after training on one device."""
    entry = ENTRIES[name]
    return {k: np.asarray(p) for k, p in entry.model(entry.trained(of(name)[0])).items()}


@pytest.mark.parametrize(("group", "devices", "level"), CASES)
def test_as_on_one_device(group: int, devices: int, level: int) -> None:
    names, shapes = GROUPS[group]
    state = optimizers.start_in_shards(names, level, shapes, mesh=mesh(devices))
    got = optimizers.run_sharded(names, [level] * len(names), shapes=shapes, state=state, mesh=mesh(devices))
    gaps = {name: optimizers.gap(expected(group)[name], got[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    assert {name: gap for name, gap in gaps.items() if gap > 1e-10} == {}


@pytest.mark.parametrize("name", NAMES)
def test_it_does_its_work_here(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.fired(*of(name))
    if entry.unlike is not None:
        ours, theirs = trained(name), trained(entry.unlike)
        assert max(np.abs(ours[k] - theirs[k]).max() for k in ours.keys() & theirs.keys()) > 1e-4


@pytest.fixture(scope="module")
def zero_table() -> ModuleType:
    """The program that writes the page."""
    spec = importlib.util.spec_from_file_location("zero_table", DOCS / "zero_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("messages_take_time")
@pytest.mark.parametrize("name", ["adam", "chain", "adafactor", "flatten", "prodigy", "muon"])
def test_the_documentation_says_how_they_run(name: str, zero_table: Any) -> None:
    row = zero_table.row(name)
    # The new parameters, rows and columns of adafactor, and examples in place of a sum: nothing that goes unsaid.
    assert row.others < 1.05
    assert row.line == ROWS[name]


def test_every_public_name_is_known() -> None:
    assert sorted(ROWS) == sorted(ENTRIES)
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
