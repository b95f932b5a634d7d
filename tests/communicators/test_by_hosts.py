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


def summed(x: Any, in_host: int, wire: str | None = None) -> Any:
    """The sum over eight devices, as a program."""

    def reduce(x: Any) -> Any:
        return all_reduce_p.bind(x[0], axes=("data",), wire=wire)

    def local(x: Any) -> Any:
        closed = jax.make_jaxpr(reduce, axis_env=[("data", 8)])(x)
        return xla.GlooLowering(hosts=(in_host, LARGE)).run(closed, x)[0]

    return jax.jit(jax.shard_map(local, mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False))


def moved(program: Any, *args: Any) -> set[tuple[str, Any]]:
    return {(one.kind, one.groups) for one in collectives(program.lower(*args).compile().as_text(), 8)}


@pytest.mark.parametrize("shape", [(1 << 13,), (3, 5, 7, 97)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int32"])
def test_large_sums_within_each_host_first(shape: tuple[int, ...], dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, *shape)), dtype)
    assert x[0].nbytes >= LARGE // 2
    program = summed(x, 2)
    np.testing.assert_array_equal(program(x), x.sum(0))
    if x[0].nbytes >= LARGE:
        assert moved(program, x) == {("all-to-all", HOST), ("all-reduce", BETWEEN), ("all-gather", HOST)}


@pytest.mark.parametrize(("size", "in_host"), [(1 << 12, 2), (1 << 14, 0)])
def test_small_ones_and_those_of_one_host_at_once(size: int, in_host: int) -> None:
    x = jnp.ones((8, size), jnp.float32)
    program = summed(x, in_host)
    np.testing.assert_array_equal(program(x), 8)
    assert moved(program, x) == {("all-reduce", ALL)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
@pytest.mark.parametrize(("shape", "dim"), [((4099, 7), 0), ((3, 4096, 5), 1)])
def test_large_gathers_between_hosts_first(shape: tuple[int, ...], dim: int, dtype: str) -> None:
    whole = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype)
    padded = jnp.pad(whole, [(0, -shape[d] % 8 if d == dim else 0) for d in range(len(shape))])

    def local(x: Any) -> Any:
        def gather(x: Any) -> Any:
            return gather_shards_p.bind(x, axes=("data",), dim=dim, size=shape[dim], devices=8)

        closed = jax.make_jaxpr(gather, axis_env=[("data", 8)])(x)
        return xla.GlooLowering(hosts=(2, LARGE)).run(closed, x)[0]

    spec = P(*[None] * dim, "data")
    program = jax.jit(jax.shard_map(local, mesh=MESH, in_specs=spec, out_specs=P(), check_vma=False))
    np.testing.assert_array_equal(program(padded), whole)
    large = padded.nbytes >= LARGE
    groups = {BETWEEN, HOST} if large else {ALL}
    assert moved(program, padded) == {("all-gather", g) for g in groups}


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize(("shape", "dim"), [((4099, 7), 0), ((3, 4096, 5), 1), ((24, 3), 0)])
def test_large_sums_in_slices_within_each_host_first(shape: tuple[int, ...], dim: int, wire: Any) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, *shape)), jnp.float32)

    def local(x: Any) -> Any:
        def reduce(x: Any) -> Any:
            return reduce_shard_p.bind(x[0], axes=("data",), wire=wire, dim=dim, devices=8)

        closed = jax.make_jaxpr(reduce, axis_env=[("data", 8)])(x)
        return xla.GlooLowering(hosts=(2, LARGE)).run(closed, x)[0]

    out = P(*[None] * dim, "data")
    program = jax.jit(jax.shard_map(local, mesh=MESH, in_specs=P("data"), out_specs=out, check_vma=False))
    got = np.take(np.asarray(program(x)), np.arange(shape[dim]), dim)  # without what it was padded with
    np.testing.assert_array_equal(got, x.sum(0))  # 8-bit numbers: exact in bfloat16
    groups = {HOST, BETWEEN} if x[0].nbytes >= LARGE else {ALL}
    assert moved(program, x) == {("all-to-all", g) for g in groups}


@pytest.mark.parametrize("primitive", [all_reduce_p, reduce_shard_p, gather_shards_p])
def test_over_one_of_two_axes_at_once(primitive: Any) -> None:
    """Each is within a host, or has one device of each: no link would carry less."""
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, 4, LARGE // 4)), jnp.float32)
    params: dict[Any, dict[str, Any]] = {
        all_reduce_p: {"wire": None},
        reduce_shard_p: {"wire": None, "dim": 0, "devices": 4},
        gather_shards_p: {"dim": 0, "size": 16, "devices": 4},
    }
    mesh = in_groups(MESH, 4)

    def local(x: Any) -> Any:
        call = lambda x: primitive.bind(x[0], axes=("group",), **params[primitive])
        closed = jax.make_jaxpr(call, axis_env=list(mesh.shape.items()))(x)
        return xla.GlooLowering(axes=2, hosts=(2, LARGE)).run(closed, x)[0]

    spec = P(("group", "data"))
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    got = np.asarray(program(x)).reshape(8, -1, LARGE // 4)
    for device in range(8):
        own = x[device % 2 :: 2]
        want = {
            all_reduce_p: own.sum(0),
            reduce_shard_p: own.sum(0)[device // 2 :][:1],
            gather_shards_p: own.reshape(16, -1),
        }[primitive]
        np.testing.assert_array_equal(got[device], want)
    assert {groups for _, groups in moved(program, x)} == {BETWEEN}


def test_a_step_on_several_hosts_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxdist.runtime.context.hosts_of", lambda mesh: ["a", "a", "b", "b", "c", "c", "d", "d"])
    monkeypatch.setattr("jaxdist.communicators._over_gloo", lambda mesh: True)
    step = jaxdist.data_parallel(lambda w, x: jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), donate=False)
    found = moved(step, jnp.ones((128, 128)), np.ones((8, 128)))
    assert {("all-to-all", HOST), ("all-reduce", BETWEEN), ("all-gather", HOST)} <= found


def test_compressed() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 1 << 14)), jnp.float32)
    program = summed(x, 2, wire="bfloat16")
    np.testing.assert_allclose(program(x), x.sum(0), atol=0.1)
    assert {groups for _, groups in moved(program, x)} == {HOST, BETWEEN}
