"""The arguments of collectives: validate them, and describe calls for comparison."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
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


def checked(kind: str, arguments: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return validated arguments for a function of `jaxdist.collectives.in_step`, or raise."""
    options = {"groups": None, **arguments}
    groups = options["groups"] = _groups(kind, options["groups"], size)
    if options.get("op", "sum") not in OPS:
        raise bad(kind, f"unknown op {options['op']!r}; valid: {', '.join(OPS)}")
    for name in options.keys() & {"root", "axis", "split_axis", "concat_axis"}:
        options[name] = integer(kind, name, options[name])
    least = min(map(len, groups or [range(size)]))
    if "root" in options and not 0 <= options["root"] < least:
        where = "is not a rank" if groups is None else "is not a position in every group"
        raise bad(kind, f"root={options['root']} {where}; valid: 0..{least - 1}")
    return options


def result_type(op: str, dtype: Any) -> Any:
    """Return the dtype of a reduction of arrays with this dtype."""
    if op in ("min", "max") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"op {op!r} of {dtype.name}: complex numbers have no order; reduce jnp.abs(x), say")
    return jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype if op == "avg" else dtype


def _groups(kind: str, groups: Any, size: int) -> Groups:
    if groups is None:
        return None
    try:
        found = tuple(tuple(operator.index(rank) for rank in group) for group in groups)
    except TypeError:
        found = ((),)
    listed = [rank for group in found for rank in group]
    if not all(found) or len({*listed}) < len(listed) or not {*listed} <= {*range(size)}:
        raise bad(
            kind,
            f"groups={groups!r}: expected lists of ranks, 0..{size - 1}, each at most once, as in [[0, 1], [2, 3]]",
        )
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


def flat(
    kind: str, tree: Any, array: Callable[[Any], Any] = lambda leaf: leaf
) -> tuple[Any, tuple[str, ...], list[Any]]:
    """Return the structure of a tree, the names of its leaves in messages, and their arrays (NumPy's or JAX's)."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = tuple("x" + jax.tree_util.keystr(path) for path, _ in paths)
    return structure, names, each(kind, names, [leaf for _, leaf in paths], lambda leaf: _array(array(leaf)))


def each(kind: str, names: Sequence[str], leaves: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Apply a function to each leaf; an error names rank, call and leaf."""
    results = []
    for name, leaf in zip(names, leaves, strict=True):
        try:
            results.append(function(leaf))
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            of = f" of shape {leaf.shape}" if hasattr(leaf, "shape") else ""
            told = ValueError if isinstance(error, ValueError) else TypeError
            raise told(f"rank {get_context().rank}: {kind} of {name}{of}: {error}") from None
    return results


def _array(leaf: Any) -> Any:
    if isinstance(leaf, Tracer) and on_device():
        return leaf
    if isinstance(leaf, Tracer):
        raise TypeError(
            "it is traced, and outside a decorated step a collective runs at once, not inside jax.jit, jax.grad or "
            "the like. Call it from plain Python, or in jaxdist.per_device"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError("its mask would be lost: pass x.filled(value), or data and mask")
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        raise TypeError(f"{leaf!r:.80} is not an array or a number")
    if not isinstance(leaf, jax.Array):
        dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", type(leaf)))
        _check_dtype(dtype)
        return np.asarray(leaf, dtype)
    _check_dtype(leaf.dtype)
    if len(leaf.devices()) == 1 and leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    raise TypeError(
        "it is split over several devices: pass this process's part (x.addressable_data(0)), or use the collective "
        "inside a decorated step"
    )


@functools.cache
def _check_dtype(dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.bool_):
        raise TypeError(f"{dtype} is not a type of numbers (of a PRNG key, pass jax.random.key_data(key))")
    jnp.result_type(np.empty(0, dtype))  # JAX lacks some of NumPy's


def describe(call: str, names: Sequence[str], arrays: Sequence[Any]) -> Description:
    """Describe everything that must be equal on all ranks."""
    shown = (type_text(x.dtype.name, x.shape) for x in arrays)
    return Description(call, tuple(zip(names, shown, strict=True)))
