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
