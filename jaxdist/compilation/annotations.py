"""Read the annotations of flax's models: the dimension of each parameter that the model axis is to cut."""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxdist.compilation.signature import Args
from jaxdist.mesh import MODEL, dim_over


def model_dims(args: Args) -> list[tuple[int | None, bool]]:
    """For each leaf, the dimension that its annotation gives to the model axis, if any, and whether it has one.

    Logical names are those of the rules that are set (`flax.linen.logical_axis_rules`), or of the annotation's own.
    """
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in _KINDS]
    annotated = tuple(kind for kind in kinds if kind is not None)
    of_leaves = list[tuple[int | None, bool]]()
    for x in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, annotated)):
        axes, count = _axes(x) if isinstance(x, annotated) else (), len(jax.tree.leaves(x))
        of_leaves += [(dim_over(axes, MODEL), bool(axes)) if count == 1 else (None, False)] * count
    return of_leaves


# If nobody has imported flax, nothing is annotated.
_KINDS = ("flax.core.meta", "AxisMetadata"), ("flax.nnx", "Variable")


def _axes(x: Any) -> Sequence[Any]:
    """The axes of the mesh that an annotation names for each dimension."""
    from flax.core import spmd
    from flax.linen.spmd import logical_to_mesh_axes

    if not hasattr(x, "get_metadata"):
        names = tuple(getattr(x, "names", ()))
        if not hasattr(x, "rules"):
            return names
        try:
            return tuple(logical_to_mesh_axes(names, x.rules) or ())
        except ValueError:  # one name for two dimensions, which flax looks at once there is a mesh
            return ()
    metadata = x.get_metadata()
    names = next((metadata[key] for key in ("out_sharding", "sharding_names", "sharding") if metadata.get(key)), ())
    rules = dict([*spmd.get_logical_axis_rules(), *(metadata.get("sharding_rules") or ())])
    return [rules.get(name, name) for name in getattr(names, "spec", names)]
