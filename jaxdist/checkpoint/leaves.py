"""The state as named leaves: what orbax is given, and what a checkpoint is compared by."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdist.placements.layouts import Padded

PYTHON = (bool, int, float, complex)
TEXT = (str, np.str_)
_DIMENSIONS = 31  # of an array on disk: tensorstore has 32, of which the index of its chunks takes one
_PLAIN = (np.ndarray, np.memmap)  # others are more than their values: a mask, another meaning of `*`, names of fields


def named(state: Any) -> tuple[list[tuple[str, ...]], list[Any]]:
    """The leaves, each with the keys that lead to it."""
    try:
        found, _ = jax.tree_util.tree_flatten_with_path(state)
    except (RecursionError, SystemError) as error:  # as jaxlib hands on the first
        if not isinstance(error, RecursionError) and not isinstance(error.__cause__, RecursionError):
            raise
        raise ValueError("the state contains itself, or is nested more deeply than JAX can follow") from None
    return [tuple(_key(k) for k in path) or ("state",) for path, _ in found], [x for _, x in found]


def _key(entry: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def nested(names: list[tuple[str, ...]], values: list[Any]) -> dict[str, Any]:
    """A tree of dicts with these leaves."""
    tree: dict[str, Any] = {}
    for (*above, last), value in zip(names, values, strict=True):
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def refusal(x: Any) -> str:
    """Why a leaf would not come back as what it is; "": it would."""
    kind = type(x)
    if kind in PYTHON or kind in TEXT:
        return ""
    if isinstance(x, Tracer):
        return "it has no value yet inside of a function that JAX traces: save what the function returns"
    if isinstance(x, np.ma.MaskedArray):
        return "a masked array would lose its mask: save x.filled(), or x.data and x.mask as two leaves"
    if isinstance(x, np.ndarray) and kind not in _PLAIN:
        return f"{kind.__name__} would come back as a plain array: save np.asarray(x)"
    numpy = isinstance(x, np.ndarray) or (isinstance(x, np.generic) and kind is x.dtype.type)
    if not numpy and not isinstance(x, (jax.Array, Padded)):
        for base in (*PYTHON, str):
            if isinstance(x, base):
                return f"{kind.__name__} would come back as {base.__name__}: save {base.__name__}(x)"
        return f"{kind.__name__} is not an array of JAX or NumPy, number or string"
    if not is_key(x) and not _storable(x.dtype):
        return f"the format on disk has no arrays of {x.dtype}: save it as another dtype, or as its bits (x.view)"
    shape = np.shape(x)
    if len(shape) + is_key(x) > _DIMENSIONS and 0 not in shape:
        return f"the format on disk has no arrays of {len(shape)} dimensions: save x.reshape(-1)"
    return ""


@functools.cache
def _storable(dtype: np.dtype) -> bool:
    """Whether the format has a dtype. The library that writes it is asked: newer ones have more."""
    import tensorstore as ts

    try:
        array = ts.open({"driver": "zarr3", "kvstore": "memory://"}, dtype=dtype.name, shape=[1], create=True).result()
    except (ValueError, TypeError):
        return False
    return array.dtype.numpy_dtype == dtype.newbyteorder("=")


def on_host(x: Any) -> np.ndarray:
    """A number or an array as it is on disk: of native byte order, and a bool of no other bits than 0 and 1."""
    value = np.asarray(x)
    value = value.astype(value.dtype.newbyteorder("="), copy=False)
    return value.view(np.uint8) != 0 if value.dtype == bool else value  # memory of other uses, taken for bools


def dtype_of(x: Any) -> str:
    """The name of an array's dtype, whatever the order of its bytes in memory."""
    return str(x.dtype) if is_key(x) else np.dtype(x.dtype).name


def kind(x: Any) -> str:
    """What of a leaf has to be the same on every rank."""
    if type(x) in PYTHON or type(x) in TEXT:
        return type(x).__name__
    return f"{dtype_of(x)}{list(np.shape(x))}"


def is_key(x: Any) -> bool:
    """Whether it is an array of PRNG keys of JAX's new type."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
