"""States, bit for bit, and the steps in a folder of checkpoints."""

import contextlib
import resource
from collections.abc import Iterator
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
    """Whether two states are alike: in structure, types, dtypes, weak types and bits."""
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.map(bits, a) == jax.tree.map(bits, b)


def there(path: Path) -> list[str]:
    """The names in a folder of checkpoints, without the lock that a process holds."""
    return sorted(p.name for p in path.iterdir() if not p.name.startswith(".")) if path.exists() else []


def data_file(step: Path) -> Path:
    """The largest file of a checkpoint, which holds its largest array."""
    return max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(file: Path, at: float = 0.5) -> None:
    """Flip one bit, so far into a file."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * at)] ^= 1
    file.write_bytes(content)


@contextlib.contextmanager
def small_files(small: bool = True) -> Iterator[None]:
    """Within it a file can't be longer, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18 if small else before[0], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
