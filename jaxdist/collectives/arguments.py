"""The arguments of collectives: validate them, and describe calls for comparison."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdist.agreement.description import Description
from jaxdist.ir.fingerprint import type_text
from jaxdist.ir.trace import on_device
from jaxdist.runtime.context import get_context

OPS = ("sum", "prod", "min", "max", "avg")
Groups = tuple[tuple[int, ...], ...] | None


def text(kind: str, options: Mapping[str, Any]) -> str:
    """Format a call for people and for the comparison between ranks."""
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in options.items() if value is not None)})"


def checked(
    kind: str, arguments: Mapping[str, Any], size: int, structure: Any, arrays: Sequence[Any]
) -> dict[str, Any]:
    """Return validated arguments for a function of `jaxdist.collectives.in_step`, or raise."""
    options = {"groups": None, **arguments}
    groups = options["groups"] = _groups(kind, options["groups"], size)
    sizes = {size} if groups is None else {len(g) for g in groups}
    if options.get("op", "sum") not in OPS:
        raise bad(kind, f"unknown op {options['op']!r}; valid: {', '.join(OPS)}")
    for name in options.keys() & {"root", "axis", "split_axis", "concat_axis"}:
        options[name] = integer(kind, name, options[name])
    if "root" in options and sizes and not 0 <= options["root"] < min(sizes):
        where = "is not a rank" if groups is None else "is not a position in every group"
        raise bad(kind, f"root={options['root']} {where}; valid: 0..{min(sizes) - 1}")
    for i, x in enumerate(arrays):
        if "op" in options:
            try:
                result_type(options["op"], x.dtype)
            except TypeError as error:
                raise TypeError(f"rank {get_context().rank}: {kind} of {_names(structure)[i]}: {error}") from None
        if problem := _bad_shape(kind, options, x.shape, sizes):
            raise bad(kind, f"{_names(structure)[i]} of shape {x.shape} {problem}")
    return options


def result_type(op: str, dtype: Any) -> Any:
    """Return the dtype of a reduction of arrays with this dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        if op in ("min", "max"):
            raise TypeError(f"op {op!r} of {dtype.name}: complex numbers have no order; reduce jnp.abs(x), say")
    elif not jnp.issubdtype(dtype, jnp.floating) and dtype.kind not in "biu":
        raise TypeError(f"op {op!r} of {dtype.name}: no reduction of this dtype; cast to int8 or wider first")
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype if op == "avg" else dtype


def _bad_shape(kind: str, options: Mapping[str, Any], shape: tuple[int, ...], sizes: set[int]) -> str:
    ndim = max(len(shape), kind == "allgather")  # scalars make a vector
    for name in ("axis", "split_axis", "concat_axis"):
        if name in options and not -ndim <= options[name] < ndim:
            return f"has no {name} {options[name]}"
    if kind not in ("reduce_scatter", "all_to_all", "scatter"):
        return ""
    if not shape:
        return "has no dimension that could be divided among the ranks"
    divided = options.get("axis", options.get("split_axis", 0)) % ndim
    for n in sizes:
        if shape[divided] % n:
            return (
                f"can't be divided: dimension {divided} has size {shape[divided]}, not a multiple of the {n} ranks of "
                "the group. Pad it, or use a different dimension"
            )
    return ""


def _groups(kind: str, groups: Any, size: int) -> Groups:
    if groups is None:
        return None
    seen: set[int] = set()
    try:
        found = tuple(tuple(operator.index(r) for r in group) for group in groups)
    except TypeError:
        raise bad(kind, f"groups={groups!r} is not a list of lists of ranks, as in [[0, 1], [2, 3]]") from None
    if not all(found):
        raise bad(kind, f"groups={groups!r} has an empty group; a rank that acts alone is listed in none")
    for rank in (rank for group in found for rank in group):
        if not 0 <= rank < size:
            raise bad(kind, f"rank {rank} in groups={groups!r} is out of range; valid: 0..{size - 1}")
        if rank in seen:
            raise bad(kind, f"rank {rank} is listed twice in groups={groups!r}")
        seen.add(rank)
    return found


def integer(kind: str, name: str, value: Any) -> int:
    """Return an argument as an integer, or raise."""
    try:
        return operator.index(value)
    except TypeError:
        raise bad(kind, f"{name}={value!r} is not an integer") from None


def bad(kind: str, problem: str) -> ValueError:
    """Return an error that names rank and call."""
    return ValueError(f"rank {get_context().rank}: {kind}: {problem}")


# --- leaves


def flat(kind: str, tree: Any) -> tuple[Any, list[Any]]:
    """Return the structure and arrays (NumPy's or JAX's) of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = []
    for i, leaf in enumerate(leaves):
        try:
            arrays.append(_array(leaf))
        except TypeError as error:
            raise TypeError(f"rank {get_context().rank}: {kind}: {_names(structure)[i]} {error}") from None
    return structure, arrays


def _array(leaf: Any) -> Any:
    if isinstance(leaf, Tracer) and on_device():
        return leaf
    if isinstance(leaf, Tracer):
        raise TypeError(
            "is traced: outside a decorated step a collective runs at once, not inside jax.jit, jax.vmap or the like "
            "(nor, unless it is linear, jax.grad). Call it from plain Python, or in a function that "
            "jaxdist.data_parallel decorates"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("is a masked array, whose mask would be lost: pass x.filled(value), or data and mask")
    if type(leaf) is int and not (info := jnp.iinfo(jax.dtypes.canonicalize_dtype(int))).min <= leaf <= info.max:
        raise TypeError(f"is {leaf}, which {info.dtype} does not hold: set jax_enable_x64, or pass an array")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise TypeError(f"of shape {leaf.shape} was deleted, or donated to a step: pass what that returned")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError("is a PRNG key: send jax.random.key_data(key), and wrap it again")
        if len(leaf.devices()) == 1 and leaf.is_fully_addressable:
            return leaf
        if leaf.is_fully_replicated:
            return leaf.addressable_data(0)
        raise TypeError(
            f"of shape {leaf.shape} is split over several devices: pass this process's part (x.addressable_data(0)), "
            "or use the collective inside a decorated step"
        )
    if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        raise TypeError(f"is {leaf!r:.80}, not an array or a number")
    x = np.asarray(leaf)
    if x.dtype != bool and not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"has dtype {x.dtype}, which JAX does not have")
    native = x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")
    return x.astype(jax.dtypes.canonicalize_dtype(native), copy=False)


def _names(structure: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))[0]
    return ["x" + jax.tree_util.keystr(path) for path, _ in paths]


def describe(call: str, structure: Any, arrays: Sequence[Any]) -> Description:
    """Describe everything that must be equal on all ranks."""
    shown = (type_text(x.dtype.name, x.shape) for x in arrays)
    return Description(call, tuple(zip(_names(structure), shown, strict=True)))
