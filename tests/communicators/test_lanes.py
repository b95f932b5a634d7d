"""`jaxdist.communicators.lanes`: sums whose bits are those of one binary tree, here between virtual devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.communicators.lanes import LanesLowering
from jaxdist.ir.primitives import all_reduce_p, group_reduce_p, reduce_shard_p, slices
from jaxdist.mesh import along, axes_of_mesh

SIZES = (3, 2000)
"""Entries of what is gathered to be added up, and of what is exchanged."""


def tree(parts: Sequence[Any]) -> Any:
    """The sum as a person would write the tree."""
    if len(parts) == 1:
        return parts[0]
    pairs = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return tree(pairs)


def summands(lanes: int, size: int, dtype: Any = np.float32) -> np.ndarray:
    """Of so many sizes that each order has a sum of its own."""
    rng = np.random.default_rng(lanes)
    return (rng.normal(size=(lanes, size)) * 10.0 ** rng.integers(-3, 4, (lanes, size))).astype(dtype)


def lowered(call: Any, x: np.ndarray, mesh: Mesh) -> np.ndarray:
    """What each lane has after a call with its row of `x`."""

    def local(x: Any) -> Any:
        closed = jax.make_jaxpr(call, axis_env=list(mesh.shape.items()))(x[0])
        return LanesLowering().run(closed, x[0])[0][None]

    cut = P(mesh.axis_names)
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False))
    return np.asarray(program(x))


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), ("data", "model")[: len(sizes)])


CALLS = {
    "all-reduce": lambda x: all_reduce_p.bind(x, axes=("data",), wire=None),
    "psum": lambda x: lax.psum(x, "data"),
}


@pytest.mark.parametrize("lanes", [2, 3, 5, 8])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_sums_are_a_tree(name: str, size: int, lanes: int) -> None:
    x = summands(lanes, size)
    got = lowered(CALLS[name], x, mesh_of(lanes))
    assert (got == tree(list(x))).all()
    if lanes > 3 and size > 3:
        assert (got != sum(x[1:], start=x[0])).any()  # an order that is another one is seen


@pytest.mark.parametrize("lanes", [3, 8])
def test_slices_of_sums(lanes: int) -> None:
    x = summands(lanes, 2000)
    ours = lambda x: reduce_shard_p.bind(x, axes=("data",), dim=0, devices=lanes, wire=None)
    want = slices(jnp.asarray(tree(list(x))), 0, lanes)
    assert (lowered(ours, x, mesh_of(lanes)) == want).all()
    whole = x[:, : 2000 // lanes * lanes]
    theirs = lambda x: lax.psum_scatter(x, "data", tiled=True)
    assert (lowered(theirs, whole, mesh_of(lanes)).reshape(-1) == tree(list(whole))).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axis", ["data", "model"])
def test_sums_along_an_axis(axis: str, size: int) -> None:
    mesh = mesh_of(2, 4)
    x = summands(8, size)
    groups = along(axes_of_mesh(mesh), [axis])
    assert groups is not None
    got = lowered(lambda x: all_reduce_p.bind(x, axes=(axis,), wire=None), x, mesh)
    for group in groups:
        assert (got[list(group)] == tree([x[i] for i in group])).all()


@pytest.mark.parametrize("groups", [((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 3, 7), (1, 2), (4, 5, 6))])
@pytest.mark.parametrize("size", SIZES)
def test_sums_within_groups(groups: tuple[tuple[int, ...], ...], size: int) -> None:
    x = summands(8, size)
    got = lowered(lambda x: group_reduce_p.bind(x, op="sum", axes=("data",), groups=groups), x, mesh_of(8))
    for group in groups:
        assert (got[list(group)] == tree([x[i] for i in group])).all()
    got = lowered(lambda x: group_reduce_p.bind(x, op="max", axes=("data",), groups=groups), x, mesh_of(8))
    assert (got[list(groups[0])] == x[list(groups[0])].max(0)).all()


def test_16_bits_are_rounded_once() -> None:
    x = summands(8, 2000, jnp.bfloat16)
    want = tree(list(x.astype(np.float32))).astype(jnp.bfloat16)
    assert (lowered(CALLS["all-reduce"], x, mesh_of(8)) == want).all()
    x = x[:, :3]
    assert (lowered(CALLS["all-reduce"], x, mesh_of(8)) == tree(list(x.astype(np.float32))).astype(x.dtype)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.float64])
def test_other_numbers(dtype: Any) -> None:
    x = summands(4, 2000).astype(dtype)
    assert (lowered(CALLS["all-reduce"], x, mesh_of(4)) == tree(list(x))).all()
