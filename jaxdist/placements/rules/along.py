"""Rules along the batch that need few rows of other devices: sums so far, shifts by a few rows, convolutions, pools.

Before and after, a device has rows ``i * chunk`` to ``(i + 1) * chunk`` of the whole, and only the last device has
padding: copies of the last real row. For two devices::

    x          | a b c d | e f g h |
    cumsum(x)  | a .. abcd | e .. efgh | plus the sum over the devices before: each sends its last row
    x[1:]      | b c d e | f g h h |   each device sends its first row to the one before; the last h is padding
    x[2::2]    | c e | g g |           every second row, then shifted by one
    conv(x)    of | 0 a b c d e | d e f g h 0 |   each device sends its first and last row, for a kernel of 3 rows
    pool(x)    of | a b c d e | e f g h |   each device sends its first row to the one before, for windows of 3 by 2

So `jax.lax.associative_scan`, which JAX takes apart into every second row, and these into every second, and so on,
sends a few rows for each time that a device's rows can be halved.

The scan in blocks: Blelloch, *Prefix Sums and Their Applications*, CMU-CS-90-190, section 1.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.communicators import exchange
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, Sends, Strategy, itemsize
from jaxdist.placements.model.values import REPLICATED, Aval, Form, Partial, Placement, Split, form, is_wide, wide
from jaxdist.placements.rules.context import RuleContext, special
from jaxdist.placements.rules.run import identity, repeat_last

# By operation: the reduction whose identity padding gets, and how two results are joined.
_SCANS: dict[str, tuple[str, Callable[[jax.Array, jax.Array], jax.Array]]] = {
    "cumsum": ("sum", lax.add), "cumprod": ("product", lax.mul), "cummax": ("max", lax.max),
    "cummin": ("min", lax.min), "cumlogsumexp": ("max", jnp.logaddexp),
}  # fmt: skip


@special(*_SCANS)
def _cumulative(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Accumulate a device's rows, and join the totals of the devices before (if reversed: behind)."""
    split, aval = ins[0], ctx.block.avals[node.ins[0]]
    d, is_reversed = node.eqn.params["axis"], node.eqn.params["reverse"]
    if not _is_batch(split, aval) or split.dim != d or not is_wide(aval.dtype):
        return None
    kind, join = _SCANS[node.name]

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        is_padded = split.is_padded(device.n)
        x = device.masked(xs[0], split, identity(kind, aval.dtype)) if is_padded else xs[0]
        (here,) = device.bind(node, [x])
        # One message: passing sums on from one device to the next takes n - 1, one after the other. So each device gets
        # all totals, and accumulates them itself.
        last = 0 if is_reversed else split.rows - 1
        totals = device.gather(lax.slice_in_dim(here, last, last + 1, axis=d), d, device.n)
        (up_to,) = device.bind(node, [totals])
        neighbor = jnp.clip(device.index + (1 if is_reversed else -1), 0, device.n - 1)
        joined = join(lax.dynamic_slice_in_dim(up_to, neighbor, 1, d), here)
        out = jnp.where(device.index == (device.n - 1 if is_reversed else 0), here, joined)
        # Padding is a copy of the last real row, whose result, from behind, is itself.
        return [jnp.where(device.real(split, out.ndim), out, xs[0]) if is_reversed and is_padded else out]

    return Strategy(
        [form(split)], [_result(split, split.size)], run, sends=[_rows_sent(ctx.n, aval, d, 1, "all-gather")]
    )


@special("slice")
def _slice_rows(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Take most rows of a batch, or every k-th of them, in slices; or a few, on every device."""
    split, params = ins[0], node.eqn.params
    if not _is_batch(split, aval := ctx.block.avals[node.ins[0]]):
        return None
    d, count = split.dim, ctx.block.avals[node.outs[0]].shape[split.dim]
    starts, strides = params["start_indices"], params["strides"] or (1,) * aval.ndim
    start, stride = starts[d], strides[d]

    def part(x: jax.Array, first: int, step: int) -> jax.Array:
        """The slice in all other dimensions, and of a device's rows every `step`-th."""
        limits = [n if k == d else params["limit_indices"][k] for k, n in enumerate(x.shape)]
        along = lambda values, value: [value if k == d else other for k, other in enumerate(values)]
        return lax.slice(x, along(starts, first), limits, along(strides, step))

    if split.chunk % stride == 0 and count != split.size:
        # Row k of the result is ``first + stride * (shift + k)``: each device takes every row at `first`, which sends
        # nothing; then all rows move by `shift`. For x[5::2]: every second row from 1 on, moved by 2.
        result, (shift, first) = _result(split, count, split.chunk // stride), divmod(start, stride)
        if _has_all_devices(ctx, result, shift):
            move = lambda device, x: repeat_last(device, _shifted(device, part(x, first, stride), d, shift), result)
            run = lambda device, node, xs: [move(device, xs[0])]
            return Strategy([form(split)], [result], run, sends=_neighbors(ctx, node, d, shift))
    # So few rows are on hardly any device: added up among zeros, they alone are sent, and not the whole batch.
    if 0 < count <= split.chunk // 2 and is_wide(aval.dtype):
        pick = lambda device, node, xs: [_among_zeros(device, part(xs[0], 0, 1), split, start, count, stride)]
        return Strategy([form(split)], [Partial(bits=True)], pick)
    return None


@special("pad")
def _with_filled_ends(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Fill a few rows at the ends of a batch and between its rows, or drop some: the derivative of a slice."""
    split, config = ins[0], node.eqn.params["padding_config"]
    if not _is_batch(split, ctx.block.avals[node.ins[0]]):
        return None
    d = split.dim
    before, after, between = map(int, config[d])
    if before == after == between == 0:
        return None
    # Between the rows, a device has all that is needed; then they move.
    stride, first, end = between + 1, before % (between + 1), before + (split.size - 1) * (between + 1)
    longer = _result(split, end + 1 + after, split.chunk * stride)
    if not _has_all_devices(ctx, longer, abs(before - first)):
        return None

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        x, filler = xs
        x = lax.pad(x, filler, [(first, between - first, between) if k == d else c for k, c in enumerate(config)])
        row = _along(device.index * longer.chunk + jnp.arange(longer.chunk), d, x.ndim)
        x = jnp.where((row >= before) & (row <= end), _shifted(device, x, d, first - before), filler)
        return [repeat_last(device, x, longer)]

    return Strategy([form(split), REPLICATED], [longer], run, sends=_neighbors(ctx, node, d, abs(before - first)))


@special("concatenate")
def _with_rows_around(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Put a few rows that every device has before or behind a batch."""
    at = [k for k, p in enumerate(ins) if isinstance(p, Split) and not p.whole]
    shapes, d = ctx.block.shapes(node.ins), node.eqn.params["dimension"]
    if len(at) != 1 or not _is_batch(split := ins[k := at[0]], ctx.block.avals[node.ins[k]]) or d != split.dim:
        return None
    before, after = (sum(shape[d] for shape in around) for around in (shapes[:k], shapes[k + 1 :]))
    # | a b c d | e f g g | with t in front is | t a b c | d e f g |: there is room where padding was. Without padding
    # the slices would be longer, and most rows move.
    longer, last_start = _result(split, split.size + before + after), (ctx.n - 1) * split.chunk
    # One device puts the rows behind in place, the last: they must not begin before its own rows do.
    if not _has_all_devices(ctx, longer, before) or split.size + before < last_start:
        return None

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        def put(rows: list[jax.Array], x: jax.Array, position: int, start: int) -> jax.Array:
            changed = lax.dynamic_update_slice_in_dim(x, lax.concatenate(rows, d), start, d)
            return jnp.where(device.index == position, changed, x)

        x = _shifted(device, xs[k], d, -before)
        x = put(xs[:k], x, 0, 0) if before else x
        x = put(xs[k + 1 :], x, device.n - 1, split.size + before - last_start) if after else x
        return [repeat_last(device, x, longer)]

    in_forms: list[Form] = [form(split) if j == k else REPLICATED for j in range(len(ins))]
    return Strategy(in_forms, [longer], run, sends=_neighbors(ctx, node, d, before))


@special("split")
def _ends_apart(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Take a batch apart into its bulk and a few rows before or behind: the derivative of putting them there."""
    split, sizes, aval = ins[0], list(map(int, node.eqn.params["sizes"])), ctx.block.avals[node.ins[0]]
    if not _is_batch(split, aval) or node.eqn.params["axis"] != split.dim or not is_wide(aval.dtype):
        return None
    # | t a b c | d e f g | is taken apart into t, on all devices, and | a b c d | e f g g |.
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    # The bulk reaches all devices, so the others have less than a device's rows in all: they become whole values.
    bulk = max(range(len(sizes)), key=lambda k: sizes[k])
    left = _result(split, sizes[bulk])
    if not _has_all_devices(ctx, left, starts[bulk]):
        return None
    # Often only the few rows are used, such as a token before a sequence. Then nothing moves.
    shift = starts[bulk] if ctx.block.uses[node.outs[bulk]] else 0

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        pairs = zip(starts, sizes, strict=True)
        parts = [_among_zeros(device, xs[0], split, start, count) for start, count in pairs]
        parts[bulk] = repeat_last(device, _shifted(device, xs[0], split.dim, shift), left)
        return parts

    out_placements: list[Placement] = [Partial(bits=True)] * len(sizes)
    out_placements[bulk] = left
    return Strategy([form(split)], out_placements, run, sends=_neighbors(ctx, node, split.dim, shift))


@special("conv_general_dilated")
def _with_halos(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Convolve along the rows: a device gets the few around its own (a halo), and zeros beyond the ends.

    The kernel is whole, or it is split as the rows are: then the result is the gradient of a kernel, a sum over rows.
    """
    (split, kernel), params, numbers = ins, node.eqn.params, node.eqn.params["dimension_numbers"]
    aval, out = ctx.block.avals[node.ins[0]], ctx.block.avals[node.outs[0]]
    if not _is_batch(split, aval) or split.dim not in numbers.lhs_spec[2:]:
        return None
    k = numbers.lhs_spec[2:].index(split.dim)
    is_plain = all(params[name][k] == 1 for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
    halo, after = params["padding"][k]
    if not is_plain or halo != after or halo < 0 or not _has_all_devices(ctx, split, halo):
        return None
    along_kernel, kernel_form = numbers.rhs_spec[2 + k], form(kernel)
    if not isinstance(kernel, Split) or kernel.of_state:
        result: Placement = _result(split, split.size).along(numbers.out_spec[2 + k])
        if out.shape[numbers.out_spec[2 + k]] != split.size:
            return None
        kernel_form = REPLICATED
    elif kernel_form == form(split.along(along_kernel)) and is_wide(out.dtype) and wide(out.dtype) == out.dtype:
        if split.is_padded(ctx.n):
            return None  # zeros instead of the padding would meet real rows, which may be infinite
        result = Partial(gradient=node.backward)
    else:
        return None
    padding = [(0, 0) if j == k else sides for j, sides in enumerate(params["padding"])]

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        if split.is_padded(device.n):
            xs[0] = device.masked(xs[0], split, 0)
        around = _with_halo(device, xs[0], split.dim, halo)
        (y,) = device.bind(node, [around, xs[1]], {**params, "padding": tuple(padding)})
        return [repeat_last(device, y, result) if isinstance(result, Split) else y]

    sends = [_rows_sent(ctx.n, aval, split.dim, halo, "permute")] * 2 if halo else []
    return Strategy([form(split), kernel_form], [result], run, sends=sends)


@special("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _over_windows(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Reduce windows along the rows (pooling): a device gets the rows that its last windows take of the next one's."""
    split, params, aval = ins[0], node.eqn.params, ctx.block.avals[node.ins[0]]
    if len(node.outs) != 1 or not _is_batch(split, aval):
        return None
    d = split.dim
    size, stride, dilation = (params[f"window_{name}"][d] for name in ("dimensions", "strides", "dilation"))
    length = (size - 1) * dilation + 1  # of a window, in rows
    if stride == length == 1 or params["base_dilation"][d] > 1 or tuple(params["padding"][d]) != (0, 0):
        return None  # by factors, or whole
    if split.chunk % stride:
        return None  # a window that is a device's by its number would start on a different device
    count, halo = ctx.block.avals[node.outs[0]].shape[d], max(length - stride, 0)
    result = _result(split, count, split.chunk // stride)
    if halo >= split.chunk or not _has_all_devices(ctx, result, 0):
        return None

    def run(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        x = xs[0]
        if halo:
            x = lax.concatenate([x, _from_neighbor(device, lax.slice_in_dim(x, 0, halo, axis=d), -1)], d)
        # Real windows take real rows only. Those that reach into padding, or beyond, become padding of the result.
        return [repeat_last(device, y, result) for y in device.bind(node, [x, *xs[1:]])]

    in_forms: list[Form] = [form(split), *[REPLICATED] * (len(ins) - 1)]
    sends = [_rows_sent(ctx.n, aval, d, halo, "permute")] if halo else []
    return Strategy(in_forms, [result], run, sends=sends)


# --- shared helpers


def _is_batch(placement: Placement, aval: Aval) -> TypeGuard[Split]:
    """Check whether a value, of numbers, is split into one run of rows on each device."""
    of_numbers = bool(aval.size) and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return of_numbers and isinstance(placement, Split) and not placement.of_state and placement.outer == 1


def _result(split: Split, size: int, chunk: int | None = None) -> Split:
    return replace(split.alone(), size=size, chunk=chunk or split.chunk)


def _has_all_devices(ctx: RuleContext, split: Split, shift: int) -> bool:
    """Check whether rows move to the next device at most, and each device has some of the result."""
    return shift < split.chunk and (ctx.n - 1) * split.chunk < split.size <= ctx.n * split.chunk


def _rows_sent(devices: int, aval: Aval, d: int, count: int, kind: str) -> Sends:
    """Return the message in which each device sends some rows of a value along a dimension."""
    row = math.prod(n for k, n in enumerate(aval.shape) if k != d) * itemsize(aval.dtype)
    return Sends(kind, devices * count * row)


def _neighbors(ctx: RuleContext, node: Node, d: int, count: int) -> list[Sends]:
    """Return what `_shifted` sends."""
    return [_rows_sent(ctx.n, ctx.block.avals[node.outs[0]], d, count, "permute")] if count else []


def _shifted(device: DeviceContext, x: jax.Array, d: int, count: int) -> jax.Array:
    """Move rows to the front by `count`: the next device's come in; if negative, to the back."""
    rows = x.shape[d]
    if count > 0:
        came = _from_neighbor(device, lax.slice_in_dim(x, 0, count, axis=d), -1)
        return lax.concatenate([lax.slice_in_dim(x, count, rows, axis=d), came], d)
    if count < 0:
        came = _from_neighbor(device, lax.slice_in_dim(x, rows + count, rows, axis=d), 1)
        return lax.concatenate([came, lax.slice_in_dim(x, 0, rows + count, axis=d)], d)
    return x


def _with_halo(device: DeviceContext, x: jax.Array, d: int, count: int) -> jax.Array:
    """Put rows of both neighbors around a device's own; zeros where it has no neighbor."""
    if not count:
        return x
    rows = x.shape[d]
    before = _from_neighbor(device, lax.slice_in_dim(x, rows - count, rows, axis=d), 1)
    return lax.concatenate([before, x, _from_neighbor(device, lax.slice_in_dim(x, 0, count, axis=d), -1)], d)


def _from_neighbor(device: DeviceContext, x: jax.Array, step: int) -> jax.Array:
    """Send rows to the next device, or the previous one; return those that come in."""
    sent, back = exchange.bits(x)
    # A device at the end gets zeros, as `lax.ppermute` leaves where nobody sends.
    ends = [(i, i + step) for i in range(device.n) if 0 <= i + step < device.n]
    return back(lax.ppermute(sent, device.axis, ends))


def _among_zeros(
    device: DeviceContext, x: jax.Array, split: Split, start: int, count: int, stride: int = 1
) -> jax.Array:
    """Return rows of the whole where this device has them, and zeros elsewhere."""
    row = start + stride * jnp.arange(count) - device.index * split.chunk
    is_here = _along((row >= 0) & (row < split.chunk), split.dim, x.ndim)
    rows = jnp.take(x, jnp.clip(row, 0, split.chunk - 1), axis=split.dim)
    return jnp.where(is_here, rows, jnp.zeros((), x.dtype))


def _along(x: jax.Array, d: int, rank: int) -> jax.Array:
    """Let a vector broadcast along one of several dimensions."""
    return x.reshape([-1 if k == d else 1 for k in range(rank)])
