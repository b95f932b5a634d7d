"""Find where a call's leaves are, and put the state on the mesh: rank 0's value of each leaf, whole or in shards."""

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxdist import compat
from jaxdist.agreement.calls import Rows
from jaxdist.agreement.description import grouped, listed
from jaxdist.compilation.signature import NUMBERS, Leaf, Signature, is_keys
from jaxdist.device_map import Device
from jaxdist.mesh import AXIS, GROUP, NAMES, axes_by_dim, data_size, from_host, in_a_row
from jaxdist.placements.model.layouts import HOST, Cut, Layout, Padded, copied, layout, on_host, physical, sharding
from jaxdist.runtime.context import Context, map_of
from jaxdist.step import batch
from jaxdist.step.batch_placer import BatchPlacer
from jaxdist.step.leaves import abstract, sharding_over_any, spans


class Elsewhere(enum.Enum):
    """The layout of a leaf that is not on the mesh yet."""

    ELSEWHERE = "elsewhere"


ELSEWHERE: Final = Elsewhere.ELSEWHERE
CurrentLayout = Layout | Literal[Elsewhere.ELSEWHERE] | None  # None: whole on each device


class Placer:
    """Moves leaves onto the devices of one mesh."""

    def __init__(self, context: Context, mesh: Mesh, input_mesh: Mesh | None = None):
        self.context, self.mesh = context, mesh
        self.input_mesh = input_mesh or mesh  # a process passes the rows of its place on this one
        self.state_sharding = sharding(mesh, None)
        self.device_map = map_of(self.input_mesh)
        self.process_count, self.share = self.device_map.process_count, self.device_map.share(context.rank)
        self.batch = BatchPlacer(mesh, self.input_mesh, self.share, self.process_count)
        self._number = jax.jit(lambda x: x, out_shardings=self.state_sharding)

    def layout(self, x: Leaf) -> CurrentLayout:
        """Return a leaf's layout on the mesh, None if it is whole, `ELSEWHERE` if it is not on the mesh."""
        current = physical(x).sharding if isinstance(x, (Padded, jax.Array)) else None
        if not isinstance(current, NamedSharding) or in_a_row(current.mesh) != self.mesh:
            return ELSEWHERE
        if type(x) is Padded:
            return x.layout
        host = current.memory_kind == HOST
        if not host and current.memory_kind != self.state_sharding.memory_kind:  # one that steps make no use of
            return ELSEWHERE
        if current.is_fully_replicated:
            return (on_host(None, x.shape, self.mesh.size) or ELSEWHERE) if host else None
        return ELSEWHERE if (cuts := _cuts(current)) is None else layout(*cuts, host=host)

    def check(self, signature: Signature, leaves: Sequence[Leaf]) -> None:
        """Refuse state on devices outside this mesh, and what cannot be this process's part of the batch."""
        for name, is_batch, x in zip(signature.names, signature.is_batch, leaves, strict=True):
            if is_batch:
                self._check_batch(name, x)
            else:
                self._check_state(name, x)

    def _check_batch(self, name: str, x: Leaf) -> None:
        current = self.layout(x)
        cut = current.by(AXIS) if isinstance(current, Layout) else None
        if cut and cut.parts < data_size(self.mesh):
            raise ValueError(
                f"batch leaf {name} is kept in shards within groups of devices, which is for state: pass the "
                "examples of this process as a plain array"
            )
        if type(x) is not Padded:
            batch.check(name, x)
            self._check_rows(name, x)

    def _check_state(self, name: str, x: Leaf) -> None:
        current = sharding_over_any(x)
        if current is None:
            return
        if in_a_row(current.mesh) != self.mesh and current.device_set != set(self.mesh.devices.flat):
            raise ValueError(
                f"state leaf {name} is in shards over {_named(current.device_set)}, and this step runs on "
                f"{_named(self.mesh.devices.flat)}. Restore the state from a checkpoint, or gather it with "
                "jaxdist.unshard where it was made"
            )

    def _check_rows(self, name: str, x: Leaf) -> None:
        """Refuse a part of the batch that has the wrong number of rows for this process."""
        total = self.logical_batch(x).shape[0]
        if self.process_count == 1 or spans(x) or np.shape(x)[0] == self.share.size(total):
            return
        shown = listed(grouped((share.size(total), rank) for rank, share in self.device_map.shares.items()))
        raise ValueError(
            f"batch leaf {name} has {np.shape(x)[0]} rows on this rank, of {total} on all ranks, which should pass "
            f"{shown}. Take the rows ctx.rows({total}) of the whole batch, or let jaxdist.loader divide it"
        )

    # --- state

    def place_state(self, leaves: Sequence[Leaf], layouts: Sequence[Layout | None]) -> list[Leaf]:
        """Return rank 0's value of each leaf on the mesh with these layouts. The given leaves do not change."""
        unaliased = without_aliases(leaves) if self.mesh.size == 1 else leaves
        # Keys are sent as their bits: neither NumPy nor the control channel has a type for them.
        of_rank_0 = self._of_rank_0([jax.random.key_data(x) if is_keys(x) else x for x in unaliased])
        placed = [
            self._replicate(self._unpadded(x)) if target is None else self._in_shards(x, target)
            for x, target in zip(of_rank_0, layouts, strict=True)
        ]
        return list(map(_typed_as, placed, leaves))

    def _of_rank_0(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """Return rank 0's value of each leaf; one that spans processes is the same on all of them already."""
        if self.process_count == 1:
            return leaves
        spanning = [spans(physical(x)) for x in leaves]
        sent = self.context.broadcast([None if s else _to_host(x) for s, x in zip(spanning, leaves, strict=True)])
        return [x if s else value for s, x, value in zip(spanning, leaves, sent, strict=True)]

    def _in_shards(self, x: Leaf, target: Layout) -> jax.Array | Padded:
        """Shard a leaf that is the same on every process, or move a sharded one to a different memory."""
        current = self.layout(x)
        # The same slices in the other memory: each process moves its own, and none sends anything.
        if isinstance(current, Layout) and current is not target and layout(*current.cuts, host=target.host) is target:
            array = copied(physical(x), sharding(self.mesh, target))
            return array if target.is_plain else Padded(array, target)
        x = target.padded(np.asarray(self.whole(x)))
        array = from_host(x.shape, sharding(self.mesh, target), lambda index: np.array(x[index]))
        return array if target.is_plain else Padded(array, target)

    def whole(self, x: Leaf) -> Leaf:
        """Return a leaf that this process has whole, without padding. Every rank calls it."""
        x = self._unpadded(x)
        return (x if x.is_fully_replicated else self._replicate(x)).addressable_data(0) if spans(x) else x

    def _unpadded(self, x: Leaf) -> Leaf:
        """Return a leaf without the padding that it has from a different mesh."""
        if type(x) is not Padded:
            return x
        return x.layout.trimmed(self._replicate(x.array).addressable_data(0) if spans(x.array) else np.asarray(x.array))

    def _replicate(self, x: Leaf) -> jax.Array:
        if isinstance(x, NUMBERS):
            return self._number(x)  # keeps its weak type
        # On several devices the step may donate its state, and the caller keeps the arguments: never an alias of them
        # (device_put makes one on the first device, may_alias=False or not). On one device they are taken, as by jit:
        # with a copy the first call would hold the state twice.
        if self.process_count == 1 or spans(x):
            alias = self.mesh.size == 1 and isinstance(x, jax.Array)
            return jax.device_put(x if alias else jnp.copy(x), self.state_sharding)
        # Copies, as `from_host` may alias what it is given, and the caller keeps `x`.
        return from_host(np.shape(x), self.state_sharding, lambda index: np.array(x[index]))

    # --- parts of the batch

    def logical_batch(self, x: Leaf) -> jax.ShapeDtypeStruct:
        """The type of a leaf of the batch as the step sees it: with the examples of all processes."""
        if type(x) is batch.Part:
            aval, rows = jax.typeof(x.array), x.total
        else:
            aval = jax.typeof(physical(x))
            is_global = type(x) is Padded or spans(x)
            rows = x.shape[0] if is_global else self.device_map.rows_of_all(aval.shape[0])
        weak = self.process_count == 1 and type(x) is not Padded and aval.weak_type
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), aval.dtype, weak_type=weak)

    def types(self, signature: Signature, leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of a call's leaves as the step sees them: the batch has the examples of all ranks."""
        pairs = zip(leaves, signature.is_batch, strict=True)
        types = [self.logical_batch(x) if is_batch else abstract(x) for x, is_batch in pairs]
        for name, aval in zip(signature.names, types, strict=True):
            if jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True) != aval.dtype:
                raise TypeError(f"leaf {name} is {aval.dtype}, and jax_enable_x64 is off: set it, or cast the leaf")
        return types

    def rows_if_part(self, x: Leaf) -> int | None:
        """Return the rows of a leaf that may be this process's part of a batch; None of others."""
        is_no_part = type(x) is Padded or spans(x) or not hasattr(x, "dtype") or not np.ndim(x)
        return None if is_no_part else np.shape(x)[0]

    def parted(self, leaves: Sequence[Leaf], rows: Rows) -> list[Leaf]:
        """Return the leaves, those that would be parts of unequal lengths as `Part`."""
        # 5 rows over 2 ranks are 3 and 2: by its own alone, one rank would take them for 3 of 6, the other for 2 of 4.
        rows_of_leaves = zip(leaves, rows.here, rows.total, strict=True)
        return [
            x if here is None or total is None or total == self.device_map.rows_of_all(here) else batch.Part(x, total)
            for x, here, total in rows_of_leaves
        ]


def without_aliases(state: Sequence[Leaf]) -> list[Leaf]:
    """Donating one buffer twice is an error: the second reference (an average that starts as the weights) is copied."""
    seen: set[int] = set()
    out = []
    for x in state:
        is_alias = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        if is_alias:
            x = copied(x, x.sharding) if x.sharding.memory_kind == HOST else jnp.copy(x)
        out.append(x)
    return out


def _typed_as(x: jax.Array | Padded, leaf: Leaf) -> jax.Array | Padded:
    """Return a leaf on the mesh with the type that it had before: on its way it was an array of NumPy."""
    if is_keys(leaf):
        return jax.random.wrap_key_data(physical(x), impl=jax.random.key_impl(leaf))
    if x.weak_type or not getattr(leaf, "weak_type", False):
        return x
    array = _weakly_typed(physical(x).sharding)(physical(x))
    return Padded(array, x.layout) if type(x) is Padded else array


@functools.cache
def _weakly_typed(target: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: compat.with_weak_type(x, True), out_shardings=target)


def _named(devices: Iterable[Device]) -> str:
    ids = sorted(d.id for d in devices)
    return f"{len(ids)} devices, {ids[0]} to {ids[-1]}"


def _cuts(current: NamedSharding) -> list[Cut] | None:
    """Return the cuts that make an array's slices, or None if a step makes no such slices.

    On a mesh of data 2 x model 4, ``P(None, ("model", "data"))`` is ``[Cut("model", 4, 1), Cut("data", 2, 1)]``: the
    model axis cuts first, and a shard is of the slice that it leaves. ``P(("data", "model"))`` is None.
    """
    mesh, cuts = current.mesh, list[Cut]()
    assert isinstance(mesh, Mesh)  # an abstract one is of types
    by_dim = axes_by_dim(current.spec)
    if any({GROUP, AXIS}.issubset(axes) and axes.index(GROUP) + 1 != axes.index(AXIS) for axes in by_dim):
        return None  # slices in a different order
    in_a_group = not any(GROUP in axes for axes in by_dim)
    # The axes "group" and "data", one after the other, are the whole of the data axis.
    by_dim = [tuple(name for name in axes if name != GROUP or AXIS not in axes) for axes in by_dim]
    dim_of = {name: d for d, axes in enumerate(by_dim) for name in axes}
    for name in NAMES:
        if name in dim_of and name != GROUP:
            parts = mesh.shape[name] if name != AXIS or in_a_group else data_size(mesh)
            cuts.append(Cut(name, parts, dim_of[name]))
    candidate = layout(*cuts)
    is_ours = [candidate.axes(d) for d in range(len(by_dim))] == by_dim and GROUP not in dim_of
    return cuts if is_ours else None


def _to_host(x: Leaf) -> Leaf:
    """A leaf as something that can be sent, its weak type kept."""
    if isinstance(x, jax.Array) and x.weak_type and x.ndim == 0:
        return x.item()
    return x if isinstance(x, NUMBERS) else np.asarray(x)
