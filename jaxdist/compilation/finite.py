"""`check_finite`: NaN and infinity by the name of the leaf that holds them.

In a decorated step the counts are one more output of its program, the same on every device and examined after the call:
all ranks raise the same error without one more message.
"""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.sharding import Mesh

from jaxdist.agreement.description import list_ranks
from jaxdist.compilation.signature import Leaf, PyTree
from jaxdist.device_map import DeviceMap
from jaxdist.errors import StepError
from jaxdist.ir.primitives import count_p
from jaxdist.ir.primitives import counts as counts_of
from jaxdist.ir.trace import current_step
from jaxdist.mesh import NAMES

Tree = TypeVar("Tree")

_ADVICE = "Look at the learning rate and the data of this step, or clip the gradients"


def check_finite(tree: Tree, name: str = "tree") -> Tree:
    """Make a decorated step raise an error on every rank if an array of `tree` has a NaN or an infinity.

    The error names the first such leaf, the number of NaN and infinite entries, and the devices and ranks. Values of
    the whole batch (the loss, gradients) are bad on every device; values with one entry per example (logits) on the
    device that they come from, so check both.

    Call it at the top level of the step, not inside a function passed to ``jax.grad``, ``jax.lax.scan``, or similar.

    Args:
      tree: any pytree. Leaves that are not floating-point or complex arrays are not checked.
      name: the name to use in the error.

    Returns:
      `tree`, unchanged.

    Raises:
      FloatingPointError: a value is not finite: raised by the call of the step on every rank, or, outside a step, by
        this call.
      StepError: called inside a function as described above.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> @jaxdist.data_parallel
      ... def step(w, batch):
      ...     return jaxdist.check_finite(jnp.mean(jnp.log(batch @ w)), "loss")
      >>> step(jnp.zeros(3), jnp.ones((8, 3)))
      Traceback (most recent call last):
        ...
      FloatingPointError: step 'step...', call 1: loss is not finite: 1 infinite on every device. ...
    """
    findings: Findings | None = current_step()
    if findings is not None:
        findings.look_at(tree, name)
        return tree
    arrays = [(path, getattr(x, "array", x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
    for path, x in arrays:
        if not _is_float(x) or isinstance(x, Tracer):
            continue
        shards = x.addressable_shards if isinstance(x, jax.Array) else []
        parts = {str(s.index): s.data for s in shards} or {"": x}  # each value once
        counts = np.sum([np.asarray(counts_of(jnp.asarray(part))) for part in parts.values()], 0)
        if counts.any():
            leaf = name + jax.tree_util.keystr(path)
            raise FloatingPointError(f"{leaf} is not finite: {_in_words(counts)}. {_ADVICE}")
    return tree


class Findings:
    """A step that is being traced, on a mesh, and its counts."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.names: list[str] = []
        # For each name int32[devices, 2], how many NaN, how many infinite. All devices have the counts of all.
        self.counts: list[jax.Array] = []
        self._level = get_opaque_trace_state()

    def look_at(self, tree: PyTree, name: str) -> None:
        """Count the NaN and infinite entries of each floating array."""
        if get_opaque_trace_state() != self._level:
            raise StepError(
                f"jaxdist.check_finite(..., {name!r}) is called inside a function that jax.grad, scan, cond, jit or "
                "the like traces separately, so its counts cannot leave that function. Return the arrays from there "
                "(has_aux=True, or as outputs of the loop), and check them in the step itself"
            )
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if _is_float(x):
                self.names.append(name + jax.tree_util.keystr(path))
                self.counts.append(count_p.bind(x, devices=self.mesh.size))


def examine(names: Sequence[str], counted: jax.Array, mesh: Mesh, prefix: str, kinds: tuple[bool, bool]) -> None:
    """Look at the counts of a call of a step, of the kinds (NaN, infinite) that matter. Waits for its end."""
    counts = np.array(counted.addressable_data(0))  # [devices, names, kinds]
    # Under jax_debug_nans or jax_debug_infs alone, only the one kind is an error in the result.
    counts[:, [name.startswith("result") for name in names]] *= np.array(kinds)
    if not counts.any():
        return
    is_bad = counts.any(axis=(0, 2))
    first = int(is_bad.argmax())
    by_device = counts[:, first]
    devices = np.flatnonzero(by_device.any(axis=1)).tolist()
    same = bool((by_device == by_device[0]).all())
    others = f" ({int(is_bad.sum()) - 1} more checked arrays are not finite.)" if is_bad.sum() > 1 else ""
    where = "on every device" if same else _devices(mesh, devices)
    what = _in_words(by_device[0] if same else by_device.sum(0))
    raise FloatingPointError(f"{prefix}{names[first]} is not finite: {what} {where}.{others} {_ADVICE}")


def _devices(mesh: Mesh, numbers: Sequence[int]) -> str:
    """Devices by their ranks, if a process has one; they are counted in the order of the passes."""
    order = sorted(range(mesh.devices.ndim), key=lambda k: NAMES.index(mesh.axis_names[k]))
    ranks = np.reshape(DeviceMap.of(mesh).processes, mesh.devices.shape).transpose(order).ravel().tolist()
    if len(set(ranks)) == len(ranks):
        return f"on rank {list_ranks([ranks[i] for i in numbers])}"
    one_process = len(set(ranks)) == 1
    return f"on device {list_ranks([str(i) if one_process else f'{i} (rank {ranks[i]})' for i in numbers])}"


def _in_words(counts: np.ndarray) -> str:
    return " and ".join(f"{int(n)} {kind}" for n, kind in zip(counts, ("NaN", "infinite"), strict=True) if n)


def _is_float(x: Leaf) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
