"""`jaxdist.zero` with every transformation of optax, and with optimizers of whole matrices: what one device computes.

One compiled step trains several of them, since compiling is most of the work. The quick tests train one of each family.
With JAXDIST_FULL set, all are trained at all levels on all numbers of devices.
"""

import functools
import inspect
import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from catalogue import matrix_optimizers as matrices
from catalogue import optimizers
from catalogue.optimizers import ENTRIES, FEW, SHAPES
from harness.check import gap, mesh

import jaxdist

FULL = "JAXDIST_FULL" in os.environ
OTHERS = [name for name in ENTRIES if name in optimizers.OF_MATRICES | optimizers.OF_ALL]
GROUPS = [(optimizers.FAMILIES, FEW)]
GROUPS += [([name for name in ENTRIES if name not in {*OTHERS, *optimizers.FAMILIES}][i::8], FEW) for i in range(8)]
GROUPS += [(OTHERS[i::4], SHAPES) for i in range(4)]
COMBINATIONS = list(itertools.product((2, 3, 4, 8), (1, 2, 3)))
CASES = (
    [(i, *combination) for i in range(len(GROUPS)) for combination in COMBINATIONS]
    if FULL
    else [(i, *COMBINATIONS[(5 * i + 4) % len(COMBINATIONS)]) for i in range(len(GROUPS))]
)


@functools.cache
def expected(group: int) -> dict[str, tuple[Any, Any]]:
    """Parameters and state of each of a group, on one device."""
    names, shapes = GROUPS[group]
    out = optimizers.run_plain(names, shapes)
    return {name: (out[2 * i], out[2 * i + 1]) for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("group", "devices", "level"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] > 0)) for case in CASES]
)
def test_as_on_one_device(group: int, devices: int, level: int) -> None:
    names, shapes = GROUPS[group]
    state = optimizers.start_in_shards(names, level, shapes, mesh=mesh(devices))
    got = optimizers.run_sharded(names, [level] * len(names), shapes=shapes, state=state, mesh=mesh(devices))
    jaxdist.check_sync(got)
    gaps = {name: gap(expected(group)[name], got[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    assert {name: gap for name, gap in gaps.items() if gap > 1e-10} == {}


def test_every_transformation_of_optax_has_an_entry() -> None:
    functions = [one for module in (optax, optax.contrib) for one in vars(module).items() if inspect.isfunction(one[1])]
    public = {name for name, f in functions if "Transformation" in str(inspect.signature(f).return_annotation)}
    public = {name for name in public if not name.startswith("_")}
    tested = {name.split(",")[0] for name in ENTRIES} | optimizers.PER_EXAMPLE
    in_others = {f"scale_by_{name}" for name in tested}
    assert len(public) > 100
    assert public - tested - in_others - optimizers.PARTS == set()


# --- whole matrices

CHAIN = ((6, 10), (10, 10), (10, 7), (7, 12), (12, 6))  # shapes that 2, 3, 4 and 8 devices don't all divide
WAYS: list[tuple[int, int, Any, Any]] = [
    (2, 1, None, "owners"), (3, 2, None, "owners"), (8, 3, None, "owners"), (8, 2, 4, "owners"), (4, 2, None, None),
    (4, 1, None, "slices"), (4, 3, 2, "owners"), (8, 1, 2, "owners"), (8, 3, 4, "slices"),
]  # fmt: skip
"""Devices, level, groups of them, `split`."""
MATRICES = [
    pytest.param(name, WAYS[k if FULL else (2 * i + k) % len(WAYS)], marks=[pytest.mark.slow] * (k + i % 2 > 0))
    for i, name in enumerate(matrices.MAKERS)
    for k in range(len(WAYS) if FULL else 2)
]


@pytest.mark.parametrize(("name", "way"), MATRICES)
def test_whole_matrices(name: str, way: Any) -> None:
    devices, level, within, split = way
    assert matrices.difference(matrices.MAKERS[name](), CHAIN, devices, level, within=within, split=split) < 1e-10


def by_one_number(updates: Any, _: Any = None) -> Any:
    """All divided by a number that the first one makes."""
    scale = jnp.linalg.svd(updates[0], compute_uv=False)[0]
    return [-0.1 * (x @ x.T @ x) for x in (g / scale for g in updates)]


def layer_by_layer(g: Any, _: Any) -> Any:
    return -0.1 * (jax.lax.map(lambda x: jnp.linalg.qr(x)[0] @ (x.T @ x), g) if g.ndim == 3 else g)


def penalised(params: Any, x: Any) -> Any:
    """A loss of two matrices, one after the other, and of each by itself: that has a gradient too."""
    penalty = lambda p: jnp.linalg.norm(p.T @ p - jnp.eye(p.shape[1])) + jnp.linalg.norm(p, 2)
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) ** 2) + sum(map(penalty, params))


@pytest.mark.parametrize(
    ("tx", "shapes", "settings"),
    [
        (matrices.muon(), ((6, 16), (8, 16, 12), (12, 8)), {}),
        (matrices.muon(), ((6, 16), (2, 16, 12), (12, 8)), {"split": "owners"}),
        (optax.stateless_with_tree_map(layer_by_layer), ((6, 6), (5, 6, 4)), {"split": "owners"}),
        (optax.stateless(by_one_number), CHAIN, {"split": "owners"}),
        (optax.adam(1e-2), ((16, 12), (12, 20)), {"level": 3, "loss": penalised, "split": "owners"}),
    ],
)
def test_stacks_and_matrices_that_depend_on_others(tx: Any, shapes: Any, settings: Any) -> None:
    assert matrices.difference(tx, shapes, **settings) < 1e-10
