"""`per_device`: code for each device inside a step that is written for one."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from jaxdist.compat import under_no_mesh
from jaxdist.ir.trace import current_step
from jaxdist.runtime.context import get_context

P = ParamSpec("P")
R = TypeVar("R")


def per_device(fn: Callable[P, R], in_specs: Any, out_specs: Any, *, check_vma: bool = True) -> Callable[P, R]:
    """Run a function on every device, on that device's part of the arguments: ``jax.shard_map`` over the job's mesh.

    Use it for results that differ from a single device: each device's own statistics or random numbers, kernels, your
    own collectives (`jax.lax.psum`, `jaxdist.allreduce`). It is differentiable, inside and outside a step.

    Args:
      fn: a function of one device's arrays, or pytrees of them.
      in_specs: how to split each argument: ``PartitionSpec("data")`` along its first dimension, ``PartitionSpec()`` for
        the whole array.
      out_specs: how to join the results.
      check_vma: check that results which `out_specs` calls identical on all devices are. Kernels need False.

    Returns:
      A function of whole arrays.

    Raises:
      ValueError: (when called) the devices do not divide a dimension to split.

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
        mesh = (current_step() or get_context()).mesh
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
        return mapped(*args, **kwargs)

    return run
