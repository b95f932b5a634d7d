"""Random numbers in a step, by name: ``f(key, x)`` with a key and a batch of rows of 6."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

KEY = random.key(7)

DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "bits": lambda k, x: [random.bits(k, (len(x), 5), f"uint{width}") for width in (8, 16, 32, 64)],
    "bits, the batch elsewhere": lambda k, x: [
        random.bits(k, (3, len(x), 5), f"uint{width}").sum(0) + x[:, :1].astype(f"uint{width}")
        for width in (8, 16, 32, 64)
    ],
    "bits, time-major": lambda k, x: random.bits(k, (5, len(x))).T + x[:, :5].astype("uint32"),
    "uniform": lambda k, x: [random.uniform(k, x.shape, d) * x.astype(d) for d in ("float16", "float32", "float64")],
    "bernoulli": lambda k, x: jnp.where(random.bernoulli(k, 0.3, x.shape), x, 0),
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
    "truncated": lambda k, x: random.truncated_normal(k, -1, 1, x.shape) * x,
    "a key an example": lambda k, x: jax.vmap(random.normal)(random.split(k, len(x))) * x[:, 0],
    "a key an example, folded": lambda k, x: jax.vmap(
        lambda i, row: random.uniform(random.fold_in(k, i), row.shape) * row
    )(jnp.arange(len(x)), x),
    "keys of two dimensions": lambda k, x: jax.vmap(jax.vmap(random.bits))(random.split(k, (len(x), 3))),
    "keys come back": lambda k, x: [random.split(k, len(x)), random.key_data(random.split(k, len(x))), random.split(k)],
    "keys of neighbors": lambda k, x: [
        jax.vmap(lambda key: random.normal(key, (2,)))(jnp.concatenate([keys[-1:], keys[1:], keys[:1]]))
        for keys in [jax.vmap(random.key)(x[:, 0].astype(jnp.int32))]
    ],
    "raw keys": lambda k, x: random.uniform(random.PRNGKey(x[0, 0].astype(int)), x.shape) * x,
    "keys of the batch": lambda k, x: jax.vmap(lambda s: random.normal(random.key(s), (2,)))(x[:, 0].astype(jnp.int32)),
    "gamma for each": lambda k, x: jax.vmap(lambda s, row: random.gamma(s, jnp.abs(row) + 0.3))(
        random.split(k, len(x)), x
    ),
    "in sums": lambda k, x: [random.normal(k, x.shape).sum(0), (random.uniform(k, x.shape) * x).mean(0)],
    "in a loop": lambda k, x: jax.lax.scan(
        lambda k, _: (random.split(k)[0], (random.uniform(k, x.shape) * x).sum(0)), k, None, length=3
    ),
    "dirichlet": lambda k, x: random.dirichlet(k, jnp.ones(3), (len(x),)),
    "orthogonal": lambda k, x: x @ random.orthogonal(k, x.shape[1]),
}

EXACT = {name for name in DRAWS if "bits" in name} | {"integers", "keys come back"}

KEYED = ["bits", "uniform", "gamma for each", "keys come back", "keys of the batch", "keys of two dimensions"]
KEYED += [name for name in DRAWS if name.startswith("a key an example")]
"""Those that have a key for each example among them: `vmap` of some generators draws otherwise."""
