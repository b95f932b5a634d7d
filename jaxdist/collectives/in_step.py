"""The collectives inside a decorated step: between devices, as part of the program, and differentiable.

Each takes one array and gives each device its result; arguments have been checked (see
`jaxdist.collectives.public`). With `groups` the devices of each group exchange among themselves, and a device in no
group acts alone.

The gradients follow from JAX's rules for what these are made of: those of the sum over devices of what each makes of
its result, which the step turns into that of the mean of the devices' losses, as for any other code.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist import compat
from jaxdist.collectives.numerics import reduction
from jaxdist.ir.primitives import group_reduce_p
from jaxdist.mesh import AXIS

Groups = tuple[tuple[int, ...], ...] | None


def size() -> int:
    """Number of devices of the step."""
    return lax.axis_size(AXIS)


def allreduce(x: Any, op: str, groups: Groups) -> jax.Array:
    """The reduction of the devices' arrays, on each."""
    x = jnp.asarray(x)
    if op == "avg":
        x = x.astype(reduction(op, x.dtype).out)
    if not x.size:
        return x
    if op == "prod":
        return _product(x, groups)
    if x.dtype == bool:
        kind = {"sum": "max", "max": "max", "min": "min"}[op]
        return allreduce(x.astype(jnp.int32), kind, groups) > 0
    kind = "sum" if op == "avg" else op
    if groups is None:
        total = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[kind](_varying(x), AXIS)
        return total / size() if op == "avg" else total
    full = _everyone(groups)
    total = group_reduce_p.bind(_varying(x), op=kind, axes=(AXIS,), groups=full)
    return total / _mine({d: len(g) for g in full for d in g}, x.dtype) if op == "avg" else total


def allgather(x: Any, axis: int, groups: Groups) -> jax.Array:
    """The devices' arrays along `axis`."""
    x = jnp.asarray(x)
    x = x[None] if x.ndim == 0 else x
    if not x.size:
        return jnp.concatenate([x] * _size(groups, "allgather"), axis)
    return lax.all_gather(_varying(x), AXIS, axis=axis, tiled=True, axis_index_groups=_equal(groups, "allgather"))


def reduce_scatter(x: Any, op: str, axis: int, groups: Groups) -> jax.Array:
    """This device's slice along `axis` of the reduction."""
    x = jnp.asarray(x)
    if op == "avg":
        x = x.astype(reduction(op, x.dtype).out)
    equal, n = _equal(groups, "reduce_scatter"), _size(groups, "reduce_scatter")
    if not x.size:
        return x[(slice(None),) * axis + (slice(x.shape[axis] // n),)]
    if op in ("sum", "avg") and x.dtype != bool:
        part = lax.psum_scatter(_varying(x), AXIS, scatter_dimension=axis, tiled=True, axis_index_groups=equal)
        return part / n if op == "avg" else part
    parts = lax.all_to_all(_varying(x), AXIS, axis, axis, tiled=True, axis_index_groups=equal)
    parts = parts.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :])
    return _local(parts, op, axis)


def broadcast(x: Any, root: int, groups: Groups) -> jax.Array:
    """The root's array on every device."""
    x = jnp.asarray(x)
    if not x.size:
        return x
    mine = jnp.where(_is_root(root, groups), x, jnp.zeros_like(x))
    return allreduce(mine, "max" if x.dtype == bool else "sum", groups)


def reduce(x: Any, root: int, op: str, groups: Groups) -> jax.Array:
    """The reduction on the root; its own array on every other device."""
    x = jnp.asarray(x)
    total = allreduce(x, op, groups)
    return jnp.where(_is_root(root, groups), total, x.astype(total.dtype))


def all_to_all(x: Any, split_axis: int, concat_axis: int, groups: Groups) -> jax.Array:
    """Slice i along `split_axis` goes to device i; what comes is put together along `concat_axis`."""
    x = jnp.asarray(x)
    equal, n = _equal(groups, "all_to_all"), _size(groups, "all_to_all")
    if not x.size:
        return jnp.concatenate([jnp.split(x, n, split_axis)[0]] * n, concat_axis)
    return lax.all_to_all(_varying(x), AXIS, split_axis, concat_axis, tiled=True, axis_index_groups=equal)


def gather(x: Any, root: int, groups: Groups) -> jax.Array:
    """The devices' arrays along axis 0 on the root; zeros of that shape on every other device."""
    whole = allgather(x, 0, groups)
    return jnp.where(_is_root(root, groups), whole, jnp.zeros_like(whole))


def scatter(x: Any, root: int, groups: Groups) -> jax.Array:
    """This device's slice along axis 0 of the root's array."""
    x = jnp.asarray(x)
    rows = x.shape[0] // _size(groups, "scatter")
    return all_to_all(x, 0, 0, groups)[root * rows : (root + 1) * rows]


def permute(x: Any, perm: tuple[tuple[int, int], ...]) -> jax.Array:
    """From source to destination for each pair; zeros where nothing comes."""
    x = jnp.asarray(x)
    if not x.size:
        return x
    return lax.ppermute(_varying(x), AXIS, perm)


def _varying(x: Any) -> Any:
    if compat.checking_types() and AXIS not in compat.varying_axes(jax.typeof(x)):
        return lax.pcast(x, AXIS, to="varying")
    return x


def _local(parts: Any, op: str, axis: int) -> Any:
    """The reduction of what is stacked along `axis`, in its own dtype."""
    reduce = {"sum": jnp.sum, "prod": jnp.prod, "max": jnp.max, "min": jnp.min}[op]
    if parts.dtype == bool:
        reduce = {"sum": jnp.any, "max": jnp.any, "prod": jnp.all, "min": jnp.all}[op]
    return reduce(parts, axis).astype(parts.dtype)


def _product(x: Any, groups: Groups) -> Any:
    every = lax.all_gather(_varying(x), AXIS)
    if groups is None:
        return _local(every, "prod", 0)
    n = size()
    member = np.eye(n, dtype=bool)
    for group in groups:
        member[np.ix_(group, group)] = True
    mine = jnp.asarray(member)[lax.axis_index(AXIS)].reshape(n, *[1] * x.ndim)
    return _local(jnp.where(mine, every, jnp.ones_like(every)), "prod", 0)


def _everyone(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The groups, and one for each device that is in none."""
    listed = {d for g in groups for d in g}
    return (*groups, *((d,) for d in range(size()) if d not in listed))


def _mine(table: dict[int, Any], dtype: Any) -> Any:
    """This device's entry."""
    return jnp.asarray([table[d] for d in range(size())], dtype)[lax.axis_index(AXIS)]


def _is_root(root: int, groups: Groups) -> Any:
    if groups is None:
        return lax.axis_index(AXIS) == root
    roots = {g[root] for g in groups}
    alone = set(range(size())) - {d for g in groups for d in g}
    return _mine({d: d in roots | alone for d in range(size())}, bool)


def _equal(groups: Groups, name: str) -> list[list[int]] | None:
    """The groups, if results over them have one shape on all devices."""
    if groups is None:
        return None
    full = _everyone(groups)
    if len({len(g) for g in full}) > 1:
        raise ValueError(
            f"{name} inside a step with groups={[list(g) for g in groups]} over {size()} devices: its "
            "result would have another shape on some devices. Groups of one size that together name every device"
        )
    return [list(g) for g in full]


def _size(groups: Groups, name: str) -> int:
    equal = _equal(groups, name)
    return size() if equal is None else len(equal[0])
