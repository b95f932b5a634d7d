"""Meshes of several axes for tests: their devices, and random layouts of a step's state."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import jaxdist


def mesh(sizes: dict[str, int]) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(devices.reshape(list(sizes.values())), tuple(sizes))


def names_of(step: Any, *args: Any) -> list[tuple[str, Any]]:
    """The leaves of a step's state, as messages call them."""
    decorated: Any = jaxdist.data_parallel(step)
    decorated._bind_context()
    signature, leaves = decorated._signature(*decorated._arguments(args, {}))
    return [(signature.names[i], leaves[i]) for i in signature.state]


def layouts(step: Any, args: Any, seed: str, parts: int) -> dict[str, int | None]:
    """A dimension of each leaf of the state, or None."""
    rng = random.Random(seed)

    def dim(x: Any) -> int | None:
        shape = () if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) else np.shape(x)
        return rng.choice([None, *(d for d, n in enumerate(shape) if n >= parts)])

    return {f"^{re.escape(name)}$": dim(x) for name, x in names_of(step, *args)}
