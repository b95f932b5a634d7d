"""Collectives on arrays and pytrees: between processes, or between devices in a step."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxdist.collectives import in_step
from jaxdist.collectives.arguments import checked, each, flat
from jaxdist.collectives.messages import Messages
from jaxdist.collectives.outside import Outside
from jaxdist.errors import StepError
from jaxdist.ir.trace import inside_step, on_device
from jaxdist.mesh import AXIS
from jaxdist.runtime.context import get_context

Op = Literal["sum", "prod", "min", "max", "avg"]
Groups = Sequence[Sequence[int]]


def allreduce(x: Any, op: Op = "sum", groups: Groups | None = None) -> Any:
    """Reduce `x` over all ranks; every rank gets the result.

    Every rank must call it, with the same shapes and dtypes: outside a step each process has one `x`, in
    `jaxdist.per_device` each device. It is differentiable there. Floats narrower than 32 bits are added in float32 and
    rounded once. For booleans, sum and max mean "or", prod and min mean "and".

    Args:
      x: array, Python number, or a pytree of them.
      op: "sum", "prod", "min", "max", or "avg".
      groups: ranks that reduce among themselves, such as ``[[0, 1], [2, 3]]``. The default is one group of all ranks. A
        rank in no group gets its own `x` back. Inside a step, groups have one size, and cover every device.

    Returns:
      JAX arrays with the structure, shapes, and dtypes of `x`; "avg" of integers has the dtype of `jnp.mean`.

    Raises:
      ValueError: (on every rank) an argument is invalid, or a rank makes a different call. Nothing was sent.
      TypeError: a leaf is not an array, or its dtype does not support `op` (min and max of complex numbers).
      ControlError: a rank is missing until the timeout of `jaxdist.init`. The message names it.

    Example:
      >>> import jaxdist
      >>> jaxdist.allreduce({"loss": 2.0}, "avg")  # one process alone
      {'loss': Array(2., dtype=float...)}
    """
    return _collective("allreduce", x, op=op, groups=groups)


def allgather(x: Any, axis: int = 0, groups: Groups | None = None) -> Any:
    """Return `x` of all ranks as JAX arrays, concatenated along an axis in rank order.

    Args:
      x: see `allreduce`, as for `groups` and errors.
      axis: the axis along which to concatenate. Scalars make a vector.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.allgather(np.ones((4, 4)), axis=1).shape
      (4, 4)
    """
    return _collective("allgather", x, axis=axis, groups=groups)


def reduce_scatter(x: Any, op: Op = "sum", axis: int = 0, groups: Groups | None = None) -> Any:
    """Reduce `x` over all ranks, and return slice i of the result on rank i, as JAX arrays.

    Args:
      x: see `allreduce`, as for `op`, `groups` and errors.
      axis: the axis to slice. The number of ranks must divide its size.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.reduce_scatter(np.ones((4, 4)), "sum", axis=0).shape
      (4, 4)
    """
    return _collective("reduce_scatter", x, op=op, axis=axis, groups=groups)


def broadcast(x: Any, root: int = 0, groups: Groups | None = None) -> Any:
    """Return the root's `x` on every rank, as JAX arrays.

    Args:
      x: see `allreduce`, as for `groups` and errors. For objects without known shapes, use `Context.broadcast`.
      root: the rank, or the position within the group if there are `groups`.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.broadcast(np.int8(3), root=0)
      Array(3, dtype=int8)
    """
    return _collective("broadcast", x, root=root, groups=groups)


def reduce(x: Any, root: int = 0, op: Op = "sum", groups: Groups | None = None) -> Any:
    """Return the result of `allreduce` on the root, and `x` as JAX arrays on other ranks.

    Args:
      x: see `allreduce`, as for `op`, `groups` and errors.
      root: the rank, or the position within the group if there are `groups`.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.reduce(np.int8(3), root=0, op="max")
      Array(3, dtype=int8)
    """
    return _collective("reduce", x, root=root, op=op, groups=groups)


def all_to_all(x: Any, split_axis: int = 0, concat_axis: int = 0, groups: Groups | None = None) -> Any:
    """Send slice j of `x` on rank i to rank j, and return the received slices joined in rank order, as JAX arrays.

    Args:
      x: see `allreduce`, as for `groups` and errors.
      split_axis: the axis to split, with one slice per rank. The number of ranks must divide its size.
      concat_axis: the axis along which the received slices are joined.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.all_to_all(np.ones((2, 4)), split_axis=0, concat_axis=1).shape
      (2, 4)
    """
    return _collective("all_to_all", x, split_axis=split_axis, concat_axis=concat_axis, groups=groups)


def gather(x: Any, root: int = 0, groups: Groups | None = None) -> Any:
    """Return `x` of all ranks concatenated along axis 0 on the root, and `x` on other ranks, as JAX arrays.

    Args:
      x: see `allreduce`, as for `groups` and errors. Scalars make a vector.
      root: the rank, or the position within the group if there are `groups`.

    Example:
      >>> import jaxdist
      >>> jaxdist.gather(True, root=0)
      Array([ True], dtype=bool)
    """
    return _collective("gather", x, root=root, groups=groups)


def scatter(x: Any, root: int = 0, groups: Groups | None = None) -> Any:
    """Return slice i of the root's `x`, along axis 0, on rank i, as JAX arrays.

    Args:
      x: see `allreduce`, as for `groups` and errors. The number of ranks must divide the first dimension.
      root: the rank, or the position within the group if there are `groups`.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.scatter(np.ones((4, 2)), root=0).shape
      (4, 2)
    """
    return _collective("scatter", x, root=root, groups=groups)


def barrier() -> None:
    """Wait until every process makes this call, with the errors of `allreduce`. Inside a step it does nothing.

    Example:
      >>> import jaxdist
      >>> jaxdist.barrier()
    """
    if not on_device():
        _collective("barrier", [])


def send(x: Any, dst: int) -> None:
    """Send `x` to a process that calls `recv`, without waiting for it.

    Args:
      x: array, Python number, or a pytree of them.
      dst: the receiving rank.

    Raises:
      ValueError: `dst` is invalid.
      TypeError: a leaf is not an array, or this is inside a step; use `jax.lax.ppermute`.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.send(np.int8(3), dst=0)  # one process alone, to itself
      >>> jaxdist.recv(np.int8(0), src=0)
      Array(3, dtype=int8)
    """
    _refuse_in_a_step("send")
    get_context().only(Messages).send(x, dst)


def recv(like: Any, src: int) -> Any:
    """Return the arrays that a process passes to `send`, as JAX arrays with the structure of `like`.

    Args:
      like: array, `jax.ShapeDtypeStruct`, Python number, or a pytree of them, with the expected shapes and dtypes.
      src: the sending rank.

    Raises:
      ValueError: `src` is invalid, or different shapes or dtypes arrived, which are dropped.
      TypeError: this is inside a step; use `jax.lax.ppermute`.
      ControlError: nothing arrived until the timeout.

    Example:
      >>> import jaxdist
      >>> jaxdist.send([1.5], dst=0)
      >>> jaxdist.recv([0.0], src=0)
      [Array(1.5, dtype=float...)]
    """
    _refuse_in_a_step("recv")
    return get_context().only(Messages).recv(like, src)


def _collective(kind: str, tree: Any, **arguments: Any) -> Any:
    if on_device():
        structure, names, leaves = flat(kind, tree)
        function = functools.partial(getattr(in_step, kind), **checked(kind, arguments, jax.lax.axis_size(AXIS)))
        return jax.tree.unflatten(structure, each(kind, names, leaves, function))
    if inside_step():
        raise StepError(
            f"jaxdist.{kind} inside a step, which runs as on one device with the whole batch: sums and means over "
            "the batch need no collective. Put code for each device in jaxdist.per_device"
        )
    return get_context().only(Outside).run(kind, tree, arguments)


def _refuse_in_a_step(kind: str) -> None:
    if inside_step() or on_device():
        raise TypeError(
            f"jaxdist.{kind} inside a step: all devices run one program, so one cannot send alone. Use jax.lax.ppermute"
        )
