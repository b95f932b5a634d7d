"""A reduction as an exchange of parts: what the wire can't reduce itself, or not right, moves and is added up here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive

from jaxdist.ir.interpreter import Rule
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, joined, reduce_shard_p, slices

Move = Callable[[Any], Any]


def rules(among: Callable[[JaxprEqn], tuple[int, Move, Move, Callable[..., Any]]]) -> dict[Primitive, Rule]:
    """Those (see `ir.interpreter`) of the collectives that placements emit. `among`: how many devices each is between,
    their all-to-all of the rows of an array, their all-gather, and their sum of ``(x, wire)``."""

    def all_reduce(_: Any, eqn: JaxprEqn, x: Any) -> Any:
        return among(eqn)[3](x, eqn.params["wire"]) if x.size else jnp.zeros(x.shape, x.dtype)

    def scatter(_: Any, eqn: JaxprEqn, x: Any) -> Any:
        size, to_all, *_ = among(eqn)
        return added_up(slices(x, eqn.params["dim"], size), eqn.params["wire"] or x.dtype, to_all).astype(x.dtype)

    def gather(_: Any, eqn: JaxprEqn, x: Any) -> Any:
        return joined(among(eqn)[2](x), eqn.params["dim"], eqn.params["size"])

    return {all_reduce_p: all_reduce, reduce_shard_p: scatter, gather_shards_p: gather}


def all_reduce(x: Any, wire: str, size: int, all_to_all: Move, all_gather: Move) -> Any:
    """The sum of `x` over the devices, its bytes in another dtype on the wire.

    Each device adds up one part of it in float32 (or wider, as `x` is): rounded when the parts are sent and when the
    sum is, however many devices there are.
    """
    mine = added_up(slices(x.reshape(-1), 0, size), wire, all_to_all)
    whole = all_gather(mine.astype(wire)).reshape(-1)
    return whole[: x.size].reshape(x.shape).astype(x.dtype)


def added_up(parts: Any, wire: Any, all_to_all: Move) -> Any:
    """The sum of the devices' parts for this one, of which each device has `parts`, one for each."""
    wide = _wide(parts.dtype)
    return summed(all_to_all(parts.astype(wire)).astype(wide))


def summed(parts: Any) -> Any:
    """The sum over the first dimension, by a binary tree: neighbours first. In float32 or wider."""
    parts = parts.astype(_wide(parts.dtype))
    while (n := len(parts)) > 1:
        pairs = parts[: n - n % 2].reshape(n // 2, 2, *parts.shape[1:])
        parts = jnp.concatenate([pairs[:, 0] + pairs[:, 1], parts[n - n % 2 :]])
    return parts[0]


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def bits(x: Any) -> tuple[Any, Move]:
    """`x` in a dtype that every wire moves, bit for bit, and the way back."""
    if x.dtype == bool:
        return x.astype(jnp.uint8), lambda y: y.astype(bool)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        return x.astype(jnp.int8), lambda y: y.astype(x.dtype)
    if x.dtype.kind in "iuc" or x.dtype in (jnp.float32, jnp.float64):
        return x, lambda y: y
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, unsigned), lambda y: lax.bitcast_convert_type(y, x.dtype)


def extreme(x: Any, op: str, reduce: Move) -> Any:
    """The largest or smallest of floats over the devices, or NaN if one is.

    MPI, gloo and XLA between virtual devices lose it; one device would not. So they compare integers in the same order,
    with NaN beyond all.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    bits = lax.bitcast_convert_type(wide, jnp.dtype(f"int{8 * wide.dtype.itemsize}"))
    limits = jnp.iinfo(bits.dtype)
    key = jnp.where(bits < 0, bits ^ limits.max, bits)
    key = reduce(jnp.where(jnp.isnan(wide), limits.max if op == "max" else limits.min, key))
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ limits.max, key), wide.dtype).astype(x.dtype)
