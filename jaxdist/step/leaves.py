"""The leaves of a call: their types, and whether they are sharded."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.compilation.signature import Leaf
from jaxdist.mesh import dim_over
from jaxdist.placements.model.layouts import Padded, physical
from jaxdist.step import batch

TypeKey = tuple[tuple[int, ...], np.dtype | type, bool, int | None]  # shape, dtype, weak_type, rows of all ranks


def type_key(x: Leaf) -> TypeKey:
    """The properties of a leaf's type that decide which program runs."""
    # Parts of 3 rows may be of a batch of 5 or of 6, which are different programs.
    total = x.total if isinstance(x, (batch.Part, batch.BatchPart)) else None
    return np.shape(x), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False), total


def spans(x: Leaf) -> bool:
    """Check whether a leaf is an array on several processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def abstract(x: Leaf) -> jax.ShapeDtypeStruct:
    """The type of a leaf as the step sees it; the leaf may be a type itself."""
    aval = jax.typeof(x.array if type(x) in (Padded, batch.Part) else x)
    return jax.ShapeDtypeStruct(np.shape(x), aval.dtype, weak_type=aval.weak_type)


def sharding_over_any(x: Leaf) -> NamedSharding | None:
    """Return the sharding of a leaf that is in shards, over any devices; None for other leaves."""
    current = getattr(physical(x), "sharding", None)
    return current if isinstance(current, NamedSharding) and not current.is_fully_replicated else None


def dim_along(x: Leaf, axis: str) -> int | None:
    """Return the dimension of a leaf that an axis of this name cuts, on any mesh."""
    current = sharding_over_any(x)
    return dim_over(current.spec, axis) if current else None
