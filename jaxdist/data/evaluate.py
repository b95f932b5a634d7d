"""`evaluate`: exact sums over a loader on any number of ranks. `gather_for_metrics`: all values."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.data.loader import Loader
from jaxdist.data.sampling import Place
from jaxdist.placements.model.layouts import Padded
from jaxdist.runtime.context import Context, get_context
from jaxdist.sharding import unshard
from jaxdist.text import say_once


def evaluate(step: Callable[..., Any], *arguments: Any) -> Any:
    """Add up the results of a decorated step over batches: ``evaluate(step, *state, batches)``. Every process calls it.

    The step returns sums and counts over a batch, whose quotients are exact for any number of ranks and batch size.

    Args:
      step: a decorated function ``(*state, batch) -> sums`` (in one process, ``jax.jit`` works too). `sums` is a pytree
        of arrays of 32 bits or more, which are added in float64 or int64.
      *arguments: the arguments of the step, and last a `jaxdist.loader`, read for one epoch, or an iterable of
        as many batches on every rank.

    Returns:
      A pytree with the structure of `sums`, the same on every rank: Python numbers for scalars, NumPy arrays otherwise.

    Raises:
      ValueError: (on every rank) `batches` is empty, or the step returns one entry per example or 16 bits.
      ControlError: (on every rank) the ranks have different numbers of batches.

    Example:
      >>> import jax.numpy as jnp, jaxdist, numpy as np
      >>> @jaxdist.data_parallel
      ... def eval_step(w, batch):
      ...     return {"loss": jnp.sum((batch - w) ** 2), "count": batch.shape[0]}
      >>> sums = jaxdist.evaluate(eval_step, 1.0, jaxdist.loader(np.arange(5.0), 2, tail="keep"))
      >>> sums["loss"] / sums["count"]
      3.0
    """
    if not arguments:
        raise TypeError("evaluate(step, *state, batches): got no batches")
    *state, batches = arguments
    ctx = get_context()
    if isinstance(batches, Loader):
        _start(batches, ctx)
    total, latest, count = None, None, 0
    for count, batch in enumerate(batches, 1):
        sums = step(*state, batch)
        if count == 1:
            _check(sums, ctx)
        total, latest = _add(total, latest), sums  # while the device computes the next ones
    on_every_rank(ctx, "evaluate", lambda: Part(None, (("the number of batches", str(count)),)))
    if not count:
        raise ValueError("evaluate: got no batches on any rank. Is it an iterator that was used before?")
    total = _add(total, latest)
    return jax.tree.map(lambda x: x if np.ndim(x) else x.item(), total)


def _start(batches: Loader, ctx: Context) -> None:
    """Begin an epoch, and warn if its last examples will be dropped."""
    at, sampling = batches._at, batches._reader.sampling
    if at.position:  # it was restored, or left
        batches._go(Place(at.epoch + 1))
    streams, dropped = batches._reader.streams, sampling.length % sampling.batch_size
    if ctx.is_root and not sampling.keep and (streams or dropped):
        which = "a partial batch at the end of the stream" if streams else f"{dropped} of {sampling.length} examples"
        say_once(
            f"evaluate: with tail='drop' the loader leaves out {which} ({sampling.batch_size} in a step): the result "
            "depends on the batch size. Use tail='keep'"
        )


def _add(total: Any, sums: Any) -> Any:
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "c": np.complex128}
    values = jax.tree.map(lambda x: np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x), sums)
    values = jax.tree.map(lambda x: x.astype(wide[x.dtype.kind]), values)
    return values if total is None else jax.tree.map(np.add, total, values)


def _check(sums: Any, ctx: Context) -> None:
    """Refuse results that are not sums over all ranks."""
    leaves = jax.tree_util.tree_leaves_with_path(sums, is_leaf=lambda x: isinstance(x, Padded))
    for path, x in leaves:
        name = f"evaluate: result{jax.tree_util.keystr(path)} of the step"
        sharding, dtype = getattr(x, "sharding", None), np.dtype(jax.dtypes.result_type(x))
        if isinstance(x, Padded) or (isinstance(x, jax.Array) and not x.is_fully_replicated):
            raise ValueError(
                f"{name} has shape {np.shape(x)} and is split over the devices, like one entry per example. Return the "
                "sum, or use jaxdist.data.gather_for_metrics for the value of each example"
            )
        if ctx.size > 1 and not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{name} covers this rank's examples only, and there are {ctx.size} ranks: decorate the step with "
                "jaxdist.data_parallel"
            )
        if dtype.kind not in "fiuc" or dtype.itemsize < 4:
            raise ValueError(f"{name} is {dtype}, which can't hold sums: sum in 32 bits, jnp.sum(x, dtype=jnp.float32)")
    if not leaves:
        raise ValueError(f"evaluate: the step returns {sums!r}: expected sums, such as a dict of arrays")


def gather_for_metrics(tree: Any) -> Any:
    """Gather the values that a decorated step returned for each example. Every process calls it.

    Args:
      tree: arrays with one entry per example, as a decorated step returns them. Return labels from the step, too.

    Returns:
      NumPy arrays in the tree's structure, the same on every process: the examples of all processes in the batch's
      order. Over an epoch with ``tail="keep"``, they contain each example once.

    Raises:
      ValueError: an array is this process's own, and there are others.

    Example:
      >>> import jaxdist, numpy as np
      >>> from jaxdist.data import gather_for_metrics
      >>> step = jaxdist.data_parallel(lambda batch: batch["label"])
      >>> gather_for_metrics(step({"label": np.array([7, 3])})).tolist()
      [7, 3]
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if get_context().size > 1 and not isinstance(getattr(x, "sharding", None), NamedSharding):
            raise ValueError(
                f"gather_for_metrics: {jax.tree_util.keystr(path) or 'tree'} holds this process's examples only: "
                "return it from the decorated step, together with the predictions"
            )
    return jax.tree.map(np.asarray, unshard(tree))
