"""Reductions by exchanging parts and adding locally, for wires that cannot reduce (correctly)."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.typing import DTypeLike

from jaxdist.ir.interpreter import Interpreter, Rule
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, joined, reduce_shard_p, slices

Move = Callable[[jax.Array], jax.Array]


class Among(NamedTuple):
    """The devices of a collective, and their exchanges."""

    size: int  # the number of them
    to_all: Move  # an all-to-all of an array's rows
    from_all: Move  # an all-gather into a new first dimension
    total: Callable[[jax.Array, str | None], jax.Array]  # the sum of an array, in a dtype on the wire


def rules(among: Callable[[JaxprEqn], Among]) -> dict[Primitive, Rule]:
    """Return rules (see `ir.interpreter`) for collectives from placements, given the devices of each."""

    def all_reduce(_: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        return among(eqn).total(x, eqn.params["wire"]) if x.size else jnp.zeros(x.shape, x.dtype)

    def scatter(_: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        devices, wire = among(eqn), eqn.params["wire"] or x.dtype
        return added_up(slices(x, eqn.params["dim"], devices.size), wire, devices.to_all).astype(x.dtype)

    def gather(_: Interpreter, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        return joined(among(eqn).from_all(x), eqn.params["dim"], eqn.params["size"])

    return {all_reduce_p: all_reduce, reduce_shard_p: scatter, gather_shards_p: gather}


def all_reduce(x: jax.Array, wire: DTypeLike, size: int, all_to_all: Move, all_gather: Move) -> jax.Array:
    """Sum `x` over the devices, with a different dtype on the wire."""
    # Each device sums one part in float32 (or the wider dtype of `x`). Rounding happens twice, when parts and when sums
    # are sent, for any number of devices.
    mine = added_up(slices(x.reshape(-1), 0, size), wire, all_to_all)
    whole = all_gather(mine.astype(wire)).reshape(-1)
    return whole[: x.size].reshape(x.shape).astype(x.dtype)


def added_up(parts: jax.Array, wire: DTypeLike, all_to_all: Move) -> jax.Array:
    """Sum this device's parts over all devices, given `parts` for each device."""
    wide = reducible(parts.dtype)
    return summed(all_to_all(parts.astype(wire)).astype(wide))


def summed(parts: jax.Array) -> jax.Array:
    """Sum over the first dimension by a binary tree, neighbors first, in float32 or wider."""
    parts = parts.astype(reducible(parts.dtype))
    while (n := len(parts)) > 1:
        pairs = parts[: n - n % 2].reshape(n // 2, 2, *parts.shape[1:])
        parts = jnp.concatenate([pairs[:, 0] + pairs[:, 1], parts[n - n % 2 :]])
    return parts[0]


def reducible(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which every wire reduces: floats of 32 bits or more, integers of 8."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype if dtype == jnp.float64 else jnp.dtype("float32")
    return jnp.dtype("int8") if jax.dtypes.itemsize_bits(dtype) < 8 else dtype


def bits(x: jax.Array) -> tuple[jax.Array, Move]:
    """Return `x` in a dtype that every wire sends bit for bit, and a function to convert back."""
    if x.dtype == bool:
        return x.astype(jnp.uint8), lambda y: y.astype(bool)
    if x.dtype.kind in "iuc" or x.dtype in (jnp.float32, jnp.float64):
        return x, lambda y: y
    if jax.dtypes.itemsize_bits(x.dtype) < 8:  # XLA for CPUs can't join these
        raw, back = bits(x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float8_e4m3fn))
        return raw, lambda y: back(y).astype(x.dtype)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, unsigned), lambda y: lax.bitcast_convert_type(y, x.dtype)


def unsigned(x: jax.Array) -> tuple[jax.Array, Move]:
    """Return `x` as unsigned integers, whose sum with zeros keeps every bit, and a function to convert back."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts, back = unsigned(jnp.stack([x.real, x.imag], -1))
        return parts, lambda y: lax.complex(*(lax.index_in_dim(back(y), k, -1, keepdims=False) for k in (0, 1)))
    raw, back = bits(x)
    if raw.dtype.kind == "u":
        return raw, back
    word = jnp.dtype(f"uint{8 * raw.dtype.itemsize}")
    return lax.bitcast_convert_type(raw, word), lambda y: back(lax.bitcast_convert_type(y, raw.dtype))


def extreme(x: jax.Array, op: str, reduce: Move) -> jax.Array:
    """Return the largest or smallest float over the devices, or NaN if there is one."""
    # MPI, gloo, and XLA between virtual devices lose NaN, unlike one device. So compare integers in the same order,
    # with NaN beyond all others.
    wide = x.astype(reducible(x.dtype))
    bits = lax.bitcast_convert_type(wide, jnp.dtype(f"int{8 * wide.dtype.itemsize}"))
    limits = jnp.iinfo(bits.dtype)
    key = jnp.where(bits < 0, bits ^ limits.max, bits)
    key = reduce(jnp.where(jnp.isnan(wide), limits.max if op == "max" else limits.min, key))
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ limits.max, key), wide.dtype).astype(x.dtype)
