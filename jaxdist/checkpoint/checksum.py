"""A checksum of an array that adds up over its parts, however it is cut: what N ranks write, M ranks can check.

The bytes along the last axis are taken as words of 32 bits; each is multiplied by an odd 64-bit number that belongs to
its place, a product of one for each axis, and all are added up modulo 2^64. To flip any one bit changes the sum, since
an odd number times a power of two below 2^32 is never 0. Other damage passes with a chance of about 2^-32 at most.

Reference: Lemire, Kaser, *Strongly universal string hashing is fast*, arXiv 1202.4961 (multilinear hashing).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

_BLOCK = 1 << 14  # places along an axis that have factors of their own; the next block's are those times one more
_AT_ONCE = 1 << 17  # words that are widened to 64 bits together: they stay in the cache
_SHORT = 32  # words of a row
_WORD = 4  # bytes
MODULUS = 1 << 64


def checksum(part: np.ndarray, start: Sequence[int]) -> int:
    """The share that one slice of an array has in the array's checksum.

    The shares of slices that make up the whole without overlap add up, modulo 2^64, to the checksum of the whole.
    """
    if part.size == 0:
        return 0
    flat = np.ascontiguousarray(part).reshape(part.shape or (1,))
    begin = tuple(start) or (0,)
    size, length = flat.dtype.itemsize, flat.shape[-1]
    if size * length % _WORD == 0 and size * begin[-1] % _WORD == 0:
        per_word = 1
        rows = flat.reshape(-1, length).view(np.uint32)
        first = size * begin[-1] // _WORD
    else:  # a few items a word, and the part begins or ends within one
        per_word = _WORD // size
        rows = flat.reshape(-1, length).view(f"u{size}")
        first = begin[-1]
    axis = flat.ndim - 1
    of_rows = np.ones(1, np.uint64)
    for d in range(axis):
        of_rows = np.multiply.outer(of_rows, _along(d, begin[d], begin[d] + flat.shape[d])).reshape(-1)
    total, turn, last = 0, _BLOCK * per_word, first + rows.shape[1]
    for lo in range(first - first % turn, last, turn):
        a, b = max(lo, first), min(lo + turn, last)
        factors = _within(axis, a - lo, b - lo, per_word) * _of_block(axis, lo // turn)
        total += _sum(rows[:, a - first : b - first], of_rows, factors)
    return total % MODULUS


def share_of(x: jax.Array) -> int:
    """The share that this process's shards have in an array's checksum; each slice counts on one device of all."""
    own = (s for s in x.addressable_shards if s.replica_id == 0)
    return sum(checksum(np.asarray(s.data), [at.start or 0 for at in s.index]) for s in own) % MODULUS


def _sum(rows: np.ndarray, of_rows: np.ndarray, factors: np.ndarray) -> int:
    """The sum of all words, each times the factors of its row and of its place in it."""
    width = rows.shape[1]
    step = max(1, _AT_ONCE // width)
    total = 0
    for i in range(0, len(rows), step):
        words, own = rows[i : i + step].astype(np.uint64), of_rows[i : i + step]
        if width < _SHORT:  # a loop for each row would take longer than one over all words
            total += int(np.dot(words.reshape(-1), np.multiply.outer(own, factors).reshape(-1)))
        else:
            total += int(np.dot(words @ factors, own))
    return total


def _within(axis: int, a: int, b: int, per_word: int) -> np.ndarray:
    """The factors of the words, or of the items of which `per_word` make a word, within a block."""
    if per_word == 1:
        return _table(axis)[a:b]
    i = np.arange(a, b)
    return _table(axis)[i // per_word] << (i % per_word * (8 * _WORD // per_word)).astype(np.uint64)


def _along(axis: int, a: int, b: int) -> np.ndarray:
    """The factors of the places a to b along an axis other than the last."""
    parts = []
    for block in range(a // _BLOCK, -(-b // _BLOCK)):
        lo = block * _BLOCK
        parts.append(_table(axis)[max(a - lo, 0) : b - lo] * _of_block(axis, block))
    return np.concatenate(parts)


@functools.cache
def _table(axis: int) -> np.ndarray:
    return _odd(np.arange(1, _BLOCK + 1, dtype=np.uint64) + np.uint64((axis + 1) << 32))


@functools.lru_cache(maxsize=1 << 16)
def _of_block(axis: int, block: int) -> np.uint64:
    return _odd(np.array([((axis + 1) << 44) + block], np.uint64))[0]


def _odd(x: np.ndarray) -> np.ndarray:
    """Pseudo-random odd numbers: the mixing function of SplitMix64, which is the same for ever (NumPy's may change)."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)
