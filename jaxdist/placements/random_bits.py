"""Random bits of a slice: threefry makes each entry from the key and the entry's place, so a device makes only its own.

Bit for bit those of ``jax.random`` with ``jax_threefry_partitionable`` (JAX's default): the place is a counter in
row-major order, and the two words that threefry makes of it are joined or folded to the width. Other generators make
all of it on every device, and cut; so does threefry where the counter has more than 32 bits.

Reference: Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011; ``jax_threefry_partitionable`` in
https://docs.jax.dev/en/latest/jax.random.html.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist import compat
from jaxdist.placements.block import Node
from jaxdist.placements.run import make_whole
from jaxdist.placements.strategy import Strategy
from jaxdist.placements.values import DEFERRED, REPLICATED, Deferred, Placement, Replicated, Split, form
from jaxdist.placements.walk import Walk, special


@special("random_bits")
def _bits(walk: Walk, node: Node, ins: Sequence[Placement]) -> Strategy | None:
    if not isinstance(ins[0], (Replicated, Deferred)):
        return None
    keys = walk.block.avals[node.ins[0]]
    make = _make_bits if compat.makes_bits_by_place(keys.dtype) else make_whole
    return Strategy([None], [DEFERRED], make=make)


def _make_bits(emitter: Any, node: Node, to: Any) -> Any:
    (i,), (o,) = node.ins, node.outs
    keys, shape = emitter.block.avals[i].shape, emitter.block.avals[o].shape
    if not isinstance(to, Split):
        return emitter.bind(node, [emitter.take(i, REPLICATED)])[0]
    if to.dim < len(keys):  # the slices of an array of keys
        return emitter.bind(node, [emitter.take(i, form(to))])[0]
    if math.prod(shape[len(keys) :]) >= 1 << 32:
        return make_whole(emitter, node, to)
    data = jax.random.key_data(emitter.take(i, REPLICATED))
    own, rank = to.shape(shape), len(shape)
    place = jnp.zeros(own, jnp.uint32)
    for d in range(len(keys), rank):
        index = emitter.positions(to).astype(jnp.uint32) if d == to.dim else lax.iota(jnp.uint32, own[d])
        place += lax.broadcast_in_dim(index * jnp.uint32(math.prod(shape[d + 1 :])), own, (d,))
    first, second = (lax.broadcast_in_dim(data[..., w], own, range(len(keys))) for w in range(2))
    one, two = compat.threefry(first, second, jnp.zeros_like(place), place)
    width = node.eqn.params["bit_width"]
    if width == 64:
        return (one.astype(jnp.uint64) << jnp.uint64(32)) | two.astype(jnp.uint64)
    return (one ^ two).astype(jnp.dtype(f"uint{width}"))
