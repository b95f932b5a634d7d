"""`per_device`: code for each device inside a step that is written for one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from jaxdist.compat import under_no_mesh
from jaxdist.ir.trace import step_mesh
from jaxdist.runtime.context import get_context

P = ParamSpec("P")
R = TypeVar("R")


def per_device(fn: Callable[P, R], in_specs: Any, out_specs: Any, *, check_vma: bool = True) -> Callable[P, R]:
    """Run a function on each device, on that device's part of the arguments.

    For what is not "one device with the whole batch": statistics of each device's part (BatchNorm as under PyTorch's
    DDP), kernels of your own, collectives written by hand (`jax.lax.psum`, `jaxdist.allreduce`), random numbers that
    differ between devices (``jax.random.fold_in(key, jax.lax.axis_index("data"))``). It is ``jax.shard_map`` over the
    mesh of the decorated step, or outside one over the mesh of the job. It can be differentiated.

    Args:
      fn: takes and returns one device's arrays, or pytrees of these.
      in_specs: how each argument is split, as for `jax.shard_map`: ``PartitionSpec("data")`` along its first dimension,
        ``PartitionSpec()`` not at all. On a mesh of several axes (`jaxdist.parallel`) it may name each of them.
      out_specs: how the results are put together, likewise.
      check_vma: as for `jax.shard_map`: let JAX check that what `out_specs` calls the same on every device is. Kernels
        need False.

    Returns:
      A function of whole arrays.

    Raises:
      ValueError: (when called) a dimension that is to be split and that the devices don't divide.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> from jax.sharding import PartitionSpec as P
      >>> center = jaxdist.per_device(lambda x: x - x.mean(0), P("data"), P("data"))  # each device's own mean
      >>> center(jnp.ones((8, 3))).shape
      (8, 3)

    References:
      https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """

    @under_no_mesh
    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        mesh = step_mesh() or get_context().mesh
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        return mapped(*args, **kwargs)

    return run
