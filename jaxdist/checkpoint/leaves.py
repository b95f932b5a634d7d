"""The state as named leaves: what orbax is given, and what a checkpoint is compared by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PYTHON = (bool, int, float, complex)


def named(state: Any) -> tuple[list[tuple[str, ...]], list[Any]]:
    """The leaves, each with the keys that lead to it."""
    found, _ = jax.tree_util.tree_flatten_with_path(state)
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


def kind(x: Any) -> Any:
    """What of a leaf has to be the same on every rank, and in a checkpoint that is read into it."""
    if isinstance(x, str):
        return "str"
    if type(x) in PYTHON:
        return type(x).__name__
    return tuple(np.shape(x)), str(x.dtype)


def is_key(x: Any) -> bool:
    """Whether it is an array of PRNG keys of JAX's new type."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
