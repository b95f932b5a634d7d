"""Trees and objects as bytes: a small pickle, and the arrays' memory beside it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.errors import in_words

_WHOLE, _LEAVES, _ERROR = "whole", "leaves", "error"


def pack(obj: Any) -> list[memoryview]:
    """An object as buffers; arrays are not copied.

    A tree that can't be pickled as a whole (a TrainState that holds closures) goes as its leaves, and the receiver puts
    them into its own tree.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        skeleton = _dumps((_WHOLE, obj), buffers)
    except Exception as error:
        buffers.clear()
        try:
            leaves, tree = jax.tree.flatten(obj)
            skeleton = _dumps((_LEAVES, (leaves, tree.num_leaves)), buffers)
        except Exception:
            # The others wait for something: let every rank raise.
            buffers.clear()
            skeleton = _dumps((_ERROR, in_words(error)), buffers)
    return [memoryview(skeleton), *(b.raw() for b in buffers)]


def unpack(buffers: Sequence[memoryview | bytearray], mine: Any, rank: int) -> Any:
    """The object that `pack` made buffers of."""
    kind, payload = pickle.loads(buffers[0], buffers=buffers[1:])
    if kind == _ERROR:
        raise TypeError(
            f"rank {rank}: the object that the root broadcasts can be neither pickled nor taken "
            f"apart as a pytree of arrays ({payload})"
        )
    if kind == _WHOLE:
        return payload
    leaves, count = payload
    structure = jax.tree.structure(mine)
    if structure.num_leaves != count:
        raise ValueError(
            f"rank {rank}: broadcast of a tree with {count} leaves that can't be pickled as a "
            f"whole, and this rank passed one with {structure.num_leaves}: pass a tree of the "
            "same structure on every rank"
        )
    return jax.tree.unflatten(structure, leaves)


def check_packed(buffers: Sequence[memoryview | bytearray], rank: int) -> None:
    """On the root: raise what the others will raise."""
    if len(buffers) == 1 and pickle.loads(buffers[0])[0] == _ERROR:
        unpack(buffers, None, rank)


def reduce_array(array: jax.Array, rebuild: Callable[[np.ndarray], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An array as its host's memory, for a pickler's `reducer_override`."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _key, (str(jax.random.key_impl(array)), _host(jax.random.key_data(array)))
    return rebuild, (_host(array),)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce_array(obj, to_device) if isinstance(obj, jax.Array) else NotImplemented


def _dumps(obj: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(obj)
    return out.getvalue()


def _host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    raise ValueError(
        f"an array of shape {array.shape} is spread over several processes: gather it first (jaxdist.unshard)"
    )


def to_device(host: np.ndarray) -> jax.Array:
    """A host's array on the default device, of the same dtype."""
    array = jax.device_put(host)
    if array.dtype != host.dtype:
        raise ValueError(
            f"a {host.dtype} array was sent to a process that can't hold it (got "
            f"{array.dtype}): set jax_enable_x64 alike on every rank"
        )
    return array


def _key(impl: str, data: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(jax.device_put(data), impl=impl)
