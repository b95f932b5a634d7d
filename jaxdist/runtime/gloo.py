"""Gloo, which carries XLA's collectives between CPU processes: its first connection, without its output."""

import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import streams
from jaxdist.mesh import from_host

_lock = threading.Lock()  # there is one standard output
_connected: set[tuple[Any, ...]] = set()


def connect(mesh: Mesh, names: Sequence[str]) -> None:
    """A first sum between the processes along some axes, when all are here: gloo gives them 30 s to come (in XLA)."""
    between = tuple(device.id for device in mesh.devices.flat), *(names if len(mesh.axis_names) > 1 else ())
    if between in _connected:
        return
    cut = PartitionSpec(mesh.axis_names)
    each = NamedSharding(mesh, cut)
    ones = from_host((mesh.size,), each, lambda _: np.ones(1, np.int32))
    sum_of = jax.shard_map(lambda x: lax.psum(x, tuple(names)), mesh=mesh, in_specs=cut, out_specs=cut, check_vma=False)
    # Gloo writes a line for each device on standard output; nothing turns it off.
    with _lock, streams.silenced(1):
        jax.block_until_ready(jax.jit(sum_of)(ones))
    _connected.add(between)
