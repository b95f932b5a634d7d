"""`export_step`: the program of a step as one of JAX alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.export

from jaxdist.step.data_parallel import data_parallel
from jaxdist.step.decorated import DataParallel


def export_step(
    step: Callable[..., Any], *args: Any, platforms: Sequence[str] | None = None, **kwargs: Any
) -> jax.export.Exported:
    """Export the program of a step for all devices, which runs without jaxdist. No array is sent.

    It takes the leaves of the arguments (`jax.tree.leaves`; the batch is whole; of objects of nnx, `nnx.state`'s) and
    returns the leaves of the result, then those of the objects, all without padding. ``in_shardings_jax(mesh)`` of it
    tells where each argument lies on a `jax.sharding.Mesh` with the axes of the step's, over any devices.
    ``serialize()``, for a file, needs ``pip install flatbuffers``. XLA sends the messages, whatever the communicator.
    The compiler's options, donation, and `check_finite` are not part of it.

    Args:
      step: a decorated step, or a plain step, which is decorated with the defaults.
      *args: arguments of the step; `jax.ShapeDtypeStruct` works.
      platforms: of the devices that it is for: any of ``"cpu"``, ``"cuda"``, ``"rocm"`` and ``"tpu"``, which need not
        be here. The default is this job's.
      **kwargs: keyword arguments of the step.

    Raises:
      Exception: what JAX raises for steps that it cannot export, such as those with callbacks.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w - 0.1 * jnp.mean(batch, 0))
      >>> exported = jaxdist.export_step(step, jnp.ones(3), jnp.ones((8, 3)), platforms=["tpu"])
      >>> exported.platforms, [x.shape for x in exported.out_avals]
      (('tpu',), [(3,)])

    References:
      https://docs.jax.dev/en/latest/export/export.html
    """
    decorated: DataParallel = step if isinstance(step, DataParallel) else data_parallel(step)  # type: ignore[assignment]
    return decorated.program(*args, **kwargs).export(platforms)
