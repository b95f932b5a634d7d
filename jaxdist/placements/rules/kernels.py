"""Rules for products of groups of rows and for calls of the user's, and `register` for kernels without a rule."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jaxdist import compat
from jaxdist.ir.interpreter import bodies
from jaxdist.placements.model import values
from jaxdist.placements.model.block import Block, Node
from jaxdist.placements.model.factors import FACTORS, Factors, Params, Shapes, einsum
from jaxdist.placements.model.named_kernels import TWINS, twin_of
from jaxdist.placements.model.strategy import DeviceContext, Run, Strategy, sliced
from jaxdist.placements.model.values import REPLICATED, Deferred, Partial, Placement, Split, form, local_shape, tile
from jaxdist.placements.rules.context import SPECIAL, RuleContext, refuse, special
from jaxdist.placements.rules.run import Cut, repeat_last

# --- groups of rows


@special("ragged_dot_general")
def _ragged(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Multiply a device's rows, of all groups; or all rows of a device's groups."""
    if (described := ctx.block.factors(node)) is None:
        return None
    strategy = ctx.by_factors(node, ins, described)
    if strategy is None or not isinstance(cut := strategy.run, Cut):
        return strategy
    numbers, sizes_rank = node.eqn.params["ragged_dot_dimension_numbers"], ctx.block.avals[node.ins[2]].ndim
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    (ca, cb), _ = numbers.dot_dimension_numbers
    rows, run = described.operands[0][ragged], strategy.run
    group = described.operands[1][groups[0]] if groups else described.results[0][0]
    if cut.factor in (rows, group) and cut.split.outer > 1:
        return ctx.whole(node, ins)  # rows that were merged with others are not one run of all
    if cut.factor == rows:
        run = functools.partial(_rows_of_groups, cut)
    elif cut.factor == group:
        if sizes_rank > 1 or (ctx.n - 1) * cut.split.chunk >= cut.split.size:
            return ctx.whole(node, ins)
        both = [(0, ragged)] if groups else [(0, ragged), (1, cb[ca.index(ragged)])]
        run = functools.partial(_groups_of_device, cut, both)
    return replace(strategy, run=run)


def _rows_of_groups(cut: Cut, device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
    """Count how many of the rows of a device are in each group."""
    lhs, rhs, sizes = xs
    split, ends = cut.split, jnp.cumsum(sizes, axis=-1)
    starts = ends - sizes
    # Groups of 3 and 5 rows over two devices of 4: [3, 1] on the first, [0, 4] on the second.
    first = device.index * split.chunk
    # Rows of padding are copies of the last one, and belong to its group.
    here = lambda at: jnp.clip(jnp.where(at >= split.size, split.chunk, at - first), 0, split.chunk).astype(sizes.dtype)
    return cut(device, node, [lhs, rhs, here(ends) - here(starts)])


def _groups_of_device(
    cut: Cut, ragged: Sequence[tuple[int, int]], device: DeviceContext, node: Node, xs: list[jax.Array]
) -> Sequence[jax.Array]:
    """Move the rows of a device's groups to the front; those behind them count for no group.

    If rows are to be divided over an inner axis, they stay, and those before the device's are a group of their own.
    """
    lhs, rhs, sizes = xs
    split, group = cut.split, device.index * cut.split.chunk + jnp.arange(cut.split.chunk)
    own = jnp.where(group < split.size, jnp.take(sizes, group, mode="clip"), 0)
    before = jnp.sum(jnp.where(jnp.arange(split.size) < group[0], sizes, 0)).astype(sizes.dtype)
    # Rolled by a number of rows that depends on data, rows would cross the slices that a later axis makes of them.
    stay = any(axis.size > 1 for axis in device.placed.axis.inner)
    sizes_here = jnp.concatenate([before[None], own]) if stay else own
    groups = node.eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    if stay and groups:
        if split.is_padded(device.n):  # the group in front has no padding
            rhs = device.masked(rhs, split.along(groups[0]), 0)
            cut = replace(cut, split=replace(split, size=split.chunk * device.n))
        none = jnp.zeros_like(lax.slice_in_dim(rhs, 0, 1, axis=groups[0]))
        rhs = jnp.concatenate([none, rhs], groups[0])
    operands = [lhs, rhs]
    for k, dim in () if stay else ragged:
        operands[k] = jnp.roll(operands[k], -before, dim)
    (out,) = cut(device, node, [*operands, sizes_here])
    if not groups:
        return [repeat_last(device, out[1:] if stay else out, split.along(0))]
    dim = cut.described.results[0].index(cut.described.operands[0][ragged[0][1]])
    return [out if stay else jnp.roll(out, before, dim)]


# --- calls of the user's


@special("ffi_call")
def by_batches(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Divide what `jax.vmap` added: ``vmap_method`` says that the call treats it as a batch."""
    count, shapes = compat.batches(node.eqn), ctx.block.shapes((*node.ins, *node.outs))
    if not count or node.eqn.effects or node.eqn.params["vmap_method"] not in ("expand_dims", "broadcast_all"):
        return None
    sizes = shapes[-1][:count]  # operands that are the same for all have 1 there, or the size
    dims = [tuple(d if d < count and n == sizes[d] else None for d, n in enumerate(shape)) for shape in shapes]
    described = Factors(tuple(dims[: len(node.ins)]), tuple(dims[len(node.ins) :]), params=_with_results)
    return ctx.by_factors(node, ins, described)


def _with_results(params: Params, factor: int, split: Split) -> Params:
    return _on_slices(params, [split.along(factor)] * len(params["result_avals"]))


# --- kernels that are described

_Describe = str | Callable[[Params, Shapes, Shapes], str | None]


def register(
    primitive: Primitive | str, rule: _Describe | None = None, *, like: Callable[..., Any] | None = None, on: Any = None
) -> None:
    """Describe how a primitive treats the dimensions of its operands, so that it runs on slices of the batch.

    By default, every device computes an unknown operation as a whole, and a message says so. Describe kernels that
    treat each example separately, or that are contractions.

    Args:
      primitive: the primitive, or its name; of an FFI call, the name of its target.
      rule: a description like `numpy.einsum`'s, ``"operands->results"``. Use ``.`` for a dimension that must not be
        split. A letter that occurs in no result is summed over. Or a function ``rule(params, shapes of the operands,
        shapes of the results)`` that returns such a description, or None to compute the whole operation.
      like: instead, a JAX function of the same operands (and, as keywords, parameters) that returns the same results.
        Devices run the kernel on the parts that they can do alone; its FLOPs are counted by this function, too.
      on: operands, arrays of any shapes, on which the kernel is run at once and compared with `like`.

    Raises:
      ValueError: the description is invalid, or the kernel's results on `on` differ from `like`'s.

    Example:
      >>> from jaxdist.placements import register
      >>> from jax.extend.core import Primitive
      >>> attention_p = Primitive("my_attention")  # queries, keys, values: (batch, time, heads, width)
      >>> register(attention_p, "b..., b..., b... -> b...")
      >>> norm_p = Primitive("my_norm")
      >>> register(norm_p, like=lambda x: x / jax.numpy.linalg.norm(x, axis=-1, keepdims=True))
    """
    name = primitive if isinstance(primitive, str) else primitive.name
    if like is not None:
        if rule is not None:
            raise ValueError("register takes a rule or like=, not both")
        if on is not None:
            if isinstance(primitive, str):
                raise ValueError(f"on= needs the primitive itself, not its name {primitive!r}")
            _compare(primitive, like, on)
        # The label is what an FFI call goes by: its target may be named like an operation of JAX's.
        of_jax = isinstance(primitive, str) and name not in TWINS and name in {*SPECIAL, *FACTORS}
        for label in [f"ffi_call {name}", *([] if of_jax else [name])]:
            TWINS[label], SPECIAL[label] = like, [_as_twin]
    elif isinstance(rule, str):
        FACTORS[name] = einsum(rule)
    elif callable(rule):
        FACTORS[name] = lambda *facts: None if (text := rule(*facts)) is None else einsum(text)(*facts)
    else:
        raise ValueError(f"rule={rule!r}: a description such as 'b..., .d -> b.', or a function")


def _compare(primitive: Primitive, like: Callable[..., Any], on: Sequence[Any]) -> None:
    """Raise an error if a kernel's results on some operands are not its twin's."""
    results, expected = (list(map(jnp.asarray, jax.tree.leaves(f(*on)))) for f in (primitive.bind, like))
    types = [[(x.shape, x.dtype) for x in each] for each in (results, expected)]
    for x, y in zip(results, expected, strict=False):
        error = 1e3 * float(jnp.finfo(y.dtype).eps) if jnp.issubdtype(y.dtype, jnp.inexact) else 0
        if types[0] != types[1] or not np.allclose(x, y, rtol=error, atol=error, equal_nan=True):
            raise ValueError(f"{primitive.name} returns {x}, and its twin {y}, of types {types[0]} and {types[1]}")


def _as_twin(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Run a kernel on the slices on which its twin needs no messages."""
    if (twin := twin_of(node)) is None:
        return None
    block = ctx.infer.block(twin, node.backward)
    place = lambda ins: [ctx.infer.place(block, ins)]
    # What is whole here, too, is cut for the kernel: so its twin must not take it whole without a message.
    alone = [p.alone() if isinstance(p, Split) else values.whole_if_deferred(p) for p in ins]
    in_placements, (placed,) = sliced(alone, place(alone), place)
    types = [
        [(a.shape, a.dtype) for a in map(of.avals.__getitem__, outs)]
        for of, outs in ((ctx.block, node.outs), (block, block.outputs))
    ]
    if types[0] != types[1]:
        raise refuse(node, f"it returns {types[0]}, and its twin {types[1]}")
    is_padded = any(isinstance(p, Split) and p.is_padded(ctx.n) for p in in_placements)
    are_sums = any(isinstance(p, Partial) for p in placed.out_placements)
    # The kernel runs as it is, so nothing can mask the padding in its sums.
    if placed.communicates or (are_sums and is_padded) or any(isinstance(p, Partial) for p in in_placements):
        return None
    shapes = [local_shape(shape, p) for shape, p in zip(ctx.block.shapes(node.ins), in_placements, strict=True)]
    if (on_slices := twin_of(node, tuple(shapes))) is None or not _are_alike(block, ctx.infer.block(on_slices)):
        return None
    part = ctx.infer.block(on_slices)
    shapes_of_results = zip(ctx.block.shapes(node.outs), part.shapes(part.outputs), strict=True)
    results = [_result(p, *shapes, ctx.n) for p, shapes in zip(placed.out_placements, shapes_of_results, strict=True)]
    out_placements = [p for p in results if p is not None]
    if len(out_placements) < len(results):
        return None
    run: Run = lambda device, node, xs: device.bind(node, xs, _on_slices(node.eqn.params, out_placements))
    return Strategy([form(p) for p in in_placements], out_placements, run)


def _result(p: Placement, whole: tuple[int, ...], part: tuple[int, ...], devices: int) -> Placement | None:
    """Return the placement of a result that has this shape on a device; a twin makes a deferred one in any form."""
    if not isinstance(p, Deferred):
        return p if local_shape(whole, p) == part else None
    cuts = [tile(d, n, devices) for d, (n, here) in enumerate(zip(whole, part, strict=True)) if n != here]
    if not cuts:
        return REPLICATED
    return cuts[0] if cuts[0].shape(whole) == part else None


def _are_alike(whole: Block, part: Block) -> bool:
    """Check that a program on slices differs from the whole one in nothing but shapes: no mean over fewer rows."""
    if any(bodies(node.eqn) for node in whole.nodes):
        return False  # they may hold numbers, too
    facts = [
        [(node.name, [block.numbers.get(i) for i in node.ins], node.name == "iota" and block.shapes(node.outs))
         for node in block.nodes]
        for block in (whole, part)
    ]  # fmt: skip
    constants = [[np.asarray(value) for value in block.constants.values()] for block in (whole, part)]
    return facts[0] == facts[1] and all(np.array_equal(x, y) for x, y in zip(*constants, strict=False))


def _on_slices(params: Params, results: Sequence[Placement]) -> Params:
    """The parameters of a call on slices, if they name the types of its results."""
    if "result_avals" not in params:
        return params
    parts = zip(params["result_avals"], results, strict=True)
    return {**params, "result_avals": tuple(aval.update(shape=local_shape(aval.shape, p)) for aval, p in parts)}
