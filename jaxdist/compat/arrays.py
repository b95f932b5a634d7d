"""Arrays and their memory."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
from jax._src import core as _core

sharding_of = operator.attrgetter("_sharding")
"""`x.sharding` of an array, without the Python of a property: looked at for each leaf of the state in each call."""

bits_of = operator.attrgetter("_base_array")
"""The array of integers that an array of typed PRNG keys is made of, as it is."""


def adopt(host: Any) -> jax.Array:
    """An array on the default device with the memory of a NumPy array, where that is the host's, else a copy.

    `jax.device_put` does the same and takes 25 us for it, more than the rest of a small eager collective. Host memory
    is used as it is if aligned to 64 bytes; it is kept as long as the array or anything made from it without a copy.
    """
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

    if jax.config.jax_default_device is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return jax.device_put(host)
    aval, sharding, device = _on_first_device(host.shape, host.dtype)
    return xla_client.batched_device_put(aval, sharding, [host], [device], False)


@functools.lru_cache(maxsize=1024)
def _on_first_device(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any, Any]:
    device = jax.local_devices()[0]
    return _core.ShapedArray(shape, dtype), jax.sharding.SingleDeviceSharding(device), device


def release_dropped() -> None:
    """Let go of host memory of arrays that are gone: JAX puts that off until its next call of some kinds.

    `jax._src.lib` calls this at each run of Python's garbage collector.
    """
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    _jax.collect_garbage()
