"""The XLA communicator: NCCL on GPUs, gloo between CPU processes, shared memory on virtual devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from jaxdist import compat
from jaxdist.communicators import exchange
from jaxdist.ir.interpreter import Interpreter, groups_of
from jaxdist.ir.primitives import (
    FETCHED,
    all_reduce_p,
    gather_shards_p,
    group_reduce_p,
    joined,
    reduce_shard_p,
    reduced,
    slices,
)
from jaxdist.mesh import AXIS, Groups, across, within


class XlaLowering(Interpreter):
    """Evaluates a step's jaxpr on one device of a ``shard_map``, its reductions as XLA's own collectives."""

    def __init__(self) -> None:
        super().__init__(
            {
                all_reduce_p: lambda _, eqn, x: reduced(x, **eqn.params),
                reduce_shard_p: lambda _, eqn, x: _reduce_shard(eqn, x),
                gather_shards_p: lambda _, eqn, x: _gather_shards(eqn, x),
                p.pmax_p: lambda _, eqn, x: _extreme(eqn, x, "max"),
                p.pmin_p: lambda _, eqn, x: _extreme(eqn, x, "min"),
                group_reduce_p: lambda _, eqn, x: _extreme(eqn, x, eqn.params["op"]),
                **FETCHED,
            }
        )

    def with_rules(self, own: Mapping[str, Callable[..., Any]]) -> XlaLowering:
        """These rules, but for some collectives others (see `jaxdist.communicators.Rules`)."""
        for name, rule in own.items():
            primitive, names = _NAMED[name]
            ours = self.rules.get(primitive, _as_is)

            def lower(
                _: Interpreter, eqn: JaxprEqn, x: Any, rule: Any = rule, names: Any = names, ours: Any = ours
            ) -> Any:
                if groups_of(eqn) is not None:
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


def _as_is(_: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
    outs = compat.bind(eqn, eqn.params, [x])
    return outs if eqn.primitive.multiple_results else outs[0]


class GlooLowering(XlaLowering):
    """As `XlaLowering`, between CPU processes.

    * Gloo's reduce-scatter gives wrong data now and then (jax#40830): an all-to-all and a local sum in its place.
    * XLA would widen 16-bit floats on their way: compressed gradients are exchanged bit for bit.
    * XLA puts collectives that do not depend on each other into an order, on another processor perhaps into another:
      each has a number in its name, so that `jaxdist.runtime.order` can tell which is which.
    * Gloo knows nothing of hosts: what is large is added up within each first, then the slices between them; or it
      is gathered between them first, so that each link carries it once.

    Args:
      in_host: how many devices in a row are on one host; 0: that is no matter.
    """

    def __init__(self, in_host: int = 0) -> None:
        super().__init__()
        self._in_host = in_host
        self.rules = {
            **dict.fromkeys((p.psum_p, p.all_gather_p, p.all_to_all_p, p.ppermute_p, p.ragged_all_to_all_p), _as_is),
            **self.rules,
            all_reduce_p: self._all_reduce,
            compat.reduce_scatter_p: self._reduce_scatter,
            reduce_shard_p: self._reduce_shard,
            gather_shards_p: self._gather_shards,
        }
        self._numbers = itertools.count(1)

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive not in self.rules:
            return super().eval_eqn(eqn, *args)
        with jax.named_scope(f"collective_{next(self._numbers)}"):
            return super().eval_eqn(eqn, *args)

    def _all_reduce(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        if not x.size:
            return reduced(x, **eqn.params)
        wire, groups = eqn.params["wire"], eqn.params["groups"]
        if groups is None and self._in_host and x.nbytes >= _LARGE:
            return _by_hosts(x, wire, self._in_host)
        return _all_reduce(x, wire, groups)

    def _reduce_shard(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        dim, wire, devices, groups = (eqn.params[k] for k in ("dim", "wire", "devices", "groups"))
        host = self._in_host
        if groups is not None or not host or x.nbytes < _LARGE:
            return exchange.reduce_scatter(x, dim, wire, devices, functools.partial(_all_to_all, groups=groups))
        parts = slices(x, dim, devices)
        parts = parts.reshape(-1, host, *parts.shape[1:]).swapaxes(0, 1)  # [in a host, hosts, ...]
        for groups in (within(devices, host), across(devices, host)):
            parts = exchange.added_up(parts, wire or x.dtype, functools.partial(_all_to_all, groups=groups))
        return parts.astype(x.dtype)

    def _gather_shards(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        host, devices = self._in_host, eqn.params["devices"]
        if eqn.params["groups"] is not None or not host or x.nbytes * devices < _LARGE:
            return _gather_shards(eqn, x)
        parts = _all_gather(_all_gather(x, across(devices, host)), within(devices, host))  # [in a host, hosts, ...]
        return joined(parts.swapaxes(0, 1).reshape(devices, *x.shape), eqn.params["dim"], eqn.params["size"])

    def _reduce_scatter(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        dim, tiled = eqn.params["scatter_dimension"], eqn.params["tiled"]
        groups = eqn.params["axis_index_groups"]
        size = len(groups[0]) if groups else lax.axis_size(eqn.params["axis_name"])
        parts = slices(x, dim, size)
        parts = lax.all_to_all(parts, eqn.params["axis_name"], 0, 0, tiled=True, axis_index_groups=groups)
        total = parts.sum(0).astype(x.dtype)
        return total if tiled else total.squeeze(dim)


_LARGE = 1 << 16
"""Bytes from which less between hosts is worth two more messages within them."""


def _all_reduce(x: Any, wire: str | None, groups: Groups | None) -> Any:
    if wire is None:
        return lax.psum(x, AXIS, axis_index_groups=groups)
    size = len(groups[0]) if groups else lax.axis_size(AXIS)
    all_to_all, all_gather = (functools.partial(move, groups=groups) for move in (_all_to_all, _all_gather))
    return exchange.all_reduce(x, wire, size, all_to_all, all_gather)


def _by_hosts(x: Any, wire: str | None, in_host: int) -> Any:
    """The sum over all devices: to slices within each host, these between the hosts, and together again."""
    devices = lax.axis_size(AXIS)
    host = within(devices, in_host)
    part = exchange.reduce_scatter(x.reshape(-1), 0, wire, in_host, functools.partial(_all_to_all, groups=host))
    part = _all_reduce(part, wire, across(devices, in_host))
    whole = _all_gather(part.astype(wire or x.dtype), host).reshape(-1)
    return whole[: x.size].reshape(x.shape).astype(x.dtype)


def _reduce_shard(eqn: JaxprEqn, x: Any) -> Any:
    parts = slices(x, eqn.params["dim"], eqn.params["devices"])
    wire, groups = eqn.params["wire"], eqn.params["groups"]
    return lax.psum_scatter(parts.astype(wire or x.dtype), AXIS, axis_index_groups=groups).astype(x.dtype)


def _gather_shards(eqn: JaxprEqn, x: Any) -> Any:
    return joined(_all_gather(x, eqn.params["groups"]), eqn.params["dim"], eqn.params["size"])


def _extreme(eqn: JaxprEqn, x: Any, op: str) -> Any:
    def reduce(x: Any) -> Any:
        return compat.bind(eqn, eqn.params, [x])[0]

    if op == "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x)
    return exchange.extreme(x, op, reduce)


def _all_to_all(parts: Any, groups: Any) -> Any:
    raw, back = exchange.bits(parts)
    return back(lax.all_to_all(raw, AXIS, 0, 0, tiled=True, axis_index_groups=groups))


def _all_gather(part: Any, groups: Any) -> Any:
    raw, back = exchange.bits(part)
    return back(lax.all_gather(raw, AXIS, axis_index_groups=groups))
