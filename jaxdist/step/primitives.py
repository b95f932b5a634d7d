"""The primitives by which a traced step says which of its reductions differentiation made.

JAX types each value inside a ``shard_map`` as replicated (R) or varying (V). Where replicated parameters meet a
device's part of the batch JAX inserts a cast R -> V (``pvary``); differentiating that cast makes the ``psum`` that data
parallelism needs. We have differentiation bind ``all_reduce_p`` there instead, and ``expand_p`` for the transpose of a
``psum`` that the user wrote. Outside a decorated step both mean exactly what JAX's own rules mean. Inside, the
*reductions* pass gives them the inner product that belongs to a mean over devices:

    objective L = mean_d(l_d),  cotangents such that  dL = mean_d(ct_d . dv_d)  for V,  dL = ct . dr  for R
    =>  transpose(pvary) = mean over devices,   transpose(psum) = N * pvary

With them every gradient of a plain ``jax.grad`` is that of the mean over devices of the local losses, a loss that
the user already averaged is not scaled twice, and the collectives of a synchronised BatchNorm stay as they are.

Reference: https://docs.jax.dev/en/latest/notebooks/shard_map.html (varying manual axes).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jaxdist import compat

AXIS = "data"
"""Name of the one mesh axis of data parallelism."""

Op = Literal["sum", "mean"]

all_reduce_p = Primitive("jaxdist_all_reduce")
"""V -> R sum (``op="sum"``) or mean over ``axes``; ``op=None``: made by differentiation, not yet given its meaning.

``wire``: the dtype in which it travels, by default its own; ``"gradient"``: not decided yet, it may be compressed.
"""

per_part_p = Primitive("jaxdist_per_part")
"""``x / parts`` in a step whose losses are means, `x` in one whose losses are sums: one of `parts` microbatches."""

expand_p = Primitive("jaxdist_expand")
"""R -> V: the transpose of a sum over ``axes`` that the user wrote."""

group_reduce_p = Primitive("jaxdist_group_reduce")
"""V -> V: the ``op`` (sum, max or min) over the devices of one's own group; ``groups`` hold each device once.

`lax.psum` takes groups of unequal size, but not where JAX types each value as replicated or varying.
"""


shard_p = Primitive("jaxdist_shard")
"""``x``, which may be kept in shards from here on. Bound by `jaxdist.zero` and `jaxdist.shard`.

``role``: a ``"gradient"``, the optimizer's ``"state"``, a ``"parameter"`` or ``"asked"`` for by the user; ``level``: of
ZeRO. What the state's leaves are marked as says how they are kept between steps (see `passes.homes`). Marks of level 0
are dropped after the trace (`passes.levels`).
"""

reduce_shard_p = Primitive("jaxdist_reduce_scatter")
"""V -> V: the reduction ``op`` over ``axes``, of which each device gets its slice along ``dim``; padded with zeros.

``wire``: as for :data:`all_reduce_p`.
"""

gather_shards_p = Primitive("jaxdist_all_gather")
"""V -> R: the slices along ``dim`` of all devices as one array, without the padding: ``size`` entries along ``dim``."""

alone_p = Primitive("jaxdist_alone")
"""V -> R: ``x`` itself, which is all there is over ``axes`` of one device."""


def all_reduce(x: Any, axes: tuple[str, ...] = (AXIS,), op: Op | None = None, wire: str | None = None) -> jax.Array:
    """Bind :data:`all_reduce_p`; a replicated `x` of a type-checked trace is cast to varying first."""
    if compat.checking_types() and (missing := set(axes) - compat.varying_axes(jax.typeof(x))):
        x = lax.pcast(x, tuple(missing), to="varying")
    return all_reduce_p.bind(x, axes=tuple(axes), op=op, wire=wire)


def per_part(x: Any, parts: int) -> jax.Array:
    """Bind :data:`per_part_p`. (Decided by a pass: jit may hand one traced helper to steps of both kinds.)"""
    return per_part_p.bind(x, parts=parts)


def _pvary(x: Any, axes: tuple[str, ...]) -> Any:
    return compat.pvary_p.bind(x, axes=axes) if compat.checking_types() else x


def expand(x: Any, axes: tuple[str, ...]) -> jax.Array:
    """Bind :data:`expand_p`."""
    return expand_p.bind(x, axes=tuple(axes))


def mark(x: Any, role: str, level: int) -> Any:
    """Bind :data:`shard_p`, if `x` holds numbers."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:  # the gradient of an integer
        return x
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else shard_p.bind(x, role=role, level=level)


def reduce_shard(x: Any, dim: int, op: Op, wire: str | None = None) -> jax.Array:
    """Bind :data:`reduce_shard_p`."""
    return reduce_shard_p.bind(x, axes=(AXIS,), op=op, wire=wire, dim=dim, devices=lax.axis_size(AXIS))


def gather_shards(x: Any, dim: int, size: int) -> jax.Array:
    """Bind :data:`gather_shards_p`."""
    return gather_shards_p.bind(x, axes=(AXIS,), dim=dim, size=size, devices=lax.axis_size(AXIS))


def slices(x: Any, dim: int, devices: int) -> Any:
    """The devices' slices of `x` along `dim`, in a new leading dimension; padded with zeros where it must be."""
    if pad := -x.shape[dim] % devices:
        x = jnp.pad(x, [(0, pad if d == dim else 0) for d in range(x.ndim)])
    split = x.reshape(*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0)


def joined(parts: Any, dim: int, size: int) -> Any:
    """What `slices` took apart: `size` entries along `dim`."""
    x = jnp.moveaxis(parts, 0, dim)
    x = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return lax.slice_in_dim(x, 0, size, axis=dim)


def first_entry(x: Any) -> Any:
    """A scalar of `x`. A slice, because ``x.reshape(-1)`` is a copy of an array that XLA holds in another order."""
    return lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))


def reduced(x: Any, axes: tuple[str, ...], op: Op | None, wire: str | None = None) -> Any:
    """What :data:`all_reduce_p` computes, in JAX's own collectives."""
    if not x.size:
        return jnp.zeros(x.shape, x.dtype)
    travels = x.dtype if wire in (None, "gradient") else jnp.dtype(wire)
    if op != "mean":
        return lax.psum(x.astype(travels), axes).astype(x.dtype)
    size = lax.axis_size(axes)
    if travels == jnp.float16:  # the sum of N half-precision gradients can overflow, their mean can't
        return lax.psum((x / size).astype(travels), axes).astype(x.dtype)
    return lax.psum(x.astype(travels), axes).astype(x.dtype) / size


def _all_reduce_type(aval: Any, *, axes: tuple[str, ...], **_: Any) -> Any:
    return compat.replicated_type(aval, axes) if compat.checking_types() else aval


def _all_reduce_transpose(ct: Any, _: Any, *, axes: tuple[str, ...], **params: Any) -> list[Any]:
    # Typed trace: the cotangent of a replicated value is replicated. Untyped (pmap-like) trace: each device holds
    # its own cotangent of the shared value, so they are reduced the same way.
    return [_pvary(ct, axes) if compat.checking_types() else all_reduce_p.bind(ct, axes=axes, **params)]


all_reduce_p.def_abstract_eval(_all_reduce_type)
ad.deflinear2(all_reduce_p, _all_reduce_transpose)
batching.primitive_batchers[all_reduce_p] = lambda args, dims, **params: (
    all_reduce_p.bind(*args, **params),
    dims[0],
)
mlir.register_lowering(
    all_reduce_p,
    mlir.lower_fun(reduced, multiple_results=False),
)

alone_p.def_abstract_eval(_all_reduce_type)
mlir.register_lowering(alone_p, lambda ctx, x, **_: [x])

per_part_p.def_abstract_eval(lambda aval, *, parts: aval)
ad.deflinear2(per_part_p, lambda ct, _, *, parts: [per_part_p.bind(ct, parts=parts)])
batching.primitive_batchers[per_part_p] = lambda args, dims, **params: (per_part_p.bind(*args, **params), dims[0])
mlir.register_lowering(per_part_p, mlir.lower_fun(lambda x, *, parts: x / parts, multiple_results=False))

expand_p.def_abstract_eval(lambda aval, *, axes: compat.varying_type(aval, axes) if compat.checking_types() else aval)
ad.deflinear2(expand_p, lambda ct, _, *, axes: [lax.psum(ct, axes)])
batching.primitive_batchers[expand_p] = lambda args, dims, **params: (
    expand_p.bind(*args, **params),
    dims[0],
)
mlir.register_lowering(expand_p, mlir.lower_fun(lambda x, *, axes: _pvary(x, axes), multiple_results=False))


shard_p.def_abstract_eval(lambda aval, **_: aval)
ad.deflinear2(shard_p, lambda ct, _, **__: [ct])
batching.primitive_batchers[shard_p] = lambda args, dims, **params: (shard_p.bind(*args, **params), dims[0])
mlir.register_lowering(shard_p, lambda ctx, x, **_: [x])


def _shard_shape(aval: Any, dim: int, size: int) -> tuple[int, ...]:
    return (*aval.shape[:dim], size, *aval.shape[dim + 1 :])


# Made by a pass after differentiation, and lowered by each communicator.
reduce_shard_p.def_abstract_eval(
    lambda aval, *, dim, devices, **_: aval.update(
        shape=_shard_shape(aval, dim, -(-aval.shape[dim] // devices)), weak_type=False
    )
)


def _gather_type(aval: Any, *, axes: tuple[str, ...], dim: int, size: int, **_: Any) -> Any:
    whole = aval.update(shape=_shard_shape(aval, dim, size), weak_type=False)
    return compat.replicated_type(whole, axes) if compat.checking_types() else whole


gather_shards_p.def_abstract_eval(_gather_type)


def _group_transpose(ct: Any, _: Any, **params: Any) -> list[Any]:
    if params["op"] != "sum":
        raise NotImplementedError(f"the derivative of a {params['op']} over groups of devices")
    return [group_reduce_p.bind(ct, **params)]


def _group_reduced(x: Any, *, op: str, groups: tuple[tuple[int, ...], ...]) -> Any:
    return _REDUCE[op].bind(x, axes=(AXIS,), axis_index_groups=groups)


_REDUCE = {"sum": primitives.psum_p, "max": primitives.pmax_p, "min": primitives.pmin_p}
group_reduce_p.def_abstract_eval(lambda aval, **_: aval)
ad.deflinear2(group_reduce_p, _group_transpose)
batching.primitive_batchers[group_reduce_p] = lambda args, dims, **params: (
    group_reduce_p.bind(*args, **params),
    dims[0],
)
mlir.register_lowering(group_reduce_p, mlir.lower_fun(_group_reduced, multiple_results=False))

compat.replace_transpose_rules(
    cast=lambda ct, axes: all_reduce_p.bind(ct, axes=axes, op=None, wire="gradient"),
    reduce=expand,
)
compat.promote_loop_carries()
