"""The arguments of collectives: what is right, what is wrong with them, and how a call is described to the others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdist.agreement.description import Description
from jaxdist.collectives.call import PARAMETERS, Call, positive
from jaxdist.collectives.numerics import OPS, reduction
from jaxdist.ir.fingerprint import type_text
from jaxdist.ir.trace import inside_step, on_device
from jaxdist.runtime.context import get_context

REDUCE = ("allreduce", "reduce", "reduce_scatter")


def checked(kind: str, arguments: dict[str, Any], size: int, structure: Any, arrays: Sequence[Any]) -> Call:
    """The call, or the first thing that is wrong with it."""
    rank = get_context().rank

    def bad(problem: str) -> ValueError:
        return ValueError(f"rank {rank}: {kind}: {problem}")

    settings = dict(arguments)
    groups = settings["groups"] = ranks_of_groups(settings.get("groups"), size, bad)
    sizes = {size} if groups is None else {len(g) for g in groups}
    if settings.get("op", "sum") not in OPS:
        raise bad(f"unknown op {settings['op']!r}; valid: {', '.join(OPS)}")
    for name in ("root", "axis", "split_axis", "concat_axis"):
        if name in settings:
            settings[name] = _integer(name, settings[name], bad)
    if "root" in settings and sizes and not 0 <= settings["root"] < min(sizes):
        where = "is not a rank" if groups is None else "is not a position in every group"
        raise bad(f"root={settings['root']} {where}; valid: 0..{min(sizes) - 1}")
    if "perm" in settings:
        settings["perm"] = _perm(settings["perm"], size, bad)
    call = Call(kind, **settings)
    for i, x in enumerate(arrays):
        if kind in REDUCE:
            try:
                reduction(call.op, x.dtype)
            except TypeError as error:
                raise TypeError(f"rank {rank}: {kind} of {_names(structure)[i]}: {error}") from None
        if problem := _bad_shape(call, arguments, x.shape, sizes):
            raise bad(f"{_names(structure)[i]} of shape {x.shape} {problem}")
    return call


def _bad_shape(call: Call, arguments: dict[str, Any], shape: tuple[int, ...], sizes: set[int]) -> str:
    ndim = max(len(shape), call.kind == "allgather")  # scalars make a vector
    for name in ("axis", "split_axis", "concat_axis"):
        if name in arguments and not -ndim <= getattr(call, name) < ndim:
            return f"has no {name} {getattr(call, name)}"
    divided = {"reduce_scatter": call.axis, "all_to_all": call.split_axis, "scatter": 0}.get(call.kind)
    if divided is None:
        return ""
    if not shape:
        return "has no dimension that could be divided among the ranks"
    for n in sizes:
        if shape[divided] % n:
            return (
                f"can't be divided: dimension {positive(divided, ndim)} has size {shape[divided]}, no multiple of "
                f"the {n} ranks of the group. Pad it, or divide another dimension"
            )
    return ""


def of_leaf(call: Call, x: Any) -> dict[str, Any]:
    """The parameters for one leaf: axes counted from the start."""
    values = {name: getattr(call, name) for name in PARAMETERS[call.kind]}
    return {k: positive(v, x.ndim) if k.endswith("axis") else v for k, v in values.items()}


def ranks_of_groups(groups: Any, size: int, bad: Callable[[str], Exception]) -> tuple[tuple[int, ...], ...] | None:
    if groups is None:
        return None
    seen: set[int] = set()
    try:
        found = tuple(tuple(operator.index(r) for r in group) for group in groups)
    except TypeError:
        raise bad(f"groups={groups!r} is not a list of lists of ranks, as in [[0, 1], [2, 3]]") from None
    for group in found:
        if not group:
            raise bad(f"groups={groups!r} has an empty group; a rank that acts alone is listed in none")
        for rank in group:
            if not 0 <= rank < size:
                raise bad(f"rank {rank} in groups={groups!r} is out of range; valid: 0..{size - 1}")
            if rank in seen:
                raise bad(f"rank {rank} is listed twice in groups={groups!r}")
            seen.add(rank)
    return found


def _perm(perm: Any, size: int, bad: Callable[[str], Exception]) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((operator.index(s), operator.index(d)) for s, d in perm)
    except (TypeError, ValueError):
        raise bad(f"perm={perm!r} is not a list of (source, destination) pairs") from None
    for what, ranks in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        for rank in ranks:
            if not 0 <= rank < size:
                raise bad(f"{what} {rank} in perm={perm!r} is out of range; valid: 0..{size - 1}")
            if ranks.count(rank) > 1:
                raise bad(f"rank {rank} is a {what} twice in perm={perm!r}")
    return pairs


def _integer(name: str, value: Any, bad: Callable[[str], Exception]) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise bad(f"{name}={value!r} is not an integer") from None


def rank_of(kind: str, name: str, value: Any, ctx: Any) -> int:
    def bad(problem: str) -> ValueError:
        return ValueError(f"rank {ctx.rank}: {kind}: {problem}")

    rank = _integer(name, value, bad)
    if not 0 <= rank < ctx.size:
        raise bad(f"{name}={rank} is not a rank; valid: 0..{ctx.size - 1}")
    return rank


def not_in_step(kind: str) -> None:
    if inside_step() or on_device():
        raise TypeError(
            f"jaxdist.{kind} inside a step: all devices run one program, so none sends alone; use jaxdist.permute"
        )


# --- leaves


def flat(kind: str, tree: Any) -> tuple[Any, list[Any]]:
    """Structure and arrays (NumPy's, JAX's or shapes) of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [_array(kind, structure, i, leaf) for i, leaf in enumerate(leaves)]


def _array(kind: str, structure: Any, i: int, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, Tracer):
            if on_device():
                return leaf
            raise _bad_leaf(
                kind, structure, i,
                "is traced: outside a decorated step a collective runs at once, not inside jax.jit, jax.vmap or "
                "the like (nor, unless it is linear, jax.grad). Call it from plain Python, or in a function that "
                "jaxdist.data_parallel decorates",
            )  # fmt: skip
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise _bad_leaf(kind, structure, i, "is a PRNG key: send jax.random.key_data(key), and wrap it again")
        if len(leaf.devices()) == 1 and leaf.is_fully_addressable:
            return leaf
        if leaf.is_fully_replicated:
            return leaf.addressable_data(0)
        raise _bad_leaf(
            kind, structure, i,
            f"of shape {leaf.shape} is spread over several devices: pass this process's part "
            "(x.addressable_data(0)), or use the collective inside a decorated step",
        )  # fmt: skip
    if isinstance(leaf, jax.ShapeDtypeStruct) and kind == "recv":
        return leaf
    if not isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        raise _bad_leaf(kind, structure, i, f"is {leaf!r:.80}, not an array or a number")
    x = np.asarray(leaf)
    if x.dtype.kind in "OSUMmV" and not jnp.issubdtype(x.dtype, jnp.number):
        raise _bad_leaf(kind, structure, i, f"has dtype {x.dtype}, which JAX does not have")
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _bad_leaf(kind: str, structure: Any, i: int, problem: str) -> TypeError:
    return TypeError(f"rank {get_context().rank}: {kind}: {_names(structure)[i]} {problem}")


def _names(structure: Any) -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure, range(structure.num_leaves)))[0]
    return ["x" + jax.tree_util.keystr(path) for path, _ in paths]


def types_of(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype) for x in arrays)


@functools.lru_cache(maxsize=1024)
def describe(head: str, structure: Any, types: tuple[Any, ...]) -> Description:
    shown = (type_text(dtype.name, shape) for shape, dtype in types)
    return Description(head, tuple(zip(_names(structure), shown, strict=True)))
