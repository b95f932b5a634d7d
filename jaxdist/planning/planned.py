"""`plan`: bytes and collectives of a decorated step on hypothetical devices, and their overlap."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.mesh import Sizes
from jaxdist.planning.elsewhere import LEVELS, Elsewhere
from jaxdist.planning.report import Plan


def plan(
    step: Callable[..., Any],
    *args: Any,
    topology: str,
    levels: Sequence[int] = LEVELS,
    mesh: Sizes | None = None,
) -> Plan:
    """Compile a decorated step for other devices, and count its bytes and collectives. No array is created.

    With `jax[cuda12]` installed, the program is the one that GPUs would run; no GPU is needed. Otherwise temporary
    memory is an estimate, and overlap unknown. Times assume full speeds, so real times are longer.

    Args:
      step: a step decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: arguments of the step: arrays or `jax.ShapeDtypeStruct`. The batch has the examples of all devices.
      topology: ``"8xH100"`` for the devices of one host, or ``"8x8xH100"`` for hosts and devices of each. Kinds:
        A100-40, A100-80, H100, H200, B200, cpu. Append speeds to change them: ``"8x8xH100,network=25e9"``.
      levels: ZeRO levels to compare with the step's own.
      mesh: the sizes of the axes, as for `jaxdist.parallel`; the step's own by default.

    Returns:
      The plan. ``print`` it, or use its `candidates`, `own`, and ``to_json()``. Sizes are in bytes, times in seconds.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: the topology or a level is invalid, the batch is empty, or the devices cannot form the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w - jnp.mean(batch, 0))
      >>> w, batch = jax.ShapeDtypeStruct((1000,), jnp.float32), jax.ShapeDtypeStruct((64, 1000), jnp.float32)
      >>> jaxdist.plan(step, w, batch, topology="4xcpu").own.total.count  # one all-reduce
      1

    References:
      Rajbhandari et al., *ZeRO*, arXiv 1910.02054, section 3.
    """
    there = Elsewhere(step, args, topology, levels, mesh)
    written = there.forecast.ahead()
    own = there.level_of(written)
    found = []
    for level in sorted({*there.others(written), own}, key=lambda level: -1 if level is None else level):
        ahead = written if level == own else there.forecast.ahead(level)
        found.append(there.candidate(there.compile(ahead), level, level == own))
    if there.compiled_for == "cuda" and (large := [one.name for one in found if not one.fits]):
        there.note(f"{', '.join(large)}: too large, so XLA schedules to save memory, not to overlap")
    return there.plan(written, found)
