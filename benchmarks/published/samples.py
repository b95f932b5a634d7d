"""Small data, and states in float64, for the published steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BATCH = 8
STEPS = 3


def random() -> np.random.Generator:
    """Return a generator of the same numbers for each entry."""
    return np.random.default_rng(0)


def float64(tree: Any) -> Any:
    """Convert the floating arrays of a tree to float64."""
    return jax.tree.map(_wide, tree)


def _wide(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(getattr(x, "dtype", np.int32), jnp.floating) else x


def float64_module(model: Any) -> Any:
    """Convert an nnx module to float64 in place."""
    nnx.update(model, float64(nnx.state(model)))
    for _, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Embed):
            module.dtype = jnp.float64  # its default is what its parameters were made in
    return model


def in_shards(state: Any, zero: Any) -> Any:
    """Shard a `TrainState` whose transformation was made by its own code."""
    tx = zero(state.tx)
    return state.replace(tx=tx, opt_state=tx.init(state.params))


def images(shape: tuple[int, ...], classes: int, scale: float = 1.0) -> list[dict[str, np.ndarray]]:
    """Return batches of images and labels."""
    r = random()
    return [
        {"image": r.random((BATCH, *shape)) * scale, "label": r.integers(0, classes, (BATCH,))} for _ in range(STEPS)
    ]


def pairs(shape: tuple[int, ...], classes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the same batches as tuples."""
    return [(batch["image"], batch["label"]) for batch in images(shape, classes)]


def texts(words: int, length: int, keys: tuple[str, ...] = ("inputs",), packed: bool = False) -> list[dict[str, Any]]:
    """Return batches of rows with unequal padding, so that rows have different weights."""
    r, out = random(), []
    for _ in range(STEPS):
        batch = {}
        for key in keys:
            tokens = r.integers(1, words, (BATCH, length)).astype(np.int32)
            tokens[np.arange(length)[None] >= r.integers(length // 2, length + 1, (BATCH, 1))] = 0
            batch[key] = tokens
            if packed:
                at = np.arange(length, dtype=np.int32)
                batch[f"{key}_position"] = np.tile(at % (length // 2), (BATCH, 1)) * (tokens > 0)
                batch[f"{key}_segmentation"] = np.tile(1 + at // (length // 2), (BATCH, 1)) * (tokens > 0)
        out.append(batch)
    return out


def regression(features: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of a linear function with noise."""
    r = random()
    w = r.standard_normal(features)
    xs = [r.standard_normal((BATCH, features)) for _ in range(STEPS)]
    return [(x, x @ w + 0.1 * r.standard_normal(BATCH)) for x in xs]


def curve() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return batches of a noisy parabola, as in flax's toy examples."""
    r = random()
    xs = [r.random((BATCH, 1)) for _ in range(STEPS)]
    return [(x, 0.8 * x**2 + 0.1 + 0.1 * r.standard_normal((BATCH, 1))) for x in xs]
