"""Who and where each rank is, and what travels between their contexts."""

import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from harness.check import compare
from harness.errors import raises
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size


class Pair(NamedTuple):
    w: Any
    f: Any


def fields() -> list[Any]:
    """A device each, or as many as asked for, whatever XLA_FLAGS says; one context for all who ask."""
    wire, devices = ctx.communicator, int(os.environ.get("JAXDIST_DEVICES", "1"))
    assert jaxdist.init() is ctx is jaxdist.get_context() is jaxdist.init(communicator=wire)  # type: ignore[arg-type]
    with raises(RuntimeError, "communicator", wire):
        jaxdist.init(communicator="mpi" if wire == "xla" else "xla")
    with raises(RuntimeError, "connector"):
        jaxdist.init("slurm")
    assert (ctx.num_devices, len(jax.devices()), jax.local_device_count()) == (N * devices, N * devices, devices)
    assert [d.process_index for d in ctx.devices] == [rank for rank in range(N) for _ in range(devices)]
    assert ctx.local_devices == jax.local_devices()
    assert (ctx.mesh.axis_names, ctx.mesh.axis_types) == (("data",), (jax.sharding.AxisType.Auto,))
    assert ctx.is_root == (R == 0)
    x = jax.make_array_from_process_local_data(
        NamedSharding(ctx.mesh, P("data")), np.full((2 * devices, 3), R, np.float32)
    )
    assert float(jax.jit(lambda x: x.sum())(x)) == 6 * devices * sum(range(N))  # a program of the user's own
    # Ranks share the cores of a host.
    jax.jit(lambda a: a @ a)(jnp.ones((500, 500))).block_until_ready()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert names.count("tf_XLAEigen") <= max(devices, len(os.sched_getaffinity(0)) // N)
    return [R, ctx.local_rank, ctx.local_size, ctx.hosts[R] == os.uname().nodename]


def as_after_jax_initialize() -> None:
    """What programs of JAX's own for several processes do, as in its tests/multiprocess, after `jaxdist.init()`."""
    same = np.testing.assert_array_equal
    per, total = jax.local_device_count(), jax.device_count()
    mesh = jax.make_mesh((total,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    multihost_utils.sync_global_devices("begun")
    multihost_utils.assert_equal({"a": np.arange(3)}, "the same on all")
    with raises(AssertionError, "differs"):
        multihost_utils.assert_equal(np.full(2, R), "differs")
    same(multihost_utils.broadcast_one_to_all(np.full(3, R + 5.0)), np.full(3, 5.0))
    same(multihost_utils.broadcast_one_to_all(np.full(3, R), is_source=R == N - 1), np.full(3, N - 1))
    same(multihost_utils.process_allgather(np.full(2, R)), np.repeat(np.arange(N)[:, None], 2, 1))
    x = multihost_utils.host_local_array_to_global_array(np.full((per, 2), R, np.float32), mesh, P("x"))
    assert x.shape == (total, 2)
    same(multihost_utils.global_array_to_host_local_array(x, mesh, P("x")), np.full((per, 2), R, np.float32))
    same(multihost_utils.process_allgather(x, tiled=True), np.repeat(np.arange(N), per)[:, None] * np.ones(2))
    same(jax.device_put(np.arange(8.0), whole), np.arange(8.0))
    made = jax.make_array_from_callback((total,), rows, lambda index: np.arange(float(total))[index])
    same(jax.jit(lambda x: x[::-1], out_shardings=whole)(made), np.arange(float(total))[::-1])
    drawn = jax.jit(lambda key: jax.random.normal(key, (total, 3)), out_shardings=rows)(jax.random.key(0))
    same(multihost_utils.process_allgather(drawn, tiled=True), jax.random.normal(jax.random.key(0), (total, 3)))
    turn = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "x", [(k, (k + 1) % total) for k in range(total)]),
        mesh=mesh, in_specs=P("x"), out_specs=P("x"),
    )  # fmt: skip
    same(multihost_utils.process_allgather(jax.jit(turn)(made), tiled=True), np.roll(np.arange(float(total)), 1))
    added = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))(made)
    same(np.asarray(added), np.full(1, total * (total - 1) / 2))
    assert [shard.index[0].start for shard in made.addressable_shards] == [*range(R * per, (R + 1) * per)]


def sockets() -> None:
    """What is small is sent at once over each connection: the channel's, gloo's, JAX's own. (mpirun has others.)"""
    jaxdist.data_parallel(lambda x: x.sum())(np.ones(2))
    delays = []
    for number in (int(path.name) for path in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                delays.append((own.getpeername(), own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    assert delays
    assert [peer for peer, at_once in delays if not at_once] == []


def broadcasts() -> None:
    """Of trees of all types from any root; what can't be sent is an error on every rank."""
    root = N - 1

    def tree(rank: int) -> dict[str, Any]:
        return {
            "bf16": jnp.full((3, 2), rank, jnp.bfloat16), "scalar": jnp.full((), rank, jnp.float64),
            "int": np.arange(4) * rank, "big": np.full(5_000_000, rank, np.float32),  # 20 MB: several messages
            "empty": jnp.zeros((0, 3)), "key": jax.random.key(rank), "strided": np.arange(12.0).reshape(3, 4).T * rank,
        }  # fmt: skip

    got = ctx.broadcast(tree(R), root=root)
    compare(got, tree(root))
    assert isinstance(got["bf16"], jax.Array)
    assert isinstance(got["int"], np.ndarray)
    got["big"][0] = 5  # the receiver's own memory
    assert ctx.broadcast([R, Pair(R, "text"), None], root=1) == [1, Pair(1, "text"), None]
    # With a closure, which pickle alone does not send.
    mine = jax.tree_util.Partial(lambda w: w * 2, jnp.full((2,), float(R)))
    assert (ctx.broadcast(mine).args[0] == 0).all()
    everywhere = jax.device_put(np.arange(3.0), NamedSharding(ctx.mesh, P()))
    assert (np.asarray(ctx.broadcast(everywhere)) == np.arange(3.0)).all()
    split = jax.make_array_from_process_local_data(NamedSharding(ctx.mesh, P("data")), np.ones(2))
    for bad in (split, threading.Lock()):
        with raises((TypeError, ValueError), f"rank {R}"):
            ctx.broadcast(bad)
    with raises(RuntimeError, "rank 0", "broadcast", "barrier"):
        ctx.broadcast(1) if R == 0 else ctx.barrier()
    with raises(ValueError, f"root={N}"):
        ctx.broadcast(1, root=N)
    with raises(RuntimeError, "root=0", "root=1"):
        ctx.broadcast(1, root=R % 2)
    ctx.barrier(timeout=60)
