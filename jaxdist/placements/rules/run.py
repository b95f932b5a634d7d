"""Ways to run an operation on the operands that a device holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist import compat
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.factors import Factors
from jaxdist.placements.model.strategy import DeviceContext
from jaxdist.placements.model.values import REPLICATED, Form, Split, wide


def run_as_is(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
    """Run the unmodified operation."""
    return device.bind(node, xs)


def run_wide(device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
    """Run on summands, in their wide dtype."""
    narrow = device.block.avals[node.outs[0]].dtype
    dtype = wide(narrow)
    if node.name == "convert_element_type":
        # Its parameter names the narrow dtype, which the sum gets once it is made.
        return [xs[0].astype(dtype)]
    if dtype != narrow:
        xs = [x.astype(dtype) if getattr(x, "dtype", None) == narrow else x for x in xs]
    return device.bind(node, xs)


def make_in_form(device: DeviceContext, node: Node, target: Form) -> jax.Array:
    """Make a deferred value from the same slices of its operands."""
    described, params = device.block.factors(node), node.eqn.params
    factor = described.results[0][target.dim] if described is not None and isinstance(target, Split) else None
    if described is None or factor is None or not isinstance(target, Split):  # a bitcast may add a dimension
        return make_whole(device, node, target)
    in_forms = [target.along(dims.index(factor)) if factor in dims else REPLICATED for dims in described.operands]
    if described.params is not None:
        params = described.params(params, factor, target)
    return device.bind(node, list(map(device.take, node.ins, in_forms)), params)[0]


def make_whole(device: DeviceContext, node: Node, target: Form) -> jax.Array:
    """Make a deferred value whole, then cut it."""
    if isinstance(target, Split):
        return device.cut(device.take(node.outs[0], REPLICATED), target)
    return device.bind(node, [device.take(i, REPLICATED) for i in node.ins])[0]


_OF_WIDE_OPERANDS = {"reduce_sum", "psum", "dot_general", "conv_general_dilated", "ragged_dot_general", "scatter-add"}


@dataclass(frozen=True)
class Cut:
    """An operation on slices along one factor."""

    described: Factors
    factor: int
    split: Split
    kind: str | None

    def __call__(self, device: DeviceContext, node: Node, xs: list[jax.Array]) -> Sequence[jax.Array]:
        described, factor, split, kind = self.described, self.factor, self.split, self.kind
        params = node.eqn.params
        if described.params is not None:
            params = described.params(params, factor, split)
        if kind is not None and split.is_padded(device.n) and params.get("unique_indices"):
            params = {**params, "unique_indices": False}  # padding has the last index once more
        if kind is None:
            results = device.bind(node, xs, params)
            if described.is_even(factor):
                return results
            # Padding in a turn with real entries, or a turn of padding: its result is not a copy of the last real one.
            shapes = enumerate(device.block.shapes(node.outs), len(xs))
            parts = [described.slices(k, factor, split, shape) for k, shape in shapes]
            return [x if part is None else repeat_last(device, x, part) for x, part in zip(results, parts, strict=True)]
        # Every operand with the factor: ``0 * NaN`` is NaN, so to mask one of two factors of a product would not do.
        if split.is_padded(device.n):
            for k, dims in enumerate(described.operands):
                if factor in dims and (described.masked is None or k in described.masked):
                    xs[k] = device.masked(xs[k], split.along(dims.index(factor)), identity(kind, xs[k].dtype))
        if kind != "sum":
            pairs = zip(device.bind(node, xs, params), described.results, strict=True)
            return [x if factor in dims else device.across(x, kind) for x, dims in pairs]
        dtype = device.block.avals[node.outs[0]].dtype
        if len(node.outs) > 1:
            pairs = zip(device.bind(node, xs, params), described.results, strict=True)
            return [x if factor in dims else x.astype(wide(x.dtype)) for x, dims in pairs]
        if wide(dtype) == dtype:
            return device.bind(node, xs, params)
        if node.name not in _OF_WIDE_OPERANDS:  # a kernel is compiled for the types that it has
            return [x.astype(wide(x.dtype)) for x in device.bind(node, xs, params)]
        preferred = "preferred_element_type" in params
        # XLA for CPUs multiplies no 16-bit floats into 32 bits, but converts them first anyway.
        if not preferred or device.placed.axis.machine.kind.is_cpu:
            xs = [x.astype(wide(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in xs]
        if "update_jaxpr" in params:  # an adding scatter: its parameters contain the dtype
            return [compat.scatter_add(xs, params)]
        return device.bind(node, xs, {**params, "preferred_element_type": wide(dtype)} if preferred else params)


def repeat_last(device: DeviceContext, x: jax.Array, split: Split) -> jax.Array:
    """Fill the padding, which only the last device has, with its last real entry."""
    if not split.is_padded(device.n):
        return x
    # Rules have checked that the last device has a real entry (`_has_all_devices`, `Factors.turns`).
    last = split.size - 1 - (device.n - 1) * split.chunk
    return jnp.where(device.real(split, x.ndim), x, lax.slice_in_dim(x, last, last + 1, axis=split.dim))


def identity(kind: str, dtype: np.dtype) -> complex | np.ndarray | np.generic:
    """Return the value that leaves a reduction unchanged: the value of padding."""
    if kind in ("sum", "product"):
        return int(kind == "product")
    if jnp.issubdtype(dtype, jnp.bool_):
        return kind in ("and", "min")
    if kind in ("or", "and"):
        return np.invert(np.zeros((), dtype)) if kind == "and" else 0
    if jnp.issubdtype(dtype, jnp.inexact):
        beyond = np.asarray(-np.inf if kind == "max" else np.inf)
        # Some floats of 8 bits have no infinity, and make NaN of it.
        if not np.isnan(beyond.astype(dtype)):
            return beyond
    limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return limits.min if kind == "max" else limits.max
