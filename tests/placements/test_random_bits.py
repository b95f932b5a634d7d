"""Random numbers of a step are those of `jax.random` on one device, bit for bit, each device making its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import parity
from jax import random

from jaxdist.placements.random_bits import _places, _product
from jaxdist.placements.values import Split

KEY = random.key(7)
WAYS = [(2, 8), (3, 7), (4, 8), (8, 13), (8, 16)]
"""Devices, examples."""


DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "bits": lambda k, x: [random.bits(k, (len(x), 5), f"uint{width}") for width in (8, 16, 32, 64)],
    "bits, the batch elsewhere": lambda k, x: [
        random.bits(k, (3, len(x), 5), f"uint{width}").sum(0) + x[:, :1].astype(f"uint{width}")
        for width in (8, 16, 32, 64)
    ],
    "bits, time-major": lambda k, x: random.bits(k, (5, len(x))).T + x[:, :5].astype("uint32"),
    "a vector": lambda k, x: random.bits(k, (len(x),)) + x[:, 0].astype("uint32"),
    "uniform": lambda k, x: [random.uniform(k, x.shape, d) * x.astype(d) for d in ("float16", "float32", "float64")],
    "normal": lambda k, x: x + random.normal(k, x.shape),
    "bernoulli": lambda k, x: jnp.where(random.bernoulli(k, 0.3, x.shape), x, 0),
    "a mask for all of one": lambda k, x: x * random.bernoulli(k, 0.5, (len(x), 1)),
    "one for all": lambda k, x: x * random.bernoulli(k, 0.5, (1, x.shape[1])) + random.normal(k, ()),
    "integers": lambda k, x: random.randint(k, (len(x), 3), -5, 1000),
    "permutation": lambda k, x: [random.permutation(k, len(x)), random.permutation(k, x), random.permutation(k, x, 1)],
    "independent permutations": lambda k, x: random.permutation(k, x, axis=1, independent=True),
    "categorical": lambda k, x: [random.categorical(k, x), random.categorical(k, x, axis=0)],
    "choice": lambda k, x: [
        random.choice(k, x, (3,)),
        random.choice(k, 9, (len(x),)),
        random.choice(k, x, (4,), False),
    ],
    "gumbel and others": lambda k, x: [
        f(k, shape=x.shape) * x
        for f in (random.gumbel, random.laplace, random.exponential, random.rademacher, random.cauchy)
    ],
    "gamma": lambda k, x: random.gamma(k, 0.5 + x**2),
    "gamma for all": lambda k, x: random.gamma(k, 2.5, (len(x), 2)) * x[:, :2],
    "truncated": lambda k, x: random.truncated_normal(k, -1, 1, x.shape) * x,
    "a key an example": lambda k, x: jax.vmap(random.normal)(random.split(k, len(x))) * x[:, 0],
    "a key an example, folded": lambda k, x: jax.vmap(
        lambda i, row: random.uniform(random.fold_in(k, i), row.shape) * row
    )(jnp.arange(len(x)), x),
    "keys of two dimensions": lambda k, x: jax.vmap(jax.vmap(random.bits))(random.split(k, (len(x), 3))),
    "keys come back": lambda k, x: [random.split(k, len(x)), random.key_data(random.split(k, len(x))), random.split(k)],
    "raw keys": lambda k, x: random.uniform(random.PRNGKey(x[0, 0].astype(int)), x.shape) * x,
    "keys of the batch": lambda k, x: jax.vmap(lambda s: random.normal(random.key(s), (2,)))(x[:, 0].astype(jnp.int32)),
    "gamma for each": lambda k, x: jax.vmap(lambda s, row: random.gamma(s, jnp.abs(row) + 0.3))(
        random.split(k, len(x)), x
    ),
    "several": lambda k, x: (lambda a, b: random.normal(a, x.shape) - random.normal(b, x.shape))(*random.split(k)),
    "in sums": lambda k, x: [random.normal(k, x.shape).sum(0), (random.uniform(k, x.shape) * x).mean(0)],
    "in a loop": lambda k, x: jax.lax.scan(
        lambda k, _: (random.split(k)[0], (random.uniform(k, x.shape) * x).sum(0)), k, None, length=3
    ),
    "dirichlet": lambda k, x: random.dirichlet(k, jnp.ones(3), (len(x),)),
    "orthogonal": lambda k, x: x @ random.orthogonal(k, x.shape[1]),
}


EXACT = {name for name in DRAWS if "bits" in name} | {"integers", "keys come back", "a vector"}
TOGETHER = 5
"""Draws of one program: most of the time goes into compiling."""


@pytest.mark.parametrize("k", range(0, len(DRAWS), TOGETHER))
def test_bit_for_bit(k: int) -> None:
    """What is computed with them may round in another order, in the last place."""
    some = dict(list(DRAWS.items())[k : k + TOGETHER])
    for devices, rows in [WAYS[(k // TOGETHER + i) % len(WAYS)] for i in ((0, 2) if k == 0 else (0,))]:
        x = np.random.default_rng(rows).normal(size=(rows, 6)) * 3
        draw = lambda k, x: {name: f(k, x) for name, f in some.items()}
        got, want = parity.decorated(draw, devices)(KEY, x), jax.jit(draw)(KEY, x)
        parity.compare(got, want, tolerance=1e-12)
        for name in EXACT & some.keys():
            parity.compare(got[name], want[name], tolerance=0)


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_bits_of_odd_sizes(width: int) -> None:
    """The batch in whichever dimension, which the devices do not divide."""
    shapes, dtype = [(13,), (1, 13), (13, 1), (7, 13, 3), (13, 129), (2, 3, 13, 5)], f"uint{width}"

    def f(key: Any, x: Any) -> Any:
        along = lambda shape: x.reshape([-1 if n == 13 else 1 for n in shape])
        return [random.bits(key, shape, dtype) | along(shape) for shape in shapes]

    for got, shape in zip(parity.decorated(f, 8)(KEY, np.zeros(13, dtype)), shapes, strict=True):
        np.testing.assert_array_equal(got, random.bits(KEY, shape, dtype))


def test_each_device_makes_its_own_part() -> None:
    def f(key: Any, x: Any) -> Any:
        return x * random.bernoulli(key, 0.5, x.shape)

    x = np.ones((64, 1024))
    program = parity.program(f, KEY, x)
    assert parity.collectives(program) == []
    assert max(v.aval.size for eqn in program.eqns for v in eqn.outvars) <= 2 * x.size // 8


@pytest.mark.parametrize("stride", [1, 7, 3 << 12, (1 << 20) * (3 << 12), (1 << 33) + 5])
def test_places_beyond_32_bits(stride: int) -> None:
    index = [0, 1, 4, 65535, 65536, 2**31, 2**32 - 1]
    high, low = _product(jnp.asarray(index, jnp.uint32), stride)
    words = zip(np.asarray(high).tolist(), np.asarray(low).tolist(), strict=True)
    assert [a << 32 | b for a, b in words] == [i * stride % 2**64 for i in index]


def test_places_carry_into_the_high_word() -> None:
    high, low = _places((1 << 30, 7), Split(0, 1 << 30, 1), jnp.asarray([(2**32 - 4) // 7]))  # a slice of one row
    assert (np.asarray(high).astype(int) << 32 | np.asarray(low)).tolist() == [[2**32 - 4 + i for i in range(7)]]


def test_other_generators_are_made_whole() -> None:
    x = np.ones((16, 3))
    of_one = lambda k, x: [random.normal(k, x.shape) * x, random.uniform(random.split(k)[0], (3,)), random.split(k)[1]]
    keys = [random.key(3, impl=name) for name in ("rbg", "unsafe_rbg")]
    parity.check(lambda keys, x: [of_one(k, x) for k in keys], keys, x, devices=8)


def test_the_generator_is_part_of_what_is_compiled() -> None:
    step = parity.decorated(lambda k, x: random.normal(k, x.shape) * x, 8)
    x = np.ones((13, 3))
    first = np.asarray(step(KEY, x))
    with jax.threefry_partitionable(False):
        other = np.asarray(step(KEY, x))
        np.testing.assert_allclose(other, random.normal(KEY, x.shape), rtol=1e-12)
    assert (first != other).any()
    np.testing.assert_array_equal(step(KEY, x), first)
