"""`plan`: bytes and collectives of a decorated step on hypothetical devices, and their overlap."""

from __future__ import annotations

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
    """Compile a decorated step for other devices, and count its bytes and collectives.

    No array is created and nothing is sent, so models of any size can be planned. With `jax[cuda12]` installed, the
    program is the one that GPUs would run; no GPU is needed. Otherwise it is compiled for virtual CPU devices:
    temporary memory is then an estimate by a different compiler, and overlap is unknown.

    The bytes on a device are arguments as stored between steps, results that do not reuse their memory, and XLA's
    temporary memory (gradients, activations, gathered parameters, buffers). "fits" compares them with the memory that
    JAX reserves: three quarters of a GPU, unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` is set. A collective counts as
    overlapped if a kernel on more than scalars runs between its start and its end. Its time assumes a ring at the full
    speed of the slowest link, plus a latency, so real times are longer.

    Args:
      step: a step decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: arguments of the step: arrays, or pytrees of `jax.ShapeDtypeStruct` from `jax.eval_shape`. The batch has
        the examples of all devices.
      topology: ``"8xH100"`` for the devices of one host, or ``"8x8xH100"`` for hosts and devices of each. Kinds:
        A100-40, A100-80, H100, H200, B200, cpu. Append speeds to change them: ``"8x8xH100,network=25e9"``.
      levels: ZeRO levels to compare with the step's own. A step without `jaxdist.zero` has only its own.
      mesh: the sizes of the axes, as for `jaxdist.parallel`; the step's own by default.

    Returns:
      The plan. ``print`` it, or use its `candidates`, `own`, and ``to_json()``. Sizes are in bytes, times in seconds.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: the topology or a level is invalid, the batch is empty, or the devices cannot form the mesh.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist, optax
      >>> tx = jaxdist.zero(optax.adam(1e-3), level=1)
      >>> @jaxdist.data_parallel
      ... def step(w, opt_state, batch):
      ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     updates, opt_state = tx.update(grads, opt_state, w)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jax.ShapeDtypeStruct((1000, 100), jnp.float32)
      >>> found = jaxdist.plan(step, w, jax.eval_shape(tx.init, w), jax.ShapeDtypeStruct((64, 1000), jnp.float32),
      ...                      topology="4xcpu", levels=(0, 1))
      >>> [(one.bytes["parameters"], one.bytes["optimizer state"]) for one in found.candidates]
      [(400000, 800004), (400000, 200004)]

    References:
      Rajbhandari et al., *ZeRO*, arXiv 1910.02054, section 3 (where the memory goes); Patarasuk and Yuan, *Bandwidth
      optimal all-reduce algorithms for clusters of workstations*, JPDC 2009 (bytes of a ring).
    """
    there = Elsewhere(step, args, topology, levels, mesh)
    written = there.emitted()
    own = there.level_of(written)
    found = []
    for level in sorted({*there.others(written), own}, key=lambda level: -1 if level is None else level):
        ahead = written if level == own else there.emitted(level)
        found.append(there.candidate(there.compile(ahead), level, level == own))
    if there.compiled_for == "cuda" and (large := [one.name for one in found if not one.fits]):
        there.note(f"{', '.join(large)}: too large, so XLA schedules to save memory, not to overlap")
    return there.plan(written, found)
