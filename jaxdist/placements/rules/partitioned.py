"""The rule for `custom_partitioning`: a kernel's own ``partition`` divides it."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxdist import compat
from jaxdist.ir.interpreter import axes_of, walk
from jaxdist.mesh import dim_over
from jaxdist.placements.model.block import Aval, Node
from jaxdist.placements.model.factors import Dims, Factors
from jaxdist.placements.model.strategy import DeviceContext, Strategy
from jaxdist.placements.model.values import REPLICATED, Form, Placement, Split, form, local_shape, tile
from jaxdist.placements.rules.context import RuleContext, refuse, special
from jaxdist.placements.rules.own_code import sent_by

Slices = tuple[Split | None, ...]  # of the operands, then of the results


@special("custom_partitioning")
def _by_its_partition(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    """Ask the kernel's own ``partition`` for the program of a device, with the slices that its rule allows."""
    strategies = [_partitioned(ctx, node, slices) for slices in _proposals(ctx, node, ins)]

    def bytes_sent(strategy: Strategy) -> float:
        by_itself = sum(sends.times * ctx.infer.link.sent(sends.kind, sends.bytes) for sends in strategy.sends)
        return ctx.bytes_for_operands(node, ins, strategy) + by_itself

    return min(filter(None, strategies), key=bytes_sent, default=None)  # of equals, the first


def _proposals(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Iterator[Slices]:
    """Yield slices of all arrays for each factor that splits an operand; without factors, the operands' slices."""
    if (described := _factors_of_rule(ctx, node)) is None:
        if any(isinstance(p, Split) for p in ins) and node.eqn.params["infer_sharding_from_operands"]:
            yield tuple(p if isinstance(p, Split) else None for p in ins)
        return
    shapes = ctx.block.shapes((*node.ins, *node.outs))
    for factor, turns in ctx.candidates(node, ins, described):
        yield tuple(described.slices(k, factor, turns, shape) for k, shape in enumerate(shapes))


def _factors_of_rule(ctx: RuleContext, node: Node) -> Factors | None:
    """Return the factors of a Shardy rule; of several in one dimension, the outermost."""
    avals = [[ctx.block.avals[i] for i in values] for values in (node.ins, node.outs)]
    if (rule := compat.sharding_rule(node.eqn.params, *avals)) is None:
        return None
    arrays = [*avals[0], *avals[1]]
    mappings = zip((*rule.operand_mappings, *rule.result_mappings), arrays, strict=True)
    names = [compat.split_by_shardy(mapping, aval.ndim) for mapping, aval in mappings]
    sizes, kept = dict(rule.factor_sizes), {*rule.need_replication_factors, *rule.permutation_factors}
    for dims, aval in zip(names, arrays, strict=True):
        for factors, n in zip(dims, aval.shape, strict=True):
            if len(factors) == 1 and sizes.setdefault(factors[0], n) != n:
                kept.add(factors[0])  # a result has fewer entries than an operand, or one of them more than others
    # Slices of a dimension are contiguous: only its outermost factor can be cut.
    kept |= {factor for dims in names for factors in dims for factor in factors[1:]}
    numbers = {factor: k for k, factor in enumerate(sorted({f for dims in names for fs in dims for f in fs} - kept))}
    # By ``(h w) c -> h w c``, a turn of h takes `w` entries of the operand's first dimension, and w itself is not cut.
    units = {
        (k, d): Fraction(math.prod(sizes[factor] for factor in factors[1:]))
        for k, dims in enumerate(names) for d, factors in enumerate(dims)
    }  # fmt: skip
    described: list[Dims] = [tuple(numbers.get(factors[0]) for factors in dims) for dims in names]
    return Factors(tuple(described[: len(node.ins)]), tuple(described[len(node.ins) :]), units=units)


@dataclass(frozen=True)
class _Arrays:
    """Types of a kernel's arrays, with shardings over a mesh of the axis alone."""

    avals: Sequence[Aval]
    axis: str
    mesh: AbstractMesh

    def whole(self, i: int, p: Split | None) -> jax.ShapeDtypeStruct:
        """The type of an array with a sharding, as long as all its slices."""
        shape = self.avals[i].shape if p is None else p.shape(self.avals[i].shape)
        # JAX's shardings divide evenly, so a padded dimension is shown to `partition` at its padded length.
        shape = tuple(size * self.mesh.size if p and d == p.dim else size for d, size in enumerate(shape))
        spec = PartitionSpec(*(self.axis if p and d == p.dim else None for d in range(len(shape))))
        return jax.ShapeDtypeStruct(shape, self.avals[i].dtype, sharding=NamedSharding(self.mesh, spec))

    def local(self, i: int, p: Split | None) -> jax.ShapeDtypeStruct:
        """The type of what a device has of an array."""
        return jax.ShapeDtypeStruct(local_shape(self.avals[i].shape, p), self.avals[i].dtype)

    def slices(self, shardings: Sequence[NamedSharding], values: Sequence[int], proposed: Slices) -> Slices:
        """The slices that shardings mean: those that were proposed, or others."""

        def meant(i: int, sharding: NamedSharding, p: Split | None) -> Split | None:
            dim = dim_over(sharding.spec, self.axis)
            if dim is None or (p is not None and p.dim == dim):
                return None if dim is None else p
            return tile(dim, self.avals[i].shape[dim], self.mesh.size)

        return tuple(map(meant, values, shardings, proposed))


def _partitioned(ctx: RuleContext, node: Node, slices: Slices) -> Strategy | None:
    """Return the strategy that the kernel's ``partition`` gives for these slices, or None if it gives none."""
    if any(p is not None and p.outer > 1 for p in slices):
        return None
    # A value that is whole here, too, is cut for the kernel, and its results are slices alone.
    slices = tuple(p and p.alone() for p in slices)
    params, axis, n = node.eqn.params, ctx.infer.axis, ctx.n
    ins, outs, static = params["in_tree"], params["out_tree"], params["static_args"]
    mesh = AbstractMesh((n,), (axis.name,))
    arrays = _Arrays(ctx.block.avals, axis.name, mesh)
    in_slices, out_slices = slices[: len(node.ins)], slices[len(node.ins) :]
    operands = ins.unflatten(map(arrays.whole, node.ins, in_slices))
    if not out_slices:
        none: Slices = (None,) * len(node.outs)
        results = outs.unflatten(map(arrays.local, node.outs, none))
        inferred = params["infer_sharding_from_operands"](*static, mesh, operands, results)
        out_slices = arrays.slices(outs.flatten_up_to(inferred), node.outs, none)
    results = outs.unflatten(map(arrays.whole, node.outs, out_slices))
    _, program, out_shardings, in_shardings = params["partition"](*static, mesh, operands, results)
    in_slices = arrays.slices(ins.flatten_up_to(in_shardings), node.ins, in_slices)
    out_slices = arrays.slices(outs.flatten_up_to(out_shardings), node.outs, out_slices)
    local = ins.unflatten(map(arrays.local, node.ins, in_slices))
    body = jax.make_jaxpr(program, axis_env=[(axis.name, n)])(*local)
    expected = [(x.shape, x.dtype) for x in map(arrays.local, node.outs, out_slices)]
    if [(a.shape, a.dtype) for a in body.out_avals] != expected:
        raise refuse(node, f"the program of its partition returns {body.out_avals}, and its shardings say {expected}")
    names_axis = any(axis.name in axes_of(eqn) for eqn, _ in walk(body))
    is_padded = any(p is not None and p.is_padded(n) for p in (*in_slices, *out_slices))
    # Without messages each result must be in slices; with them, padding would count.
    are_slices = all(p is not None or not ctx.block.uses[o] for o, p in zip(node.outs, out_slices, strict=True))
    if not any(in_slices) or (is_padded if names_axis else not are_slices):
        return None
    run = functools.partial(_run_partitioned, body, params if axis.inner and not names_axis else None)
    in_forms: list[Form] = [form(p) if p else REPLICATED for p in in_slices]
    return Strategy(in_forms, [p or REPLICATED for p in out_slices], run, sends=[*sent_by(body, axis, axis.mesh)])


def _run_partitioned(
    body: ClosedJaxpr, params: Any, device: DeviceContext, node: Node, xs: list[jax.Array]
) -> Sequence[jax.Array]:
    """Run the program of a device; for axes that are placed later, it stays a kernel with its rule."""
    return jaxpr_as_fun(body)(*xs) if params is None else device.bind(node, xs, {**params, "call": body})
