"""Gloo, which carries XLA's collectives between CPU processes: its first connection."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def connect(mesh: Mesh, names: Sequence[str]) -> None:
    """A first sum between the processes along some axes, when all are here: for connecting them gloo gives them 30 s to
    come.

    (A constant in XLA. The later collectives wait for half an hour.)
    """
    cut = PartitionSpec(mesh.axis_names)
    each = NamedSharding(mesh, cut)
    ones = jax.make_array_from_callback((mesh.size,), each, lambda _: np.ones(1, np.int32))
    sum_of = jax.shard_map(lambda x: lax.psum(x, tuple(names)), mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    jax.block_until_ready(jax.jit(sum_of)(ones))
