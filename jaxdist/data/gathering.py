"""`gather_for_metrics`: what a step made of the real examples of all ranks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxdist.collectives.public import allgather
from jaxdist.mesh import Sizes
from jaxdist.runtime.context import get_context, parts_of_ranks
from jaxdist.zero import unshard


def gather_for_metrics(tree: Any, weight: Any, mesh: Mesh | Sizes | None = None) -> Any:
    """What an evaluating step made of the real examples of all ranks, on every process; every process calls it.

    Args:
      tree: arrays with one entry an example, as a decorated step returns them (global), or this process's own.
      weight: of a loader with ``tail="pad"``, or as the step returned it.
      mesh: that of the loader.

    Returns:
      Of the structure of `tree`: numpy arrays, without the entries of weight 0. Over an epoch each example of the data
      set is in them once.

    Raises:
      ValueError: an array does not have one entry an example.

    Example:
      >>> import jaxdist, numpy as np
      >>> from jaxdist import gather_for_metrics
      >>> gather_for_metrics({"label": np.array([7, 3, 7])}, np.array([1.0, 1.0, 0.0]))["label"].tolist()
      [7, 3]
    """

    ctx = get_context()
    own, parts = ctx.parts(mesh)
    passed = parts_of_ranks(ctx, mesh)
    once = [next((r, of.index(part)) for r, of in enumerate(passed) if part in of) for part in range(parts)]

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and isinstance(x.sharding, jax.sharding.NamedSharding):
            return np.asarray(unshard(x))
        rows = np.asarray(x)
        if not rows.ndim or len(own) == parts:
            return rows
        rows = rows.reshape(len(own), -1, *rows.shape[1:])
        everyone = np.asarray(allgather(rows)).reshape(ctx.size, *rows.shape)
        return np.concatenate([everyone[at] for at in once])

    real = whole(weight) > 0

    def select(path: Any, x: Any) -> np.ndarray:
        rows = whole(x)
        if rows.shape[:1] != real.shape:
            name = jax.tree_util.keystr(path) or "tree"
            raise ValueError(f"{name} has shape {rows.shape}, and there are {len(real)} examples with a weight")
        return rows[real]

    return jax.tree_util.tree_map_with_path(select, tree)


__all__ = ["gather_for_metrics"]
