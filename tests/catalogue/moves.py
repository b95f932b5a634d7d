"""Operations that only move data, and numbers whose bits an addition would change."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPES = ["float32", "complex64", "bfloat16", "float64", "float16", "float8_e4m3fn", "complex128", "int8", "bool"]
PARTS = {"complex64": "float32", "complex128": "float64"}


def fragile(dtype: str, rows: int, columns: int = 4) -> np.ndarray:
    """Negative zeros, subnormals (such as small integers in the place of floats), NaN with a payload, of both signs."""
    part = jnp.dtype(PARTS.get(dtype, dtype))
    i = np.arange(rows * columns * (2 if dtype in PARTS else 1))
    if not jnp.issubdtype(part, jnp.floating):
        return (i * 77 % 251).astype(part).reshape(rows, columns)
    word = np.dtype(f"uint{8 * part.itemsize}")
    sign, nan, one = 1 << 8 * part.itemsize - 1, *(int(np.asarray(x, part).view(word)) for x in (np.nan, 1))
    patterns = [sign, 7, sign | 1, nan | 1, sign | nan, 0, 1, one]
    if part == jnp.bfloat16:  # of which XLA for CPUs moves many in 32 bits, without these
        patterns = [sign, one, sign | one, nan, sign | nan, 0, sign, one]
    return np.array(patterns, word)[(i + i // 8) % 8].view(part).view(dtype).reshape(rows, columns)


def changed(got: Any, want: Any) -> list[str]:
    """The paths of leaves that differ in any bit."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    found = []
    for (path, x), y in pairs:
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        if x.tobytes() != y.tobytes():
            found.append(jax.tree_util.keystr(path))
    return found


def _few(x: Any) -> Any:
    return jnp.array([1, 3]) % x.shape[0]


def _sum_beside(x: Any) -> Any:
    return jnp.concatenate([x[:2], jnp.zeros_like(x[:1]), jnp.sum(jnp.zeros_like(x), 0, keepdims=True, dtype=x.dtype)])


MOVES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda x: x,
    "rows": lambda x: x[_few(x)],
    "a row": lambda x: x[3],
    "a row chosen": lambda x: lax.dynamic_index_in_dim(x, _few(x)[0], keepdims=False),
    "take": lambda x: [jnp.take(x, _few(x), axis=0, mode=mode) for mode in ("clip", "fill", "wrap")],
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.array([[2, 0, 1, 3]]) % x.shape[0], 0),
    "columns": lambda x: x[:, jnp.array([2, 0])],
    "all rows": lambda x: x[jnp.arange(x.shape[0])[::-1]],
    "dynamic_slice": lambda x: lax.dynamic_slice_in_dim(x, _few(x)[0], 3),
    "slice": lambda x: [x[1:4], x[::2], x[-1]],
    "roll": lambda x: [jnp.roll(x, 1, 0), x[::-1]],
    "join": lambda x: [jnp.concatenate([x, x[:1]]), jnp.stack([x[:2], x[2:4]]), jnp.tile(x, (2, 1))],
    "pad": lambda x: jnp.pad(x, ((1, 1), (0, 0))),
    "turn": lambda x: [x.T, x.reshape(-1), jnp.moveaxis(x[None], 1, 0)],
    "repeat": lambda x: [jnp.repeat(x, 2, 0), jnp.broadcast_to(x[0], (3, x.shape[1]))],
    "set": lambda x: [x.at[_few(x)].set(x[4]), x.at[1].set(x[2]), x.at[:, 1].set(x[:, 0])],
    "update": lambda x: lax.dynamic_update_slice_in_dim(x, x[:2], _few(x)[0], 0),
    "where": lambda x: [jnp.where(jnp.arange(x.shape[1]) % 2 == 0, x, x[0]), jnp.where(x.shape[0] > 2, x, x[1])],
    "in a loop": lambda x: lax.scan(lambda c, k: (x[k], c), x[0], _few(x)),
    "each row": lambda x: lax.map(lambda row: row[::-1], x),
    "a sum beside": _sum_beside,
    "a sum put in": lambda x: x[:2].at[0, 0].set(jnp.sum(jnp.zeros_like(x), dtype=x.dtype)),
    "a sum chosen": lambda x: jnp.where(jnp.arange(4) > 1, jnp.sum(jnp.zeros_like(x), 0, dtype=x.dtype), x[2]),
}
SENT = ["as it is", "rows", "take", "take_along_axis", "all rows", "roll", "turn", "set", "in a loop"]
"""Some that use each collective."""


def every(names: Iterable[str]) -> Callable[[Any, Any], Any]:
    """A step that moves state and batch in each way."""
    return lambda w, b: {name: [MOVES[name](w), MOVES[name](b)] for name in names}
