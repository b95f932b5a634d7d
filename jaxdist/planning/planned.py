"""`plan`: what a decorated step takes on devices that are not here: bytes, collectives, what hides them."""

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
    """Compile a decorated step for devices that are not here, and count its bytes and collectives.

    No array is made and nothing is sent, so a model of any size can be planned. With `jax[cuda12]` installed (no GPU
    needed) the program is the one that the GPUs would run. Without it the step is compiled for as many virtual CPU
    devices: the state's bytes and the collectives are about the same, temporaries are those of a different compiler,
    and overlap is unknown.

    The bytes on a device are its arguments as they are kept, results that do not take an argument's place, and XLA's
    temporaries (gradients, activations, gathered parameters, buffers). "fits" compares them with the memory that JAX
    takes: three quarters of a GPU's, unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise.

    A collective counts as overlapped if a kernel on more than scalars runs between its start and its end. Its time is
    for its bytes in a ring at the full speed of the slowest link, and a latency: less than you will measure.

    Args:
      step: a step decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: arguments of the step: arrays, or pytrees of `jax.ShapeDtypeStruct` as `jax.eval_shape` gives them. The
        batch is the global one: the examples of all devices together.
      topology: ``"8xH100"``: devices of one host; ``"8x8xH100"``: hosts, and devices of each. Kinds: A100-40, A100-80,
        H100, H200, B200, cpu. Numbers of the kind may be changed, as by ``JAXDIST_MACHINE``:
        ``"8x8xH100,network=25e9"``.
      levels: ZeRO levels to compare with the step's own. A step without `jaxdist.zero` has no other.
      mesh: the sizes of the axes, as for `jaxdist.parallel`; default: the step's own. Neighboring devices, which are on
        one host, differ in the last axis.

    Returns:
      The plan: ``print`` it, or take its `candidates`, `own` and ``to_json()``. Sizes in bytes, times in seconds.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: there is no such topology or level, an empty batch, or the devices can't form the mesh.

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
        there.note(f"{', '.join(large)}: XLA orders what does not fit so as to save memory, not to overlap anything")
    return there.plan(written, found)
