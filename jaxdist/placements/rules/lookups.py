"""Lookups and changes of rows in an array split along them: each device handles its own rows, as of a vocabulary.

Reference: Shoeybi et al., *Megatron-LM*, arXiv 1909.08053, section 3 (the embedding in slices of the vocabulary).
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.placements.model.block import Node
from jaxdist.placements.model.factors import FACTORS
from jaxdist.placements.model.strategy import DeviceContext, Strategy, nbytes
from jaxdist.placements.model.values import REPLICATED, Deferred, Form, Partial, Placement, Split, form, is_wide
from jaxdist.placements.rules.context import RuleContext, special
from jaxdist.placements.rules.run import run_as_is

_MODES = {
    lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS
}  # fmt: skip
_SCATTERS = tuple(name for name in FACTORS if name.startswith("scatter"))


@special("gather")
def _look_up(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Look up the rows that a device has, with zeros for the rows of other devices."""
    rows, params = ins[0], node.eqn.params
    numbers, out = params["dimension_numbers"], ctx.block.avals[node.outs[0]]
    column = _column(ctx.n, rows, ins[1:], numbers.start_index_map, numbers.collapsed_slice_dims)
    if column is None or not is_wide(out.dtype) or params["mode"] not in _MODES:
        return None
    assert isinstance(rows, Split)
    if 2 * nbytes(out) >= nbytes(ctx.block.avals[node.ins[0]]):  # to gather it is less
        # Shards are gathered for their use anyway, so this is nothing to warn of.
        return Strategy([REPLICATED] * 2, [REPLICATED], run_as_is) if rows.of_state else None
    shape = ctx.block.shapes(node.ins)[0]
    last = [shape[d] - params["slice_sizes"][d] for d in numbers.start_index_map]
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP  # else XLA takes the nearest

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        # A table of 6 rows over 2 devices, at [1, 4]: device 0 has [row 1, 0], device 1 [0, row 4], and these are
        # summands.
        indices = _signed(xs[1], None if fills else last)
        local, present, exists = _localize(device, indices, column, rows, shape[rows.dim])
        if fills:  # no such row: the fill value counts once
            present |= ~exists & (device.index == 0)
        else:
            local_last = [rows.chunk - 1 if k == column else n for k, n in enumerate(last)]
            local = jnp.clip(local, 0, jnp.asarray(local_last, local.dtype))
        # Clipped indices are neither unique nor sorted any more.
        promises = {"unique_indices": False, "indices_are_sorted": False}
        values = device.bind(node, [xs[0], local], {**params, **promises})[0]
        dims = [d for d in range(out.ndim) if d not in numbers.offset_dims]
        return [jnp.where(lax.broadcast_in_dim(present, out.shape, dims), values, jnp.zeros_like(values))]

    return Strategy([form(rows), REPLICATED], [Partial(bits=True)], run)


@special(*_SCATTERS)
def _change(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Change the rows that each device has; a deferred array is made in any slices requested."""
    rows, *others = ins
    looks_up = bool(node.eqn.params["dimension_numbers"].scatter_dims_to_operand_dims)
    if isinstance(rows, Deferred) and looks_up and not any(isinstance(p, (Partial, Split)) for p in others):
        return Strategy([None] * len(ins), [Deferred()], make=_make_changed)
    if (column := _column_of_rows(node, ctx.n, rows, others)) is None:
        return None
    assert isinstance(rows, Split)
    run = lambda device, node, xs: [_changed(device, node, xs, rows, column)]
    return Strategy([form(rows), REPLICATED, REPLICATED], [replace(form(rows), of_state=rows.of_state)], run)


def _make_changed(device: DeviceContext, node: Node, target: Form) -> jax.Array:
    """Make the slices of a deferred array, changed."""
    if (column := _column_of_rows(node, device.n, target, ())) is None:
        whole = device.bind(node, [device.take(i, REPLICATED) for i in node.ins])[0]
        return device.cut(whole, target) if isinstance(target, Split) else whole
    assert isinstance(target, Split)
    xs = [device.take(node.ins[0], target), *(device.take(i, REPLICATED) for i in node.ins[1:])]
    return _changed(device, node, xs, target, column)


def _changed(device: DeviceContext, node: Node, xs: Sequence[jax.Array], rows: Split, column: int) -> jax.Array:
    """Change a device's slice by the updates for its rows, and drop the rest."""
    params, (shape, _, updates) = node.eqn.params, device.block.shapes(node.ins)
    last = _last_indices(params["dimension_numbers"], shape, updates)
    indices = _signed(xs[1], last if params["mode"] == lax.GatherScatterMode.CLIP else None)
    local, present, _ = _localize(device, indices, column, rows, shape[rows.dim])
    # Other devices' rows are beyond the end, in every mode, so that they are dropped.
    local = jnp.where(_is(local, column) & ~present[..., None], rows.rows, local)
    new = {**params, "mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False}
    # One update becomes a read and a write of one slice. XLA merges the read with the slice that the device has cut
    # out, and then takes an entry beyond its end (openxla/xla#49121; in jaxlib 0.10).
    operand = lax.optimization_barrier(xs[0]) if math.prod(local.shape[:-1]) == 1 else xs[0]
    return device.bind(node, [operand, local, xs[2]], new)[0]


def _last_indices(numbers: lax.ScatterDimensionNumbers, shape: Sequence[int], updates: Sequence[int]) -> list[int]:
    """Return the last index that an update fits at, for each column of the indices of a scatter."""
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = (d for d in range(len(shape)) if d not in single)
    sizes = dict(zip(window, (updates[d] for d in numbers.update_window_dims), strict=True))
    return [shape[d] - sizes.get(d, 1) for d in numbers.scatter_dims_to_operand_dims]


def _column_of_rows(node: Node, devices: int, rows: Placement, others: Sequence[Placement]) -> int | None:
    """Return the column of a scatter's indices that selects split rows, see `_column`."""
    numbers = node.eqn.params["dimension_numbers"]
    return _column(devices, rows, others, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims)


def _column(
    devices: int, rows: Placement, others: Sequence[Placement], mapped: Sequence[int], single: Sequence[int]
) -> int | None:
    """Return the column of indices that selects split rows, if every device has all else."""
    # Padding of the batch copies the last row, and a change of that row would miss it; of state it may be anything.
    if not isinstance(rows, Split) or rows.outer > 1 or rows.whole or (rows.is_padded(devices) and not rows.of_state):
        return None
    if rows.dim not in mapped or rows.dim not in single or any(isinstance(p, Split) for p in others):
        return None
    return list(mapped).index(rows.dim)


def _signed(indices: jax.Array, last: Sequence[int] | None) -> jax.Array:
    """Make indices signed; with `last`, clip them to the nearest valid index."""
    dtype = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    if indices.dtype in (jnp.uint32, jnp.uint64):
        # Beyond the signed range it would turn negative, and be clipped to the first row, not to the last.
        indices = jnp.minimum(indices, jnp.iinfo(dtype).max)
    indices = indices.astype(dtype)
    return indices if last is None else jnp.clip(indices, 0, jnp.asarray(last, dtype))


def _localize(device: DeviceContext, indices: jax.Array, column: int, rows: Split, size: int) -> tuple[jax.Array, ...]:
    """Return indices relative to this device's rows, and masks: present on this device, valid anywhere."""
    row, start = indices[..., column], (device.index * rows.chunk).astype(indices.dtype)
    exists = (row >= 0) & (row < size)
    present = exists & (row >= start) & (row < start + rows.chunk)
    return jnp.where(_is(indices, column), indices - start, indices), present, exists


def _is(indices: jax.Array, column: int) -> jax.Array:
    """Return a mask of the entries of one column."""
    return lax.broadcasted_iota(jnp.int32, indices.shape, indices.ndim - 1) == column


# --- indices that are an example's own position, ``logits[jnp.arange(B), labels]``: local rows


@special("gather", *_SCATTERS)
def _own_rows(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Take positions out of the indices: then the rows are a dimension of both that is only mapped over."""
    if not any(isinstance(p, Split) for p in ins):
        return None
    operand, (whole, indices, *_) = ins[0], ctx.block.shapes(node.ins)
    _, single, mapped, _, along = node.eqn.params["dimension_numbers"]
    candidates = [
        (column, row)
        for column, d in enumerate(mapped)
        if d in single and (not isinstance(operand, Split) or operand.dim == d)
        and (row := _position(ctx, node.ins[1], column)) is not None and row not in along and indices[row] == whole[d]
    ]  # fmt: skip
    if not candidates:
        return None
    (column, row), *_ = candidates
    mapping = _mapping(node, column, row)
    if (strategy := ctx.by_factors(mapping, ins, ctx.block.factors(mapping))) is None:
        return None

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        assert strategy.run is not None
        return strategy.run(device, mapping, [xs[0], jnp.delete(xs[1], column, -1), *xs[2:]])

    return replace(strategy, run=run)


def _mapping(node: Node, column: int, row: int) -> Node:
    """Return an operation that maps over `row` of its indices instead of looking up in a `column` of them."""
    params = node.eqn.params
    numbers = params["dimension_numbers"]  # of a gather or a scatter: the same five
    window, single, mapped, dims, rows = numbers
    # For ``logits[jnp.arange(B), labels]``, looking up ``(b, labels[b])`` in [B, V] becomes, mapped over b, looking up
    # ``(labels[b],)`` in [V]. JAX wants the dimensions that are mapped over in ascending order.
    pairs = sorted([*zip(dims, rows, strict=True), (mapped[column], row)])
    single, left = ([d for d in of if d != mapped[column]] for of in (single, mapped))
    new = type(numbers)(window, *map(tuple, (single, left, *zip(*pairs, strict=True))))
    eqn = node.eqn.replace(params={**params, "dimension_numbers": new, "indices_are_sorted": False})
    return Node(eqn, node.ins, node.outs, node.backward, node.calls)


def _position(ctx: RuleContext, i: int, column: int) -> int | None:
    """Return the dimension along which a column of the indices counts positions, if any."""
    node, last = ctx.block.makers.get(i), ctx.block.avals[i].ndim - 1
    if node is not None and node.name == "concatenate" and node.eqn.params["dimension"] == last:
        start = 0
        for operand in node.ins:
            width = ctx.block.avals[operand].shape[last]
            if start <= column < start + width:
                return _dim_counted(ctx, operand) if width == 1 else None
            start += width
    return _dim_counted(ctx, i) if ctx.block.avals[i].shape[last] == 1 else None


def _dim_counted(ctx: RuleContext, i: int) -> int | None:
    """Return the dimension along which each entry of a value equals its own index, if any."""
    node, (new, dtype) = ctx.block.makers.get(i), (ctx.block.avals[i].shape, ctx.block.avals[i].dtype)
    if node is None or not jnp.issubdtype(dtype, jnp.integer) or jnp.iinfo(dtype).max < max(new, default=0):
        return None  # a small integer starts again from 0
    params = node.eqn.params
    if node.name == "iota":
        return params["dimension"]
    if node.name == "convert_element_type":
        return _dim_counted(ctx, node.ins[0])
    if node.name == "select_n" and len(node.ins) == 3:  # from the end if negative: never
        below = ctx.block.makers.get(node.ins[0])
        if below is None or below.name != "lt" or below.ins[0] != node.ins[1]:
            return None
        # Of the block, not of a placement: that of a value that is no operand is not in the key of the strategies.
        return _dim_counted(ctx, node.ins[1]) if ctx.block.is_zero(below.ins[1]) else None
    if node.name in ("broadcast_in_dim", "reshape") and len(node.ins) == 1:
        d, old = _dim_counted(ctx, node.ins[0]), ctx.block.avals[node.ins[0]].shape
        if d is None:
            return None
        if node.name == "broadcast_in_dim":
            target = int(params["broadcast_dimensions"][d])
            return target if new[target] == old[d] else None
        longer = [k for k, n in enumerate(new) if n != 1]
        return longer[0] if len(longer) == 1 and new[longer[0]] == old[d] else None
    return None
