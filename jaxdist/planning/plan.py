"""`plan`: what a decorated step takes on devices that are not here: bytes, collectives, what hides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.mesh import Sizes
from jaxdist.planning.elsewhere import LEVELS, Elsewhere
from jaxdist.planning.report import Plan
from jaxdist.planning.topology import Topology


def plan(
    step: Callable[..., Any],
    *args: Any,
    topology: str | Topology,
    levels: Sequence[int] = LEVELS,
    mesh: Sizes | None = None,
) -> Plan:
    """Compile a decorated step for devices that are not here, and count its bytes and collectives.

    No array is made and nothing is sent, so a model of any size can be planned. With `jax[cuda12]` installed (no GPU
    needed) the program is the one that the GPUs would run. Without it the step is compiled for as many virtual CPU
    devices: the state's bytes and the collectives are about the same, temporaries are those of another compiler, and
    overlap is unknown.

    The bytes on a device are its arguments as they are kept, results that do not take an argument's place, and XLA's
    temporaries. Of these, activations are what grows with the batch (the step is compiled once more to find it); the
    rest is gradients, gathered parameters and buffers. "fits" is about the memory that JAX takes for itself: three
    quarters of a GPU's, unless ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise.

    A collective counts as overlapped if a kernel on more than scalars runs between its start and its end. Its time is
    that of its bytes in a ring at the full speed of the slowest link, and a latency: less than you will measure.

    Args:
      step: decorated with `jaxdist.data_parallel` or `jaxdist.parallel`.
      *args: what the step would be called with: arrays, or pytrees of `jax.ShapeDtypeStruct` as `jax.eval_shape` gives
        them. The batch is the global one: the examples of all devices together.
      topology: ``"8xH100"``: devices of one host; ``"8x8xH100"``: hosts, and devices of each. Kinds: A100-40, A100-80,
        H100, H200, B200, cpu.
      levels: ZeRO levels to compare with that of the step. A step without `jaxdist.zero` has no other.
      mesh: the sizes of the axes, as for `jaxdist.parallel`; default: those that the step was decorated with.
        Neighbouring devices, which are on one host, differ in the last axis.

    Returns:
      The plan: ``print`` it, or take its `levels`, `own` and ``to_json()``. Sizes in bytes, times in seconds.

    Raises:
      TypeError: `step` is not a decorated step.
      ValueError: no such topology or level, a batch that the devices don't divide, or a mesh that they don't make.

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
      >>> [one.bytes["parameters"] for one in found.levels], [one.bytes["optimizer state"] for one in found.levels]
      ([400000, 400000], [800004, 200004])

    References:
      Rajbhandari et al., *ZeRO*, arXiv 1910.02054, section 3 (where the memory goes); Patarasuk and Yuan, *Bandwidth
      optimal all-reduce algorithms for clusters of workstations*, JPDC 2009 (bytes of a ring).
    """
    there = Elsewhere(step, args, topology, levels, mesh)
    written = there.compiled()
    own = there.level_of(written.ahead)
    wanted = there.others(written.ahead)
    activations = there.activations(written)
    found = []
    for level in sorted({*wanted, own}, key=lambda level: -1 if level is None else level):
        one = written if level == own else there.compiled(level)
        found.append(there.row(one, level, level == own, activations))
    if there.compiled_for == "cuda" and (large := [one.name for one in found if not one.fits]):
        there.notes.append(
            f"{', '.join(large)}: XLA orders what does not fit so as to save memory, not to overlap anything"
        )
    return there.plan(found)
