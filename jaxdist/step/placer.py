"""Put state and batches onto the mesh: each process's part becomes part of one global array."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxdist import compat
from jaxdist.agreement.calls import Rows
from jaxdist.agreement.description import grouped, listed
from jaxdist.mesh import AXIS, GROUP, NAMES, by_rank, data_size, from_host, in_a_row, parts_of_batch, rows_by_rank
from jaxdist.placements.layouts import HOST, Cut, Layout, Padded, copied, layout, of_batch, on_host, physical, sharding
from jaxdist.placements.values import is_narrow
from jaxdist.runtime.context import Context
from jaxdist.step import batch
from jaxdist.step.signature import NUMBERS, Signature, is_array

ELSEWHERE = object()  # stands for the layout of a leaf that is not on the mesh yet


class Placer:
    """Moves leaves onto the devices of one mesh."""

    def __init__(self, context: Context, mesh: Mesh, passed: Mesh | None = None):
        self.context, self.mesh, self.passed = context, mesh, passed or mesh
        self.state_sharding = sharding(mesh, None)
        self.processes = len({d.process_index for d in mesh.devices.flat})
        self.shared = parts_of_batch(self.passed)
        self.parts = len(self.shared)
        self.own = tuple(by_rank(self.shared).get(jax.process_index(), ()))
        self.readers = {ranks[0] for ranks in self.shared}  # one of the ranks that pass the same rows
        self._number = jax.jit(lambda x: x, out_shardings=self.state_sharding)

    def layout(self, x: Any) -> Any:
        """Return a leaf's layout on the mesh, None if it is whole, `ELSEWHERE` if it is not on the mesh."""
        own = x.sharding if isinstance(x, (Padded, jax.Array)) else None
        if not isinstance(own, NamedSharding) or in_a_row(own.mesh) != self.mesh:
            return ELSEWHERE
        if type(x) is Padded:
            return x.layout
        host = own.memory_kind == HOST
        if not host and own.memory_kind != self.state_sharding.memory_kind:
            return ELSEWHERE
        if own.is_fully_replicated:
            return (on_host(None, x.shape, self.mesh.size) or ELSEWHERE) if host else None
        return ELSEWHERE if (cuts := _cuts(own)) is None else layout(*cuts, host=host)

    def check(self, signature: Signature, leaves: Sequence[Any]) -> None:
        """Refuse state on devices outside this mesh, and what cannot be this process's part of the batch."""
        everywhere = data_size(self.mesh)
        for name, is_batch, x in zip(signature.names, signature.is_batch, leaves, strict=True):
            how, place = self.layout(x), getattr(physical(x), "sharding", None)
            cut = how.by(AXIS) if is_batch and isinstance(how, Layout) else None
            if cut and cut.parts < everywhere:
                raise ValueError(
                    f"batch leaf {name} is kept in shards within groups of devices, which is for state: pass the "
                    "examples of this process as a plain array"
                )
            if is_batch and type(x) is not Padded:
                batch.check(name, x)
                self._check_rows(name, x)
            if is_batch or not isinstance(place, NamedSharding) or place.is_fully_replicated:
                continue
            if in_a_row(place.mesh) != self.mesh and place.device_set != set(self.mesh.devices.flat):
                raise ValueError(
                    f"state leaf {name} is in shards over {_named(place.device_set)}, and this step runs on "
                    f"{_named(self.mesh.devices.flat)}. Restore the state from a checkpoint, or gather it with "
                    "jaxdist.unshard where it was made"
                )

    def _check_rows(self, name: str, x: Any) -> None:
        """Refuse a part of the batch that has more or fewer rows than this process is to pass."""
        total = self.logical_batch(x).shape[0]
        if self.processes == 1 or spans(x) or np.shape(x)[0] == self.own_rows(total):
            return
        shown = listed(grouped((rows, rank) for rank, rows in rows_by_rank(total, self.shared).items()))
        raise ValueError(
            f"batch leaf {name} has {np.shape(x)[0]} rows on this rank, of {total} on all ranks, which should pass "
            f"{shown}. Take the rows ctx.rows({total}) of the whole batch, or let jaxdist.loader divide it"
        )

    def place_state(self, leaves: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
        """Return rank 0's value of each leaf on the mesh with these layouts. The given leaves do not change."""
        weak = [getattr(x, "weak_type", False) for x in leaves]
        leaves = without_aliases(leaves) if self.mesh.size == 1 else leaves
        keys = {i: jax.random.key_impl(x) for i, x in enumerate(leaves) if batch.is_keys(x)}
        leaves = [jax.random.key_data(x) if i in keys else x for i, x in enumerate(leaves)]
        if self.processes > 1:
            spanning = [spans(physical(x)) for x in leaves]
            local = [None if s else _to_host(x) for s, x in zip(spanning, leaves, strict=True)]
            leaves = [x if s else v for s, x, v in zip(spanning, leaves, self.context.broadcast(local), strict=True)]
        placed = [
            self._replicate(self._unpadded(x)) if how is None else self.in_shards(x, how)
            for x, how in zip(leaves, layouts, strict=True)
        ]
        placed = [_weak(x) if w and not x.weak_type else x for x, w in zip(placed, weak, strict=True)]
        return [jax.random.wrap_key_data(x, impl=keys[i]) if i in keys else x for i, x in enumerate(placed)]

    def in_shards(self, x: Any, how: Layout) -> Any:
        """Shard a leaf that is the same on every process, or move a sharded one to a different memory."""
        own = self.layout(x)
        if isinstance(own, Layout) and own is not how and layout(*own.cuts, host=how.host) is how:
            array = copied(physical(x), sharding(self.mesh, how))
            return array if how.is_plain else Padded(array, how)
        x = self._unpadded(x)
        if spans(x):
            x = (x if x.is_fully_replicated else self._replicate(x)).addressable_data(0)
        x = how.padded(np.asarray(x))
        array = from_host(x.shape, sharding(self.mesh, how), lambda index: np.array(x[index]))
        return array if how.is_plain else Padded(array, how)

    def _unpadded(self, x: Any) -> Any:
        """Return a leaf without the padding that it has from a different mesh."""
        if type(x) is not Padded:
            return x
        return x.layout.trimmed(self._replicate(x.array).addressable_data(0) if spans(x.array) else np.asarray(x.array))

    def _replicate(self, x: Any) -> Any:
        if isinstance(x, NUMBERS):
            return self._number(x)  # keeps its weak type
        # On several devices the step may donate its state, and the caller keeps the arguments: never an alias of them
        # (device_put makes one on the first device, may_alias=False or not). On one device they are taken, as by jit:
        # with a copy the first call would hold the state twice.
        if self.processes == 1 or spans(x):
            alias = self.mesh.size == 1 and isinstance(x, jax.Array)
            return jax.device_put(x if alias else jnp.copy(x), self.state_sharding)
        return from_host(np.shape(x), self.state_sharding, lambda index: np.array(x[index]))

    def place_batch(self, leaves: Sequence[Any], layouts: Sequence[Layout], rows: Sequence[int]) -> list[Any]:
        """The parts of the batch, with so many rows in all, as global arrays in the order of the data axis, padded."""
        if self.mesh.size == 1:
            local = set(self.mesh.local_devices)
            own = lambda x: type(x) is np.ndarray or (isinstance(x, jax.Array) and x.devices() == local)
            if all(map(own, leaves)):  # jit itself is faster
                return list(leaves)
        places = [sharding(self.mesh, how) for how in layouts]
        if self.processes == 1:
            whole = [_filled(x, how) for x, how in zip(leaves, layouts, strict=True)]
            return jax.device_put(whole, places[0] if len(set(places)) == 1 else places)  # one is quicker
        return [self._shard(*one) for one in zip(leaves, layouts, places, rows, strict=True)]

    def _shard(self, x: Any, how: Layout, place: NamedSharding, total: int) -> jax.Array:
        x = x.array if type(x) is batch.Part else x
        array = physical(x)
        if spans(array):
            there = array.sharding == place and array.shape == how.physical(x.shape)
            return array if there else _mover(place, how, x.shape)(array)
        if batch.is_keys(x):
            data = self._shard(jax.random.key_data(x), how, place, total)
            return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))
        each, first = -(-total // self.parts), place
        rows = each * self.parts  # with the padding of the last parts
        if moves := self.passed != self.mesh:
            first = sharding(self.passed, of_batch((rows,), self.passed))
        x = _lengthened(x, [cut for cut in how.cuts if cut.axis != AXIS and not moves])
        x = _extended(x, [each * len(self.own) - x.shape[0], *[0] * (x.ndim - 1)])
        shape = (rows, *x.shape[1:])
        slices = _own_slices(first, shape, each, self.own)
        parts = [(device, x if index is None else x[index]) for device, index in slices]
        shards = [jax.device_put(part, device) for device, part in parts]
        array = jax.make_array_from_single_device_arrays(shape, first, shards)
        return _mover(place, how, (total, *shape[1:]))(array) if moves else array

    def logical_batch(self, x: Any) -> jax.ShapeDtypeStruct:
        """The type of a leaf of the batch as the step sees it: with the examples of all processes."""
        if type(x) is batch.Part:
            aval, rows = jax.typeof(x.array), x.total
        else:
            aval = jax.typeof(physical(x))
            rows = x.shape[0] if type(x) is Padded or spans(x) else self.everywhere(aval.shape[0])
        weak = self.processes == 1 and type(x) is not Padded and aval.weak_type
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), aval.dtype, weak_type=weak)

    def part(self, x: Any) -> int | None:
        """Return the rows of a leaf that may be this process's part of a batch; None of others."""
        there = type(x) is Padded or spans(x) or not hasattr(x, "dtype") or not np.ndim(x)
        return None if there else np.shape(x)[0]

    def parted(self, leaves: Sequence[Any], rows: Rows) -> list[Any]:
        """Return the leaves, those that would be parts of unequal lengths as `Part`."""
        each = zip(leaves, rows.own, rows.total, strict=True)
        return [
            x if own is None or total is None or total == self.everywhere(own) else batch.Part(x, total)
            for x, own, total in each
        ]

    def own_rows(self, total: int) -> int:
        """Return the number of rows of a batch that this process passes."""
        return rows_by_rank(total, self.shared).get(self.context.rank, 0)

    def everywhere(self, rows: int) -> int:
        """Return the rows of all processes' parts if they are as long as this one's."""
        return rows * self.parts // max(1, len(self.own))


def type_key(x: Any) -> Any:
    """The properties of a leaf's type that decide which program runs."""
    total = x.total if isinstance(x, (batch.Part, batch.BatchPart)) else None
    return np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False), total


def without_aliases(state: Sequence[Any]) -> list[Any]:
    """Donating one buffer twice is an error: the second reference (an average that starts as the weights) is copied."""
    seen: set[int] = set()
    out = []
    for x in state:
        twin = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        out.append(copied(x, x.sharding) if twin and x.sharding.memory_kind == HOST else jnp.copy(x) if twin else x)
    return out


def _weak(x: Any) -> Any:
    """A leaf on the mesh, typed as a Python number is: on its way it was an array of NumPy."""
    array = _weakly(physical(x).sharding)(physical(x))
    return Padded(array, x.layout) if type(x) is Padded else array


@functools.cache
def _weakly(place: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: compat.with_weak_type(x, True), out_shardings=place)


@functools.lru_cache(1024)
def _mover(place: NamedSharding, how: Layout, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """Return a function that brings a leaf of a batch from a different mesh."""

    def moved(x: jax.Array) -> jax.Array:
        return _lengthened(x[tuple(map(slice, shape))], how.cuts)

    return jax.jit(moved, out_shardings=place)


@functools.lru_cache(1024)
def _own_slices(
    place: NamedSharding, shape: tuple[int, ...], rows: int, own: tuple[int, ...]
) -> list[tuple[Any, tuple[slice, ...] | None]]:
    """Return each local device's slices of this process's part of a batch; None stands for all of it."""
    found: list[tuple[Any, tuple[slice, ...] | None]] = []
    for device, index in place.addressable_devices_indices_map(shape).items():
        ends = [s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True)]
        first, end = ends[0]
        moved = (own.index(first // rows) - first // rows) * rows if rows else 0
        ends[0] = first + moved, end + moved
        whole = ends == [(0, rows * len(own)), *((0, n) for n in shape[1:])]
        found.append((device, None if whole else tuple(slice(*one) for one in ends)))
    return found


def _named(devices: Iterable[Any]) -> str:
    ids = sorted(d.id for d in devices)
    return f"{len(ids)} devices, {ids[0]} to {ids[-1]}"


def spans(x: Any) -> bool:
    """Check whether a leaf is an array on several processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def _filled(x: Any, how: Layout) -> Any:
    """Pad a batch with copies of its last entries, up to a size that the devices divide."""
    if type(x) is Padded:  # padded already, for this mesh or a different one
        if x.layout is how:
            return x.array
        x = np.asarray(x)
    if type(x) is np.ndarray:  # JAX's own cast, without jax_enable_x64, is a race between devices (jax 0.10)
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    return _lengthened(x, how.cuts)


def _lengthened(x: Any, cuts: Sequence[Cut]) -> Any:
    """An array with copies of its last entries, for the padding of each cut."""
    return _extended(x, [sum(cut.pad for cut in cuts if cut.dim == d) for d in range(x.ndim)])


def _extended(x: Any, pads: Sequence[int]) -> Any:
    """An array with so many more entries along each dimension: copies of the last ones, or zeros if there are none."""
    if not any(pads):
        return x
    own = jnp if isinstance(x, jax.Array) and not is_narrow(x.dtype) else np
    return own.pad(x, [(0, n) for n in pads], "edge" if all(x.shape) else "constant")


def _cuts(own: NamedSharding) -> list[Cut] | None:
    """Return the cuts that make an array's slices, or None if a step makes no such slices."""
    mesh, cuts = own.mesh, list[Cut]()
    assert isinstance(mesh, Mesh)
    by_dim = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in own.spec]
    in_a_group = not any(GROUP in axes for axes in by_dim)
    by_dim = [tuple(name for name in axes if name != GROUP or AXIS not in axes) for axes in by_dim]
    at = {name: d for d, axes in enumerate(by_dim) for name in axes}
    for name in NAMES:
        if name in at and name != GROUP:
            parts = mesh.shape[name] if name != AXIS or in_a_group else data_size(mesh)
            cuts.append(Cut(name, parts, at[name]))
    how = layout(*cuts)
    return cuts if [how.axes(d) for d in range(len(by_dim))] == by_dim and GROUP not in at else None


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a leaf as the step sees it; the leaf may be a type itself."""
    aval = jax.typeof(x.array if type(x) in (Padded, batch.Part) else x)
    return jax.ShapeDtypeStruct(np.shape(x), aval.dtype, weak_type=aval.weak_type)


def on_one_device(x: Any) -> Any:
    """Return a leaf as an array on one device; numbers and leaves that are not arrays stay unchanged."""
    if isinstance(x, NUMBERS) or not is_array(x):
        return x
    if batch.is_keys(x):
        return jax.random.wrap_key_data(on_one_device(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def in_shards(x: Any) -> bool:
    """Check whether a leaf is sharded, over any devices."""
    own = getattr(x, "sharding", None)
    return type(x) is Padded or (isinstance(own, NamedSharding) and not own.is_fully_replicated)


def _to_host(x: Any) -> Any:
    """A leaf as something that can be sent, its weak type kept."""
    if isinstance(x, jax.Array) and x.weak_type and x.ndim == 0:
        return x.item()
    return x if isinstance(x, NUMBERS) else np.asarray(x)
