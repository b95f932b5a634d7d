"""Eager collectives as compiled programs over one device of each process.

What XLA has no collective for is an exchange and a reduction on each device. So are, between CPU processes,
reduce-scatters, as gloo's give wrong data now and then (jax#40830), and minima and maxima, in which gloo loses NaN.
There all leaves of a call travel in one buffer.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.collectives.call import Call, Group, merge, positive, split
from jaxdist.collectives.numerics import reduction
from jaxdist.communicators import exchange
from jaxdist.control.channel import ControlError
from jaxdist.runtime import gloo

_GROUP = "group"  # name of the mesh axis
_GATHERED = 1 << 20  # bytes that a device may gather to reduce them; more: an exchange of parts
_CHUNK = 1 << 20  # bytes of one value in the key-value store, far below gRPC's limit


class XlaWire:
    """The XLA side of eager collectives."""

    in_programs = True
    """Whether collectives are programs of XLA, dispatched and not done when a call returns."""

    def __init__(self, ctx: Any, timeout: float):
        self._ctx, self._timeout = ctx, timeout
        self._first = {d.process_index: d for d in reversed(ctx.devices)}  # of each process
        self._counts: dict[tuple[int, int], int] = {}  # messages so far, by source and destination

    def differ(self, fingerprint: int, sequence: int, what: Callable[[], str]) -> bool:
        """Whether the ranks' fingerprints or sequence numbers differ; waits for all ranks."""
        try:
            entered = self._ctx.control.exchange("an eager collective", (fingerprint, sequence), self._timeout, what())
        except ControlError as error:
            raise ControlError(f"{what()}: not every rank came to it. {error}") from None
        return len(set(entered)) > 1

    def load(self, leaf: Any) -> jax.Array:
        """A leaf on this process's device, once it is computed."""
        return jax.block_until_ready(jax.device_put(leaf, self._first[self._ctx.rank]))

    def run(self, call: Call, leaves: Sequence[jax.Array], group: Group) -> list[jax.Array | None]:
        """The results; None where this rank's own value stays. All ranks of the group are in this call."""
        if not leaves:
            return []
        mesh = _mesh(tuple(self._first[r] for r in group.ranks))
        sharding = NamedSharding(mesh, P())  # a lie that spares a reshape: each device holds its own
        inputs: list[jax.Array] = [jax.make_array_from_single_device_arrays(x.shape, sharding, [x]) for x in leaves]
        over_gloo = mesh.devices.flat[0].platform == "cpu"
        run = functools.partial(_program(mesh, call, over_gloo), inputs)
        outs = gloo.quietly(tuple(d.id for d in mesh.devices.flat), run) if over_gloo else run()
        stays = (call.kind in ("reduce", "gather") and group.me != call.root) or (
            call.kind == "broadcast" and group.me == call.root
        )
        return [None if stays else _local(out) for out in outs]

    # --- between two: through the key-value store of jax.distributed, which needs nobody else

    def send(self, header: Any, leaves: Sequence[jax.Array], to: int) -> None:
        """Starts to send."""
        key = self._key(self._ctx.rank, to)
        data = b"".join(np.asarray(x).tobytes() for x in leaves)
        chunks = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)]
        store = compat.key_value_store()
        for i, chunk in enumerate(chunks):
            store.key_value_set_bytes(f"{key}/{i}", chunk)
        store.key_value_set_bytes(key, pickle.dumps((header, len(chunks))))

    def recv(self, source: int, what: str, accept: Callable[[Any], Sequence[jax.ShapeDtypeStruct]]) -> list[jax.Array]:
        """What `source` sends next; `accept` raises if its header is not as expected, and the data are dropped."""
        key = self._key(source, self._ctx.rank)
        store = compat.key_value_store()
        milliseconds = int(self._timeout * 1e3)
        try:
            header, count = pickle.loads(store.blocking_key_value_get_bytes(key, milliseconds))
        except jax.errors.JaxRuntimeError as error:
            self._counts[source, self._ctx.rank] -= 1
            raise ControlError(
                f"rank {self._ctx.rank}: {what}: {self._ctx.control.who(source)} sent nothing within "
                f"{self._timeout:g} s. Each recv needs a send on the other rank ({str(error).splitlines()[0]})"
            ) from None
        names = [f"{key}/{i}" for i in range(count)]
        try:
            likes = accept(header)
            data = b"".join(store.blocking_key_value_get_bytes(name, milliseconds) for name in names)
        finally:
            for name in (key, *names):
                store.key_value_delete(name)
        outs, start = [], 0
        for like in likes:
            x = np.frombuffer(data, like.dtype, like.size, start).reshape(like.shape)
            outs.append(jnp.array(x))
            start += x.nbytes
        return outs

    def _key(self, source: int, to: int) -> str:
        number = self._counts[source, to] = self._counts.get((source, to), 0) + 1
        return f"jaxdist/{source}>{to}/{number}"


@functools.cache
def _mesh(devices: tuple[Any, ...]) -> Mesh:
    return Mesh(np.array(devices), (_GROUP,), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=512)
def _program(mesh: Mesh, call: Call, gloo: bool) -> Callable[[list[jax.Array]], list[jax.Array]]:
    kind: Any = globals()[f"_{call.kind}"]

    def body(xs: list[Any]) -> list[Any]:
        full = [x for x in xs if x.size]
        outs = iter(kind(call, full, mesh.size, gloo) if full else ())

        def empty(x: Any) -> Any:
            like = jax.eval_shape(lambda x: kind(call, [x], mesh.size, True)[0], x)
            return jnp.zeros(like.shape, like.dtype)

        return [next(outs) if x.size else empty(x) for x in xs]

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def _local(out: jax.Array) -> jax.Array:
    shard = out.addressable_data(0)
    on_cpu = next(iter(shard.devices())).platform == "cpu"
    # On CPUs as any array that the user makes: not bound to a device. The memory is the same.
    return compat.adopt(np.asarray(shard)) if on_cpu else shard


# --- the programs: each leaf's part of a collective, given how buffers are gathered and exchanged


def _allreduce(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    if all(_plain(call.op, x) for x in xs):
        if not gloo:
            return [_lax_reduce(call.op, x) for x in xs]
        if call.op in ("sum", "avg") and len({x.dtype for x in xs}) == 1:
            flat, restore = ravel_pytree(xs)
            return restore(_lax_reduce(call.op, flat))
    if sum(x.nbytes for x in xs) * n <= _GATHERED:  # added up in one order, so to the same result everywhere
        return [_reduced(call.op, parts) for parts in _gather_all(xs)]
    flat = [jnp.pad(x.reshape(-1), (0, -x.size % n)).reshape(n, -1) for x in xs]
    sums = _exchange_and_reduce(call.op, flat)
    wholes = [w.reshape(-1) for w in _gather_all(sums)]
    return [w[: x.size].reshape(x.shape) for w, x in zip(wholes, xs, strict=True)]


_reduce = _allreduce  # the others keep their own, which run sees to


def _reduce_scatter(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    axes = [positive(call.axis, x.ndim) for x in xs]
    if not gloo and call.op == "sum" and all(_plain("sum", x) for x in xs):
        return [
            lax.psum_scatter(x, _GROUP, scatter_dimension=axis, tiled=True) for x, axis in zip(xs, axes, strict=True)
        ]
    parts = [split(x, axis, n) for x, axis in zip(xs, axes, strict=True)]
    return _exchange_and_reduce(call.op, parts)


def _allgather(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    return [
        parts.reshape(n) if not x.ndim else merge(parts, positive(call.axis, x.ndim))
        for x, parts in zip(xs, _gather_all(xs), strict=True)
    ]


def _gather(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    return _allgather(Call("allgather"), xs, n, gloo)


def _all_to_all(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    parts = [split(x, positive(call.split_axis, x.ndim), n) for x in xs]
    return [merge(p, positive(call.concat_axis, x.ndim)) for x, p in zip(xs, _exchange_all(parts), strict=True)]


def _scatter(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    return [parts[call.root] for parts in _exchange_all([split(x, 0, n) for x in xs])]


def _broadcast(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    """In rounds: whoever has it sends it to one who has not."""
    flat, restore = _packed([x[None] for x in xs], 1)
    me = lax.axis_index(_GROUP)
    have = 1
    while have < n:
        pairs = [((call.root + i) % n, (call.root + i + have) % n) for i in range(min(have, n - have))]
        coming = lax.ppermute(flat, _GROUP, pairs)
        new = functools.reduce(jnp.logical_or, [me == to for _, to in pairs])
        flat = jnp.where(new, coming, flat)
        have *= 2
    return [x[0] for x in restore(flat)]


def _permute(call: Call, xs: list[Any], n: int, gloo: bool) -> list[Any]:
    flat, restore = _packed([x[None] for x in xs], 1)
    return [x[0] for x in restore(lax.ppermute(flat, _GROUP, call.perm))]


def _plain(op: str, x: Any) -> bool:
    how = reduction(op, x.dtype)
    return op != "prod" and how.out == x.dtype and x.dtype.kind in "iufc"


def _lax_reduce(op: str, x: Any) -> Any:
    wide = x.astype(reduction(op, x.dtype).sums_in)
    reduce: Any = {"sum": lax.psum, "avg": lax.pmean, "min": lax.pmin, "max": lax.pmax}[op]
    return reduce(wide, _GROUP).astype(x.dtype)


def _reduced(op: str, parts: Any) -> Any:
    """`parts` reduced over their leading dimension, in the dtype and to the result that `op` asks for."""
    how = reduction(op, parts.dtype)
    wide = parts.astype(jax.dtypes.canonicalize_dtype(how.sums_in))
    total = functools.reduce(_JNP[how.ufunc], wide)
    return (total / len(parts) if how.divide else total).astype(how.out)


_JNP: dict[np.ufunc, Any] = {
    np.add: jnp.add,
    np.multiply: jnp.multiply,
    np.minimum: jnp.minimum,
    np.maximum: jnp.maximum,
    np.logical_or: jnp.logical_or,
    np.logical_and: jnp.logical_and,
}


def _gather_all(xs: Sequence[Any]) -> list[Any]:
    """Everyone's `x`, stacked in a new leading dimension, for each of `xs`: one all-gather."""
    flat, restore = _packed([x[None] for x in xs], 1)
    return restore(lax.all_gather(flat[0], _GROUP))


def _exchange_all(parts: Sequence[Any]) -> list[Any]:
    """Row i of the result is what device i holds in my row, for each of `parts`: one all-to-all."""
    flat, restore = _packed(parts, parts[0].shape[0])
    return restore(lax.all_to_all(flat, _GROUP, 0, 0, tiled=True))


def _exchange_and_reduce(op: str, parts: Sequence[Any]) -> list[Any]:
    """What `_exchange_all` gives, reduced over the devices."""
    return [_reduced(op, p) for p in _exchange_all(parts)]


def _packed(xs: Sequence[Any], rows: int) -> tuple[Any, Callable[[Any], list[Any]]]:
    """Arrays of `rows` rows as one ``(rows, k)`` that every wire moves, bit for bit, and the way back.

    The way back takes any number of rows.
    """
    raws, backs = zip(*(_bits(x) for x in xs), strict=True)
    narrow = len({r.dtype for r in raws}) > 1
    flat = [(_as_bytes(r) if narrow else r).reshape(rows, -1) for r in raws]
    ends = np.cumsum([f.shape[1] for f in flat])

    def restore(whole: Any) -> list[Any]:
        outs = []
        for raw, back, part in zip(raws, backs, jnp.split(whole, ends[:-1], axis=1), strict=True):
            shape = (whole.shape[0], *raw.shape[1:])
            if narrow and raw.dtype.itemsize > 1:
                part = lax.bitcast_convert_type(part.reshape(*shape, raw.dtype.itemsize), raw.dtype)
            elif narrow:
                part = lax.bitcast_convert_type(part, raw.dtype)
            outs.append(back(part.reshape(shape)))
        return outs

    return jnp.concatenate(flat, axis=1) if len(flat) > 1 else flat[0], restore


def _as_bytes(raw: Any) -> Any:
    return lax.bitcast_convert_type(raw, jnp.uint8)


def _bits(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`x` in an integer or common float dtype, bit for bit, and the way back."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([x.real, x.imag], -1), lambda y: lax.complex(y[..., 0], y[..., 1])
    return exchange.bits(x)
