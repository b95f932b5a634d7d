"""The dimension of each leaf of the state that the model axis cuts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from jaxdist.mesh import MODEL, passes
from jaxdist.placements.infer import Infer
from jaxdist.placements.layouts import Cut, Layout, layout
from jaxdist.placements.search import search
from jaxdist.step.signature import Signature


def cut_by_model(
    layouts: Mapping[str, int | None] | None,
    signature: Signature,
    avals: Sequence[Any],
    mesh: Mesh,
    infer: Infer,
    closed: ClosedJaxpr,
    sources: Sequence[int | None],
    given: Mapping[int, int],
) -> list[Layout]:
    """Return the layout of each argument of a step along the model axis."""
    parts = mesh.shape.get(MODEL, 1)
    if parts == 1:
        dims = {}
    elif layouts is None:
        infer = infer.over(passes(mesh), 0)
        block = infer.block(closed)
        block.outermost = True
        dims = search(infer, block, signature.state, sources, signature.names, mesh.size // parts, given)
    else:
        dims = _named(layouts, signature, avals, parts)

    def cut(i: int, shape: Sequence[int]) -> Layout:
        return layout(Cut(MODEL, parts, dims[i], -shape[dims[i]] % parts)) if i in dims else layout()

    return [cut(i, aval.shape) for i, aval in enumerate(avals)]


def _named(layouts: Mapping[str, int | None], signature: Signature, avals: Sequence[Any], parts: int) -> dict[int, int]:
    """The arguments that the user's expressions name, and the dimension."""
    found, used, lacking = dict[int, int](), set[str](), dict[str, str]()
    for i in signature.state:
        name, shape = signature.names[i], avals[i].shape
        for expression, dim in layouts.items():
            if not re.search(expression, name):
                continue
            if dim is not None and shape and not -len(shape) <= dim < len(shape):
                lacking.setdefault(expression, f"leaf {name} has shape {shape}, and no dimension {dim}")
                break  # an optimizer's statistics of a parameter may have fewer dimensions
            used.add(expression)
            if dim is not None and shape and not jnp.issubdtype(avals[i].dtype, jax.dtypes.extended):
                found[i] = dim % len(shape)
            break
    if none := [expression for expression in lacking if expression not in used]:
        raise ValueError(
            f"layouts={{{none[0]!r}: {layouts[none[0]]}}}: {lacking[none[0]]} for the {parts} devices of the axis "
            f"{MODEL!r} to cut"
        )
    if unused := [expression for expression in layouts if expression not in used]:
        names = ", ".join(signature.names[i] for i in signature.state[:8])
        raise ValueError(f"layouts: {unused[0]!r} is found in no leaf of the state; its leaves are {names}")
    return found
