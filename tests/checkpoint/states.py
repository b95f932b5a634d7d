"""What the tests compare: the leaves of a state, bit for bit, and the steps in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def bits(x: Any) -> Any:
    """Of a leaf: its type, shape and value."""
    if not hasattr(x, "dtype"):
        return type(x), repr(x)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), np.asarray(jax.random.key_data(x)).tobytes()
    kind = np.ndarray if isinstance(x, np.memmap) else type(x)
    return kind, x.dtype, x.shape, getattr(x, "weak_type", None), np.asarray(x).tobytes()


def same(a: Any, b: Any) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.map(bits, a) == jax.tree.map(bits, b)


def there(path: Path) -> list[str]:
    """The names in a directory of checkpoints, without the lock that this process holds."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) if path.exists() else []
