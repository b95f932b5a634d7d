"""The batch onto the mesh: the parts that processes pass become one global array.

The padding of a batch is copies of its last row, wherever it is made here: it goes through the user's operations. That
of state is zeros (`Layout.padded`): steps cut it off.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdist.compilation.signature import Leaf, is_keys
from jaxdist.device_map import Device, Share
from jaxdist.mesh import AXIS
from jaxdist.placements.model.layouts import Cut, Layout, Padded, of_batch, physical, sharding
from jaxdist.placements.model.values import is_narrow
from jaxdist.step import batch
from jaxdist.step.leaves import spans

_Cut = Callable[[Leaf], list[Leaf]]


class BatchPlacer:
    """Puts batches onto one mesh.

    Args:
      mesh: the step's.
      input_mesh: the mesh on which a process passes the rows of its place; not `mesh` with ``mesh="auto"``.
      share: the parts of a batch that this process passes.
      process_count: the number of all processes.
    """

    def __init__(self, mesh: Mesh, input_mesh: Mesh, share: Share, process_count: int):
        self._mesh, self._input_mesh, self._share, self._process_count = mesh, input_mesh, share, process_count

    def place(self, leaves: Sequence[Leaf], layouts: Sequence[Layout], totals: Sequence[int]) -> list[Leaf]:
        """The parts of the batch, with `totals` rows in all, as global arrays in the order of the data axis, padded."""
        if self._mesh.size == 1:
            local = set(self._mesh.local_devices)
            is_ready = lambda x: type(x) is np.ndarray or (isinstance(x, jax.Array) and x.devices() == local)
            if all(map(is_ready, leaves)):  # jit itself is faster
                return list(leaves)
        if self._process_count == 1:
            whole = [_filled(x, target) for x, target in zip(leaves, layouts, strict=True)]
            shardings = [sharding(self._mesh, target) for target in layouts]
            # A single sharding is quicker than a list of them.
            return jax.device_put(whole, shardings[0] if len(set(shardings)) == 1 else shardings)
        return [self._placed(*each_leaf) for each_leaf in zip(leaves, layouts, totals, strict=True)]

    def _placed(self, x: Leaf, target: Layout, total: int) -> jax.Array:
        """Return a leaf on the mesh: moved, if it is an array of all processes, or joined from each process's rows."""
        x = x.array if type(x) is batch.Part else x
        array, target_sharding = physical(x), sharding(self._mesh, target)
        if spans(array):
            is_there = array.sharding == target_sharding and array.shape == target.physical(x.shape)
            return array if is_there else _mover(target_sharding, target, x.shape)(array)
        if is_keys(x):
            data = self._placed(jax.random.key_data(x), target, total)
            return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))
        if self._input_mesh == self._mesh:
            return self._joined(x, target_sharding, total, [cut for cut in target.cuts if cut.axis != AXIS])
        # With mesh="auto" the batch is passed as for a mesh of all devices along data, and moved in a program of all.
        rows = self._share.padded(total)
        array = self._joined(x, sharding(self._input_mesh, of_batch((rows,), self._input_mesh)), total, ())
        return _mover(target_sharding, target, (total, *x.shape[1:]))(array)

    def _joined(self, x: Leaf, target_sharding: NamedSharding, total: int, others: Sequence[Cut]) -> jax.Array:
        """Join the rows that the processes pass; `others`: the cuts along axes other than the data axis."""
        # Nothing is sent: each process pads its rows to whole parts, and puts slices of it on its own devices.
        rows = self._share.padded(total)
        here, x = self._share.rows(rows), _lengthened(x, others)
        x = _extended(x, [here.stop - here.start - x.shape[0], *[0] * (x.ndim - 1)])
        shape = (rows, *x.shape[1:])
        devices, cut, program = _cutter(target_sharding, shape, self._share)
        # Under `jax.transfer_guard`, an index of an array of JAX may not be moved to its device: a program has it.
        pieces = program(x) if isinstance(x, jax.Array) and len(devices) > 1 else cut(x)
        shards = [jax.device_put(piece, device) for device, piece in zip(devices, pieces, strict=True)]
        return jax.make_array_from_single_device_arrays(shape, target_sharding, shards)


@functools.lru_cache(1024)
def _mover(target_sharding: NamedSharding, target: Layout, shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    """Return a function that brings a leaf of a batch from a different mesh."""

    def moved(x: jax.Array) -> jax.Array:
        return _lengthened(x[tuple(map(slice, shape))], target.cuts)

    return jax.jit(moved, out_shardings=target_sharding)


@functools.lru_cache(1024)
def _cutter(joined_sharding: NamedSharding, shape: tuple[int, ...], share: Share) -> tuple[list[Device], _Cut, _Cut]:
    """Return the devices of this process, a function that cuts the rows that it passes into theirs, and its program.

    JAX tells the slice of the whole batch. With two rows in each of four parts, if this process passes parts 2 and 3,
    the row 6 of the batch is its own row 2.
    """
    slices, here = dict[Device, tuple[slice, ...] | None](), share.rows(shape[0])
    everything = [(0, n) for n in (here.stop - here.start, *shape[1:])]
    for device, index in joined_sharding.addressable_devices_indices_map(shape).items():
        (first, end), *others = (s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        bounds = [(first - here.start, end - here.start), *others]
        slices[device] = None if bounds == everything else tuple(slice(*ends) for ends in bounds)

    def cut(x: Leaf) -> list[Leaf]:
        return [x if part is None else x[part] for part in slices.values()]

    return list(slices), cut, jax.jit(cut)


def _filled(x: Leaf, target: Layout) -> jax.Array | np.ndarray:
    """Pad a batch with copies of its last entries, up to a size that the devices divide."""
    if type(x) is Padded:  # padded already, for this mesh or a different one
        if x.layout is target:
            return x.array
        x = np.asarray(x)
    if type(x) is np.ndarray:  # JAX's own cast, without jax_enable_x64, is a race between devices (jax 0.10)
        x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
    return _lengthened(x, target.cuts)


def _lengthened(x: Leaf, cuts: Sequence[Cut]) -> Leaf:
    """An array with copies of its last entries, for the padding of each cut."""
    return _extended(x, [sum(cut.pad for cut in cuts if cut.dim == d) for d in range(x.ndim)])


def _extended(x: Leaf, pads: Sequence[int]) -> Leaf:
    """An array with `pads` more entries along each dimension: copies of the last ones, or zeros if there are none."""
    if not any(pads):
        return x
    # An array of JAX stays where it is, unless XLA can't join its entries.
    numpy_like = jnp if isinstance(x, jax.Array) and not is_narrow(x.dtype) else np
    return numpy_like.pad(x, [(0, n) for n in pads], "edge" if all(x.shape) else "constant")
