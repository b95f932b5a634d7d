"""The primitives of a step: marks, which the user's code binds, and collectives, which each communicator lowers."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# --- emitted

all_reduce_p = Primitive("jaxdist_all_reduce")  # the sum over ``axes``. ``wire``: the dtype to send, if not its own

reduce_shard_p = Primitive("jaxdist_reduce_scatter")  # the slice of that sum along ``dim``, padded with zeros
gather_shards_p = Primitive("jaxdist_all_gather")  # the slices of all devices along ``dim``, to ``size`` entries

# --- marks

# ``x``, which may be sharded from here on. ``role``: a ``"gradient"``, the optimizer's ``"state"``, a ``"parameter"``,
# or ``"requested"`` by the user; ``level`` of ZeRO; ``within``: the devices that share it; ``split``: the way to run
# whole-matrix work (`placements.owners`); ``offload``: keep the state's leaves in host memory.
shard_p = Primitive("jaxdist_shard")
constraint_p = Primitive("sharding_constraint")  # JAX's, without the user's mesh in the type of its result
count_p = Primitive("jaxdist_count")  # int32[devices, 2]: numbers of NaN and infinite entries of ``x`` per device
plain_p = Primitive("jaxdist_plain")  # ``x`` of a decorated step called on tracers, which must not compile alone


def mark(
    x: Any, role: str, level: int, within: int | str | None = None, split: str | None = None, offload: bool = False
) -> Any:
    """Bind `shard_p` if `x` holds numbers."""
    if getattr(x, "dtype", None) == jax.dtypes.float0:  # the gradient of an integer
        return x
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return shard_p.bind(x, role=role, level=level, within=within, split=split, offload=offload)


# --- slices


def slices(x: Any, dim: int, devices: int) -> Any:
    """Return the devices' slices of `x` along `dim`, in a new leading dimension; pad with zeros."""
    if pad := -x.shape[dim] % devices:
        x = jnp.pad(x, [(0, pad if d == dim else 0) for d in range(x.ndim)])
    split = x.reshape(*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0)


def joined(parts: Any, dim: int, size: int) -> Any:
    """Join the result of `slices`: `size` entries along `dim`."""
    x = jnp.moveaxis(parts, 0, dim)
    x = x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])
    return lax.slice_in_dim(x, 0, size, axis=dim)


# --- their implementation


def reduced(x: Any, axes: tuple[str, ...], wire: str | None = None) -> Any:
    """Compute `all_reduce_p` with JAX's own collectives."""
    if not x.size:
        return jnp.zeros(x.shape, x.dtype)
    return lax.psum(x.astype(wire or x.dtype), axes).astype(x.dtype)


def _shard_shape(aval: Any, dim: int, size: int) -> tuple[int, ...]:
    return (*aval.shape[:dim], size, *aval.shape[dim + 1 :])


all_reduce_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(all_reduce_p, mlir.lower_fun(reduced, multiple_results=False))

reduce_shard_p.def_abstract_eval(
    lambda aval, *, dim, devices, **_: aval.update(
        shape=_shard_shape(aval, dim, -(-aval.shape[dim] // devices)), weak_type=False
    )
)
gather_shards_p.def_abstract_eval(
    lambda aval, *, dim, size, **_: aval.update(shape=_shard_shape(aval, dim, size), weak_type=False)
)


def _identity(primitive: Primitive) -> None:
    """Register the rules of a primitive whose result is its operand."""
    primitive.def_abstract_eval(lambda aval, **_: aval)
    ad.deflinear2(primitive, lambda ct, _, **__: [ct])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims[0])


for mark_p in (shard_p, constraint_p, plain_p):
    _identity(mark_p)
for mark_p in (shard_p, constraint_p):
    mark_p.def_impl(lambda x, **_: x)
    mlir.register_lowering(mark_p, lambda ctx, x, **_: [x])


def counts(x: Any) -> jax.Array:
    """Return int32[2]: the numbers of NaN and infinite entries."""
    return jnp.stack([jnp.sum(jnp.isnan(x), dtype=jnp.int32), jnp.sum(jnp.isinf(x), dtype=jnp.int32)])


count_p.def_abstract_eval(
    lambda aval, *, devices: aval.update(shape=(devices, 2), dtype=np.dtype("int32"), weak_type=False)
)
mlir.register_lowering(
    count_p,
    mlir.lower_fun(lambda x, *, devices: jnp.broadcast_to(counts(x), (devices, 2)), multiple_results=False),
)


def _plain(x: Any, *, name: str) -> Any:
    devices, processes = jax.device_count(), jax.process_count()
    problem = (
        f"step {name!r} was called inside another transformation (jax.grad, jax.vmap, jax.jit, lax.scan): there it is "
        f"the plain step, on one of {devices} devices. Call it directly, or decorate the outer function instead"
    )
    if processes > 1:
        raise RuntimeError(f"{problem}: each of the {processes} processes would train alone, on its part of the batch")
    if devices > 1:
        warnings.warn(problem, stacklevel=2)
    return x


plain_p.def_impl(_plain)
mlir.register_lowering(plain_p, lambda _, x, *, name: [_plain(x, name=name)])
