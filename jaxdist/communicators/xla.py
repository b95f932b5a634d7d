"""The XLA communicator: NCCL on GPUs, gloo between CPU processes, shared memory on virtual devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p
from jax.typing import DTypeLike

from jaxdist import compat
from jaxdist.communicators import exchange
from jaxdist.ir.interpreter import Interpreter, Rule, axes_of, groups_of
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, joined, reduce_shard_p, reduced, slices
from jaxdist.mesh import AXIS

Axes = tuple[str, ...]
Groups = Sequence[Sequence[int]] | None
Results = jax.Array | list[jax.Array]  # a list from a primitive with several results


class XlaLowering(Interpreter):
    """Evaluates a step's jaxpr on one device of a ``shard_map``, with XLA's own collectives."""

    def __init__(self) -> None:
        super().__init__(
            {
                all_reduce_p: lambda _, eqn, x: reduced(x, **eqn.params),
                reduce_shard_p: lambda _, eqn, x: _reduce_shard(eqn, x),
                gather_shards_p: lambda _, eqn, x: _gather_shards(eqn, x),
                p.pmax_p: lambda _, eqn, x: extreme(eqn, x, "max"),
                p.pmin_p: lambda _, eqn, x: extreme(eqn, x, "min"),
                **dict.fromkeys((p.psum_p, compat.reduce_scatter_p), lambda _, eqn, x: _converted(eqn, x, *_summed(x))),
                **dict.fromkeys(
                    (p.all_gather_p, p.all_to_all_p, p.ppermute_p),
                    lambda _, eqn, x: _converted(eqn, x, *exchange.bits(x)),
                ),
            }
        )

    def with_rules(self, own: Mapping[str, Callable[..., Any]]) -> "XlaLowering":
        """Replace the rules of some collectives (see `jaxdist.communicators.Rules`)."""
        for name, rule in own.items():
            primitive, names = _NAMED[name]
            ours = self.rules[primitive]

            def lower(
                _: Interpreter, eqn: JaxprEqn, x: jax.Array, rule: Rule = rule, names: Axes = names, ours: Rule = ours
            ) -> Results:
                if groups_of(eqn) is not None or axes_of(eqn) != (AXIS,):
                    return ours(self, eqn, x)
                out = rule(x, **{k: eqn.params[k] for k in names})
                return out if not eqn.primitive.multiple_results else [out]

            self.rules[primitive] = lower
        return self


_NAMED: dict[str, tuple[Primitive, tuple[str, ...]]] = {
    "all_reduce": (all_reduce_p, ("wire",)),
    "reduce_scatter": (reduce_shard_p, ("dim", "devices", "wire")),
    "all_gather": (gather_shards_p, ("dim", "size", "devices")),
    "all_to_all": (p.all_to_all_p, ("split_axis", "concat_axis")),
    "max": (p.pmax_p, ()),
    "min": (p.pmin_p, ()),
    "permute": (p.ppermute_p, ("perm",)),
}


def _converted(eqn: JaxprEqn, x: jax.Array, raw: jax.Array, back: exchange.Move) -> Results:
    """Bind a collective of `x` to `raw`, which gloo, NCCL and XLA for CPUs can send or reduce."""
    outs = [back(y) for y in compat.bind(eqn, eqn.params, [raw])]
    return outs if eqn.primitive.multiple_results else outs[0]


def _summed(x: jax.Array) -> tuple[jax.Array, exchange.Move]:
    if x.dtype.itemsize > 1 or x.dtype.kind in "biu":
        return x, lambda y: y
    return x.astype(exchange.reducible(x.dtype)), lambda y: y.astype(x.dtype)


class GlooLowering(XlaLowering):
    """The same between CPU processes, over gloo.

    * Gloo's reduce-scatter sometimes returns wrong data (jax#40830): use all-to-all and a local sum.
    * XLA would widen 16-bit floats before sending: exchange compressed gradients bit for bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rules |= {compat.reduce_scatter_p: self._reduce_scatter, **exchange.rules(self._among)}

    def _among(self, eqn: JaxprEqn) -> exchange.Among:
        axes = eqn.params["axes"]
        to_all, from_all, total = (functools.partial(move, axes) for move in (all_to_all, all_gather, self._total))
        return exchange.Among(lax.axis_size(axes), to_all, from_all, total)

    def _reduce_scatter(self, _: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        dim, tiled = eqn.params["scatter_dimension"], eqn.params["tiled"]
        groups = eqn.params["axis_index_groups"]
        size = len(groups[0]) if groups else lax.axis_size(eqn.params["axis_name"])
        parts = all_to_all(eqn.params["axis_name"], slices(x, dim, size), groups)
        total = exchange.summed(parts).astype(x.dtype)
        return total if tiled else total.squeeze(dim)

    def _total(self, axes: Axes, x: jax.Array, wire: DTypeLike | None, groups: Groups = None) -> jax.Array:
        """Sum `x` over the devices along some axes, or within groups of them."""
        if wire is None:
            return lax.psum(x, axes, axis_index_groups=groups)
        size = len(groups[0]) if groups else lax.axis_size(axes)
        to_all, from_all = (functools.partial(move, axes, groups=groups) for move in (all_to_all, all_gather))
        return exchange.all_reduce(x, wire, size, to_all, from_all)


def _reduce_shard(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    parts = slices(x, eqn.params["dim"], eqn.params["devices"])
    return lax.psum_scatter(parts.astype(eqn.params["wire"] or x.dtype), eqn.params["axes"]).astype(x.dtype)


def _gather_shards(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    parts = all_gather(eqn.params["axes"], x)
    return joined(parts, eqn.params["dim"], eqn.params["size"])


def extreme(eqn: JaxprEqn, x: jax.Array, op: str) -> jax.Array:
    """Return the max or min over devices; NaN if one has it."""

    def reduce(x: jax.Array) -> jax.Array:
        return compat.bind(eqn, eqn.params, [x])[0]

    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x.astype(exchange.reducible(x.dtype))).astype(x.dtype)
    return exchange.extreme(x, op, reduce)


def all_to_all(axes: Axes, parts: jax.Array, groups: Groups = None) -> jax.Array:
    """Return row i of `parts` from device i along the axes, or in the group."""
    raw, back = exchange.bits(parts)
    return back(lax.all_to_all(raw, axes, 0, 0, tiled=True, axis_index_groups=groups))


def all_gather(axes: Axes, part: jax.Array, groups: Groups = None) -> jax.Array:
    """Stack the parts of all devices along the axes, or in the group, in a new dimension."""
    raw, back = exchange.bits(part)
    return back(lax.all_gather(raw, axes, axis_index_groups=groups))
