"""Collectives on arrays, lists and pytrees: between processes, or inside a decorated step between devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import numpy as np

from jaxdist.collectives import in_step, outside
from jaxdist.collectives.arguments import checked, flat
from jaxdist.collectives.messages import Messages
from jaxdist.errors import StepError
from jaxdist.ir.trace import inside_step, on_device
from jaxdist.runtime.context import get_context

Op = Literal["sum", "prod", "min", "max", "avg"]
Groups = Sequence[Sequence[int]]
Leaf = jax.Array | np.ndarray | np.generic | complex
T = TypeVar("T")


@overload
def allreduce(x: Leaf, op: Op = ..., groups: Groups | None = ...) -> jax.Array: ...
@overload
def allreduce(x: T, op: Op = ..., groups: Groups | None = ...) -> T: ...
def allreduce(x: Any, op: Op = "sum", groups: Groups | None = None) -> Any:
    """Everyone's `x`, reduced, for everyone.

    Every rank must call it, with the same shapes and dtypes; between processes each contributes one `x`, inside a
    decorated step each device does. float16, bfloat16 and narrower floats are added up in float32 and rounded once.
    Booleans: sum and max are "or", prod and min are "and".

    Args:
      x: array, Python number, or pytree of them; any shape; left as it is.
      op: "sum", "prod", "min", "max" or "avg".
      groups: ranks that reduce among themselves, as in ``[[0, 1], [2, 3]]``. A rank in no group acts alone: it gets
        its own `x` back. Default: all ranks.

    Returns:
      Of the structure of `x`: JAX arrays of its shapes and dtypes; "avg" of integers and booleans has the dtype that
      `jnp.mean` gives.

    Raises:
      ValueError: unknown op, bad groups, or another rank made another call: on every rank, and nothing was sent.
      TypeError: not an array, or the op does not exist for its dtype (min and max of complex numbers).
      ControlError: a rank did not come within the timeout of `jaxdist.init`; says which.

    Differentiable for sum and avg, by `jax.grad` outside `jax.jit`: of the sum of all ranks' results.

    Example:
      >>> import jaxdist
      >>> jaxdist.allreduce({"loss": 2.0}, "avg")  # one process alone
      {'loss': Array(2., dtype=float...)}
    """
    return _collective("allreduce", x, op=op, groups=groups)


@overload
def allgather(x: Leaf, axis: int = ..., groups: Groups | None = ...) -> jax.Array: ...
@overload
def allgather(x: T, axis: int = ..., groups: Groups | None = ...) -> T: ...
def allgather(x: Any, axis: int = 0, groups: Groups | None = None) -> Any:
    """Everyone's `x`, joined along an axis in the order of the ranks, for everyone.

    Args:
      x: array, Python number, or pytree of them; the same shapes on every rank.
      axis: along which they are joined; negative: from the end. Scalars make a vector.
      groups: see `allreduce`; the order is that of the ranks in the group.

    Returns:
      Of the structure of `x`: JAX arrays, `axis` larger by the number of ranks.

    Raises:
      ValueError: no such axis, bad groups, or another rank made another call.
      TypeError: not an array.
      ControlError: a rank did not come within the timeout.

    Differentiable (see `allreduce`).

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.allgather(np.ones((4, 4)), axis=1).shape
      (4, 4)
    """
    return _collective("allgather", x, axis=axis, groups=groups)


@overload
def reduce_scatter(x: Leaf, op: Op = ..., axis: int = ..., groups: Groups | None = ...) -> jax.Array: ...
@overload
def reduce_scatter(x: T, op: Op = ..., axis: int = ..., groups: Groups | None = ...) -> T: ...
def reduce_scatter(x: Any, op: Op = "sum", axis: int = 0, groups: Groups | None = None) -> Any:
    """Everyone's `x`, reduced; rank i gets the i-th slice of it along an axis.

    Args:
      x: array or pytree of arrays; the same shapes on every rank.
      op: see `allreduce`.
      axis: along which the result is sliced; its size must be divisible by the number of ranks.
      groups: see `allreduce`.

    Returns:
      Of the structure of `x`: JAX arrays, `axis` smaller by the number of ranks.

    Raises:
      ValueError: a dimension that is not divisible, no such axis, unknown op, bad groups, or another rank made
        another call.
      TypeError: not an array, or no such op for its dtype.
      ControlError: a rank did not come within the timeout.

    Differentiable for sum and avg (see `allreduce`).

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.reduce_scatter(np.ones((4, 4)), "sum", axis=0).shape
      (4, 4)
    """
    return _collective("reduce_scatter", x, op=op, axis=axis, groups=groups)


@overload
def broadcast(x: Leaf, root: int = ..., groups: Groups | None = ...) -> jax.Array: ...
@overload
def broadcast(x: T, root: int = ..., groups: Groups | None = ...) -> T: ...
def broadcast(x: Any, root: int = 0, groups: Groups | None = None) -> Any:
    """The root's `x`, for everyone.

    Args:
      x: array, Python number, or pytree of them; on the others only shapes and dtypes count, and must be the same.
        (For other objects, and where the others do not know the shape: `Context.broadcast`.)
      root: the rank; with groups: the position within the group.
      groups: see `allreduce`.

    Returns:
      The root's `x` as JAX arrays.

    Raises:
      ValueError: no such root, bad groups, or another rank made another call.
      TypeError: not an array.
      ControlError: a rank did not come within the timeout.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.broadcast(np.int8(3), root=0)
      Array(3, dtype=int8)
    """
    return _collective("broadcast", x, root=root, groups=groups)


def reduce(x: Any, root: int = 0, op: Op = "sum", groups: Groups | None = None) -> Any:
    """Everyone's `x`, reduced, for the root; the others get their own `x` back.

    Args:
      x: array, Python number, or pytree of them; the same shapes on every rank.
      root: the rank; with groups: the position within the group.
      op: see `allreduce`.
      groups: see `allreduce`.

    Returns:
      On the root: see `allreduce`. On the others: `x` as JAX arrays.

    Raises:
      ValueError: no such root, unknown op, bad groups, or another rank made another call.
      TypeError: not an array, or no such op for its dtype.
      ControlError: a rank did not come within the timeout.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.reduce(np.int8(3), root=0, op="max")
      Array(3, dtype=int8)
    """
    return _collective("reduce", x, root=root, op=op, groups=groups)


def all_to_all(x: Any, split_axis: int = 0, concat_axis: int = 0, groups: Groups | None = None) -> Any:
    """Rank i's j-th slice goes to rank j, as its i-th.

    Args:
      x: array or pytree of arrays; the same shapes on every rank.
      split_axis: along which `x` is sliced, one slice a rank; must be divisible by the number of ranks.
      concat_axis: along which the slices that arrive are joined.
      groups: see `allreduce`.

    Returns:
      Of the structure of `x`: JAX arrays, `split_axis` smaller and `concat_axis` larger by the number of ranks.

    Raises:
      ValueError: a dimension that is not divisible, no such axis, bad groups, or another rank made another call.
      TypeError: not an array.
      ControlError: a rank did not come within the timeout.

    Differentiable (see `allreduce`).

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.all_to_all(np.ones((2, 4)), split_axis=0, concat_axis=1).shape
      (2, 4)
    """
    return _collective("all_to_all", x, split_axis=split_axis, concat_axis=concat_axis, groups=groups)


def gather(x: Any, root: int = 0, groups: Groups | None = None) -> Any:
    """Everyone's `x`, joined along the first axis, for the root; the others get their own `x` back.

    Args:
      x: array, Python number, or pytree of them; the same shapes on every rank. Scalars make a vector.
      root: the rank; with groups: the position within the group.
      groups: see `allreduce`.

    Returns:
      On the root: JAX arrays, the first axis larger by the number of ranks. On the others: `x` as JAX arrays.

    Raises:
      ValueError: no such root, bad groups, or another rank made another call.
      TypeError: not an array.
      ControlError: a rank did not come within the timeout.

    Example:
      >>> import jaxdist
      >>> jaxdist.gather(True, root=0)
      Array([ True], dtype=bool)
    """
    return _collective("gather", x, root=root, groups=groups)


def scatter(x: Any, root: int = 0, groups: Groups | None = None) -> Any:
    """Rank i gets the i-th slice of the root's `x` along the first axis.

    Args:
      x: array or pytree of arrays, the first dimension divisible by the number of ranks; on the others only shapes
        and dtypes count, and must be the same.
      root: the rank; with groups: the position within the group.
      groups: see `allreduce`.

    Returns:
      Of the structure of `x`: JAX arrays, the first axis smaller by the number of ranks.

    Raises:
      ValueError: a dimension that is not divisible, no such root, bad groups, or another rank made another call.
      TypeError: not an array.
      ControlError: a rank did not come within the timeout.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.scatter(np.ones((4, 2)), root=0).shape
      (4, 2)
    """
    return _collective("scatter", x, root=root, groups=groups)


def barrier() -> None:
    """Wait until every process is here. Inside a step it does nothing: a step is one program on all devices.

    Raises:
      ControlError: a rank did not come within the timeout of `jaxdist.init`; says which.
      ValueError: another rank made another call.

    Example:
      >>> import jaxdist
      >>> jaxdist.barrier()
    """
    if not on_device():
        _collective("barrier", [])


def send(x: Any, dst: int) -> None:
    """Send `x` to another process, which calls `recv`; does not wait for it. Not inside a step.

    Args:
      x: array, Python number, or pytree of them.
      dst: the rank.

    Raises:
      ValueError: no such rank.
      TypeError: not an array, or inside a step (use `jax.lax.ppermute`).

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.send(np.int8(3), dst=0)  # one process alone, to itself
      >>> jaxdist.recv(np.int8(0), src=0)
      Array(3, dtype=int8)
    """
    _refuse_in_a_step("send")
    get_context().only(Messages).send(x, dst)


def recv(like: Any, src: int) -> Any:
    """What another process sends to this one by `send`. Not inside a step.

    Args:
      like: array, `jax.ShapeDtypeStruct`, Python number, or pytree of them: shapes and dtypes of what comes.
      src: the rank.

    Returns:
      Of the structure of `like`: JAX arrays.

    Raises:
      ValueError: no such rank, or other shapes or dtypes came (which are dropped), or the sender's call failed.
      TypeError: inside a step (use `jax.lax.ppermute`).
      ControlError: nothing came within the timeout.

    Example:
      >>> import jaxdist, numpy as np
      >>> jaxdist.send([1.5], dst=0)
      >>> jaxdist.recv([0.0], src=0)
      [Array(1.5, dtype=float...)]
    """
    _refuse_in_a_step("recv")
    return get_context().only(Messages).recv(like, src)


def _collective(kind: str, tree: Any, **arguments: Any) -> Any:
    if on_device():
        structure, leaves = flat(kind, tree)
        options = checked(kind, arguments, in_step.size(), structure, leaves)
        return jax.tree.unflatten(structure, [getattr(in_step, kind)(x, **options) for x in leaves])
    if inside_step():
        raise StepError(
            f"jaxdist.{kind} inside a step, which is what one device does with the whole batch: sums and means over "
            "the batch need no collective. Code for each device belongs in jaxdist.per_device"
        )
    return outside.collective(kind, tree, arguments)


def _refuse_in_a_step(kind: str) -> None:
    if inside_step() or on_device():
        raise TypeError(
            f"jaxdist.{kind} inside a step: all devices run one program, so none sends alone; use jax.lax.ppermute"
        )
