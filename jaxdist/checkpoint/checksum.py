"""A digest of arrays that adds up over slices: any number of ranks can write or check an array.

Each element is one or more words of at most 32 bits. Each word is multiplied by an odd 64-bit number for its position,
the product of one factor per axis, and all are added modulo 2^64 (multilinear hashing: Lemire, Kaser, arXiv 1202.4961).
Any flipped bit changes the sum; other damage is missed with a probability of about 2^-32.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.manifest import kind_of, on_host, stored_form
from jaxdist.placements.model.layouts import Bounds, bounds, physical
from jaxdist.runtime.context import get_context

Checksums = dict[Bounds, int]
_BLOCK = 1 << 14  # positions per table of factors; each block has one more factor
_AT_ONCE = 1 << 17  # words widened to 64 bits together, to stay in the cache


def digest(tree: Any) -> int:
    """Return a number that depends only on the bits of a state, not on processes or layout. Every process calls it.

    Args:
      tree: arrays, numbers and strings: the state, or any result of a decorated step.

    Returns:
      52 bits of a SHA-256 over the leaves' names, types and digests, on every process.

    Raises:
      ControlError: a rank is in a different call, has left, or did not come within the timeout of `init`.

    Example:
      >>> import numpy as np
      >>> from jaxdist.checkpoint import digest
      >>> w = {"w": np.arange(3.0)}
      >>> digest(w) == digest(w), digest(w) == digest({"w": np.arange(1.0, 4.0)})
      (True, False)
    """
    ctx = get_context()
    names, sums = list[str](), list[Checksums]()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = stored_form(x if hasattr(x, "dtype") else np.asarray(x))  # a text: characters of 32 bits
        names.append(f"{jax.tree_util.keystr(path)}: {kind_of(x)}")
        sums.append(checksums(physical(x), x.shape))
    totals = [total(of) for of in zip(*ctx.control.exchange("digest", sums, ctx.timeout), strict=True)]
    return int(hashlib.sha256(repr((names, totals)).encode()).hexdigest()[:13], 16)


def total(everyone: Iterable[Checksums]) -> int:
    """Return the digest of an array, of whose slices several ranks may have the same."""
    return sum(value for _, value in {one for own in everyone for one in own.items()}) % (1 << 64)


def checksums(array: Any, shape: Sequence[int]) -> Checksums:
    """Return the checksum of each slice that this process has of an array; there may be padding beyond `shape`."""
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        whole = on_host(array)
        return {tuple((0, n) for n in whole.shape): checksum(whole, (0,) * whole.ndim)}
    found: Checksums = {}
    for shard in array.addressable_shards:
        at = bounds(shard.index, shape)
        if at not in found:
            found[at] = checksum(np.asarray(shard.data)[tuple(slice(b - a) for a, b in at)], [a for a, _ in at])
    return found


def checksum(part: np.ndarray, start: Sequence[int]) -> int:
    """Return the part in an array's digest of the slice that begins at `start`."""
    if part.size == 0:
        return 0
    part, start = part.reshape(part.shape or (1,)), tuple(start) or (0,)
    width, of_rows, found = max(part.dtype.itemsize // 4, 1), np.ones(1, np.uint64), 0
    words = np.ascontiguousarray(part).view(f"u{min(part.dtype.itemsize, 4)}").reshape(-1, part.shape[-1] * width)
    for d, n in enumerate(part.shape[:-1]):
        places = np.arange(start[d], start[d] + n, dtype=np.uint64)
        of_rows = np.multiply.outer(of_rows, _odd(places, d + 2)).reshape(-1)
    first = start[-1] * width
    last = first + words.shape[1]
    for block in range(first // _BLOCK, -(-last // _BLOCK)):
        a, b = max(first, block * _BLOCK), min(last, (block + 1) * _BLOCK)
        factors = _TABLE[a - block * _BLOCK : b - block * _BLOCK]
        of_block = int(_odd(np.array([block], np.uint64), 1)[0])
        step = max(1, _AT_ONCE // (b - a))
        for i in range(0, len(words), step):
            wide = words[i : i + step, a - first : b - first].astype(np.uint64)
            found += of_block * int(np.dot(wide @ factors, of_rows[i : i + step]))
    return found % (1 << 64)


def _odd(places: np.ndarray, role: int) -> np.ndarray:
    """Return a pseudo-random odd number per place, by SplitMix64; NumPy's generators may change."""
    x = (places + np.uint64((role << 44) + 1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


_TABLE = _odd(np.arange(_BLOCK, dtype=np.uint64), 0)
