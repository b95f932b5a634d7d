"""Gloo, which carries XLA's collectives between CPU processes: its first connection, without what it prints."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist import streams
from jaxdist.mesh import from_host

# A line for each device, on standard output, for each set of devices that it connects; nothing turns it off. The lines
# of several devices of a process are mixed, piece by piece.
_PIECES = re.compile(rb"\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : ")
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
    with _lock, _without_chatter(mixed=len(mesh.local_devices) > 1):
        jax.block_until_ready(jax.jit(sum_of)(ones))
    _connected.add(between)


@contextlib.contextmanager
def _without_chatter(mixed: bool) -> Iterator[None]:
    streams.flush()
    try:
        own = os.dup(1)
    except OSError:  # there is none
        yield
        return
    held = os.memfd_create("stdout")
    os.dup2(held, 1)
    try:
        yield
    finally:
        streams.flush()
        os.dup2(own, 1)
        os.lseek(held, 0, os.SEEK_SET)
        with os.fdopen(own, "wb") as output, os.fdopen(held, "rb") as lines:
            output.writelines(line for line in lines if not _is_chatter(line, mixed))


def _is_chatter(line: bytes, mixed: bool) -> bool:
    rest, pieces = _PIECES.subn(b"", line)
    return (pieces > 0 or mixed) and not rest.strip(b"0123456789 \n")
