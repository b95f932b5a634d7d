"""`jaxdist.communicators.by_hosts`: what crosses each link between hosts once, here between virtual devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.communicators import xla
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, reduce_shard_p
from jaxdist.mesh import in_groups
from jaxdist.planning.schedule import collectives

MESH = Mesh(jax.devices(), ("data",))
LARGE = 1 << 16
"""Bytes that are so here."""
HOST, BETWEEN, ALL = ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7)), (tuple(range(8)),)


def program(call: Any, in_specs: Any, out_specs: Any, in_host: int = 2, mesh: Mesh = MESH) -> Any:
    """A device's call of a primitive, compiled for hosts of some devices each."""

    def local(x: Any) -> Any:
        closed = jax.make_jaxpr(call, axis_env=list(mesh.shape.items()))(x)
        return xla.GlooLowering(axes=len(mesh.shape), hosts=(in_host, LARGE)).run(closed, x)[0]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def summed(in_host: int, wire: str | None = None) -> Any:
    """The sum over eight devices."""
    return program(lambda x: all_reduce_p.bind(x[0], axes=("data",), wire=wire), P("data"), P(), in_host)


def moved(program: Any, *args: Any) -> set[tuple[str, Any]]:
    return {(one.kind, one.groups) for one in collectives(program.lower(*args).compile().as_text(), 8)}


def integers(*shape: int, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(*((0, 2) if dtype == "bool" else (-9, 9)), shape), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1 << 13,), "float64"), ((3, 5, 7, 197), "float32"), ((3, 5, 7, 197), "int32")]
)
def test_large_sums_within_each_host_first(shape: tuple[int, ...], dtype: str) -> None:
    x, call = integers(8, *shape, dtype=dtype), summed(2)
    np.testing.assert_array_equal(call(x), x.sum(0))
    assert moved(call, x) == {("all-to-all", HOST), ("all-reduce", BETWEEN), ("all-gather", HOST)}


@pytest.mark.parametrize(("size", "in_host"), [(1 << 12, 2), (1 << 14, 0)])
def test_small_ones_and_those_of_one_host_at_once(size: int, in_host: int) -> None:
    x, call = jnp.ones((8, size), jnp.float32), summed(in_host)
    np.testing.assert_array_equal(call(x), 8)
    assert moved(call, x) == {("all-reduce", ALL)}


@pytest.mark.parametrize(
    ("shape", "dim", "dtype", "large"),
    [
        ((4099, 7), 0, "float32", True),
        ((3, 4096, 5), 1, "bfloat16", True),
        ((4099, 7), 0, "bool", False),
        ((3, 24576, 1), 1, "bool", True),
    ],
)
def test_large_gathers_between_hosts_first(shape: tuple[int, ...], dim: int, dtype: str, large: bool) -> None:
    whole = integers(*shape, dtype=dtype)
    padded = jnp.pad(whole, [(0, -shape[d] % 8 if d == dim else 0) for d in range(len(shape))])
    gather = lambda x: gather_shards_p.bind(x, axes=("data",), dim=dim, size=shape[dim], devices=8)
    call = program(gather, P(*[None] * dim, "data"), P())
    np.testing.assert_array_equal(call(padded), whole)
    assert moved(call, padded) == {("all-gather", g) for g in ({BETWEEN, HOST} if large else {ALL})}


@pytest.mark.parametrize(
    ("shape", "dim", "wire"), [((4099, 7), 0, None), ((3, 4096, 5), 1, "bfloat16"), ((24, 3), 0, None)]
)
def test_large_sums_in_slices_within_each_host_first(shape: tuple[int, ...], dim: int, wire: Any) -> None:
    x = integers(8, *shape)
    reduce = lambda x: reduce_shard_p.bind(x[0], axes=("data",), wire=wire, dim=dim, devices=8)
    call = program(reduce, P("data"), P(*[None] * dim, "data"))
    got = np.take(np.asarray(call(x)), np.arange(shape[dim]), dim)  # without what it was padded with
    np.testing.assert_array_equal(got, x.sum(0))  # 8-bit numbers: exact in bfloat16
    groups = {HOST, BETWEEN} if x[0].nbytes >= LARGE else {ALL}
    assert moved(call, x) == {("all-to-all", g) for g in groups}


OVER_ONE: dict[Any, tuple[dict[str, Any], Any]] = {
    all_reduce_p: ({"wire": None}, lambda own, device: own.sum(0)),
    reduce_shard_p: ({"wire": None, "dim": 0, "devices": 4}, lambda own, device: own.sum(0)[device // 2 :][:1]),
    gather_shards_p: ({"dim": 0, "size": 16, "devices": 4}, lambda own, device: own.reshape(16, -1)),
}


@pytest.mark.parametrize("primitive", OVER_ONE)
def test_over_one_of_two_axes_at_once(primitive: Any) -> None:
    """Each is within a host, or has one device of each: no link would carry less."""
    x, (how, want) = integers(8, 4, LARGE // 4), OVER_ONE[primitive]
    mesh, spec = in_groups(MESH, 4), P(("group", "data"))
    call = program(lambda x: primitive.bind(x[0], axes=("group",), **how), spec, spec, mesh=mesh)
    got = np.asarray(call(x)).reshape(8, -1, LARGE // 4)
    for device in range(8):
        np.testing.assert_array_equal(got[device], want(x[device % 2 :: 2], device))
    assert {groups for _, groups in moved(call, x)} == {BETWEEN}


def test_a_step_on_several_hosts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.runtime.context.hosts_of", lambda mesh: ["a", "a", "b", "b", "c", "c", "d", "d"])
    monkeypatch.setattr("jaxdist.communicators._over_gloo", lambda mesh: True)
    step = jaxdist.data_parallel(lambda w, x: jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), donate=False)
    found = moved(step, jnp.ones((128, 128)), np.ones((8, 128)))
    assert {("all-to-all", HOST), ("all-reduce", BETWEEN), ("all-gather", HOST)} <= found


def test_compressed() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1 << 14)), jnp.float32)
    call = summed(2, wire="bfloat16")
    np.testing.assert_allclose(call(x), x.sum(0), atol=0.1)
    assert {groups for _, groups in moved(call, x)} == {HOST, BETWEEN}
