"""Numbers of a finite field in the place of floats: sums, products and quotients are exact, in any order.

A real number becomes an integer modulo the prime P = 2**31 - 1, from 0 to P - 1, in a uint32; the upper half stands for
negative numbers. The order of numbers is that of their multiples by a random number, and the reverse one at the next
point: what a comparison leaves out at one, as of two constants, is taken at the other. Infinities stay the ends. What
is not a polynomial (exp, tanh, a factorization) becomes a hash of its operands: the same for the same operands, and
nothing else. A complex number is a pair; since -1 has no square root modulo P, pairs are a field, too.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

P = 2**31 - 1
H = P // 2
NAN = 12345678
INFINITY = 0x3C6EF372  # no number that programs name often: H is -1 / 2
_BITS = np.array([(P - 2) >> k & 1 for k in range(31)])


class Pair(NamedTuple):
    """A complex number."""

    real: Any
    imag: Any


Number = Any  # a uint32 array of numbers of the field, or a `Pair` of two


def wide(x: Any) -> Any:
    return jnp.asarray(x).astype(jnp.int64)


def fold(x: Any) -> Any:
    """Return integers between -2**62 and 2**62 as numbers of the field."""
    x = (x & P) + (x >> 31)  # 2**31 is 1 modulo P
    return _least((x + jnp.where(x < 0, P, 0)).astype(jnp.uint32))


def _least(x: Any) -> Any:
    """Return numbers from 0 to 2P - 1 modulo P: a negative difference would be a large number."""
    return jnp.minimum(x, x - jnp.uint32(P))


def signed(x: Any) -> Any:
    """Return numbers as integers from -H to H."""
    return jnp.where(x > H, x - jnp.uint32(P), x).astype(jnp.int32)


def mul(x: Number, y: Number) -> Number:
    if isinstance(x, Pair) or isinstance(y, Pair):
        return _of_pairs(mul, x, y)
    x = jnp.asarray(x).astype(jnp.uint64) * jnp.asarray(y).astype(jnp.uint64)
    return _least(((x & P) + (x >> 31)).astype(jnp.uint32))


def add(x: Number, y: Number) -> Number:
    return Pair(*map(add, x, y)) if isinstance(x, Pair) else _least(x + y)


def neg(x: Number) -> Number:
    return Pair(*map(neg, x)) if isinstance(x, Pair) else jnp.minimum(-x, jnp.uint32(P) - x)


def _of_pairs(multiply: Callable[[Any, Any], Any], x: Number, y: Number) -> Pair:
    """Multiply numbers, at least one of them complex, given a product of real numbers."""
    (a, b), (c, d) = (z if isinstance(z, Pair) else Pair(z, None) for z in (x, y))
    if b is None or d is None:
        return Pair(multiply(a, c), multiply(a, d) if b is None else multiply(b, c))
    return Pair(add(multiply(a, c), neg(multiply(b, d))), add(multiply(a, d), multiply(b, c)))


def power(x: Number, n: int) -> Number:
    if n < 0:
        x, n = inverse(x), -n
    out = None
    while n:
        if n & 1:
            out = x if out is None else mul(out, x)
        x, n = mul(x, x), n >> 1
    return one_like(x) if out is None else out


def one_like(x: Number) -> Number:
    return Pair(jnp.ones_like(x.real), jnp.zeros_like(x.real)) if isinstance(x, Pair) else jnp.ones_like(x)


def inverse(x: Number) -> Number:
    """Return x ** (P - 2), which is 1 / x by Fermat's little theorem; of zero, zero."""
    if isinstance(x, Pair):
        norm = inverse(add(mul(x.real, x.real), mul(x.imag, x.imag)))
        return Pair(mul(x.real, norm), mul(neg(x.imag), norm))

    def turn(k: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
        out, base = state
        return jnp.where(jnp.asarray(_BITS)[k] == 1, mul(out, base), out), mul(base, base)

    return lax.fori_loop(0, 31, turn, (jnp.ones_like(x), x))[0]


def product(f: Callable[[Any, Any], Any], x: Number, y: Number) -> Number:
    """Return f(x, y) for a sum of products `f` of at most 2**21 terms each, which is computed in float64.

    Each number is split into 16 bits twice, and the four products of the halves take three (Karatsuba).
    """
    if isinstance(x, Pair) or isinstance(y, Pair):
        return _of_pairs(functools.partial(product, f), x, y)
    (a, b), (c, d) = map(_halves, (x, y))
    exact = lambda x, y: f(x.astype(jnp.float64), y.astype(jnp.float64)).astype(jnp.int64)
    high, low = exact(a, c), exact(b, d)
    middle = exact(a + b, c + d) - high - low
    return fold(wide(fold(wide(fold(high)) * 65536 + middle)) * 65536 + low)


def _halves(x: Any) -> tuple[Any, Any]:
    high = (wide(signed(x)) + 32768) >> 16
    return high, wide(signed(x)) - (high << 16)


# --- hashes


def mix(h: Any, x: Any) -> Any:
    """Hash `h` and `x`, entry by entry (splitmix64)."""
    z = h * jnp.uint64(0x9E3779B97F4A7C15) + wide(x).astype(jnp.uint64) + jnp.uint64(0x7F4A7C15)
    z = (z ^ (z >> 30)) * jnp.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * jnp.uint64(0x94D049BB133111EB)
    return z ^ (z >> 31)


def start(name: str) -> Any:
    return jnp.uint64(zlib.crc32(name.encode()))


def number(h: Any) -> Any:
    return fold((h >> 2).astype(jnp.int64))


def hashed(name: str, *xs: Number) -> Any:
    """Return a number that depends on all of `xs`, entry by entry."""
    parts = [part for x in xs for part in (x if isinstance(x, Pair) else (x,))]
    return number(functools.reduce(mix, jnp.broadcast_arrays(*map(jnp.asarray, parts)), start(name)))


def positions(name: str, shape: Sequence[int]) -> Any:
    """Return a number for each place of an array."""
    return hashed(name, jnp.arange(int(np.prod(shape)))).reshape(shape)


def digest(x: Number, dims: int) -> Any:
    """Return a number that depends on all of the last dimensions."""
    if isinstance(x, Pair):
        return hashed("pair", digest(x.real, dims), digest(x.imag, dims))
    shape = x.shape[x.ndim - dims :]
    weighed = wide(mul(x, jnp.broadcast_to(positions("digest", shape), x.shape)))
    return fold(jnp.sum(weighed, axis=tuple(range(x.ndim - dims, x.ndim))))


# --- numbers that a program says


def embedded(value: Any) -> Any:
    """Return a constant of a program, whose floats are fractions with a power of two below."""
    value = np.asarray(value)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return Pair(embedded(value.real), embedded(value.imag))
    value = value.astype(np.float64)
    mantissa, exponent = np.frexp(np.where(np.isfinite(value), value, 0))
    shift = (exponent.astype(np.int64) - 53) % 31
    high, low = np.divmod((mantissa * 2.0**53).astype(np.int64), 1 << 31)
    out = ((high + low) % P * (1 << shift)) % P
    special = np.where(np.isposinf(value), INFINITY, np.where(np.isneginf(value), P - INFINITY, NAN))
    return np.where(np.isfinite(value), out, special).astype(np.uint32)


def is_finite(x: Any) -> Any:
    """Check which numbers a program has not named as infinite or NaN."""
    return (x != INFINITY) & (x != P - INFINITY) & (x != NAN)


def ordered(order: Any, x: Any) -> Any:
    """Return integers in whose order numbers are, given a factor."""
    return jnp.where(x == INFINITY, H, jnp.where(x == P - INFINITY, -H, signed(mul(x, order))))


def unordered(inverse: Any, key: Any) -> Any:
    """Return numbers, given their integers and the inverse of the factor."""
    number = mul(fold(wide(key)), inverse)
    return jnp.where(key == H, jnp.uint32(INFINITY), jnp.where(key == -H, jnp.uint32(P - INFINITY), number))


def drawn_order(rng: np.random.Generator, reverse: bool) -> np.ndarray:
    """Draw a factor for `ordered`, or the negative one, and return it with its inverse."""
    factor = int(rng.integers(1, H))
    factor = P - factor if reverse else factor
    return np.array([factor, pow(factor, -1, P)])


def drawn(rng: np.random.Generator, shape: Sequence[int], is_complex: bool) -> Any:
    """Draw a random point."""
    part = lambda: rng.integers(0, P, shape, dtype=np.uint32)
    return Pair(part(), part()) if is_complex else part()
