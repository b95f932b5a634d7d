"""`evaluate`: sums over all examples of a loader, exact on any number of ranks. `gather_for_metrics`: their values."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.collectives.public import allgather
from jaxdist.data.loader import Loader
from jaxdist.data.sampling import Place
from jaxdist.mesh import Sizes
from jaxdist.placements.layouts import Padded
from jaxdist.runtime.context import Context, get_context, parts_of_ranks
from jaxdist.sharding import unshard
from jaxdist.step.tracing import say_once

_AHEAD = 32  # batches that the host may be ahead of the device
_APART = 0.05  # of the largest sum: more than rounding

_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def evaluate(step: Callable[..., Any], *arguments: Any) -> Any:
    """Add up the results of a decorated step over batches: ``evaluate(step, *state, batches)``.

    The step returns sums and counts over the examples of a batch. Their quotients are exact means over the data set,
    for any number of ranks and any batch size. Sums are added in float64, integers without overflow. The host runs up
    to 32 batches ahead of the device.

    Every process calls it. A `jaxdist.loader` is read for one whole epoch. With ``tail="keep"``, the last batch is
    smaller. With ``tail="pad"``, the step's last argument is ``(batch, weight)``. The step is then called twice more on
    the first batch, on two halves of the examples, to check that its sums use the weight.

    Args:
      step: a function ``(*state, batch) -> sums`` decorated with `jaxdist.data_parallel` or `jaxdist.parallel`. `sums`
        is a pytree of arrays of 32 bits or more. In one process, ``jax.jit(step)`` works too.
      *arguments: the arguments of the step, with a loader or an iterable of batches as the last one. Every rank must
        have the same number of batches.

    Returns:
      A pytree with the structure of `sums`, the same on every rank: Python numbers for scalars, NumPy arrays otherwise.

    Raises:
      ValueError: (on every rank) there are no batches, or the step returns one entry per example, 16 bits, or means
        (detected with ``tail="pad"``) instead of sums.
      ControlError: (on every rank) the ranks have different numbers of batches.

    Example:
      >>> import jax.numpy as jnp, jaxdist, numpy as np
      >>> @jaxdist.data_parallel
      ... def eval_step(w, batch):
      ...     return {"loss": jnp.sum((batch - w) ** 2), "count": batch.shape[0]}
      >>> batches = jaxdist.loader(np.arange(5.0), 2, tail="keep")
      >>> sums = jaxdist.evaluate(eval_step, 1.0, batches)
      >>> sums["loss"] / sums["count"]
      3.0
    """
    if not arguments:
        raise TypeError("evaluate(step, *state, batches): there are no batches")
    *state, batches = arguments
    ctx, padded = get_context(), isinstance(batches, Loader) and batches._reader.sampling.pad
    if isinstance(batches, Loader):
        _start(batches, ctx)
    waiting: deque[Any] = deque()
    total, count = None, 0
    for count, batch in enumerate(batches, 1):
        sums = step(*state, batch)
        if count == 1:
            _check(sums, ctx)
            if padded and step not in _checked:
                _checked.add(step)
                _check_weight(step, state, batch, sums)
        for x in jax.tree.leaves(sums):
            getattr(x, "copy_to_host_async", bool)()
        waiting.append(sums)
        if len(waiting) > _AHEAD:
            total = _add(total, waiting.popleft())
    on_every_rank(ctx, "evaluate", lambda: Part(None, (("the number of batches", str(count)),)))
    if not count:
        raise ValueError("evaluate: there is no batch, on any rank. (An iterator that was used up has none)")
    for sums in waiting:
        total = _add(total, sums)
    return jax.tree.map(lambda x: x if np.ndim(x) else x.item(), total)


def _start(batches: Loader, ctx: Context) -> None:
    """Begin an epoch, and warn if the end of it is left out."""
    at, sampling = batches._at, batches._reader.sampling
    if at.position:  # it was restored, or left
        batches._go(Place(at.epoch + 1))
    streams, dropped = batches._reader.streams, sampling.length % sampling.whole
    if ctx.is_root and not (sampling.pad or sampling.keep) and (streams or dropped):
        which = (
            "what fills no batch at the end of the stream" if streams else f"{dropped} of {sampling.length} examples"
        )
        say_once(
            f"evaluate: with tail='drop' the loader leaves out {which} ({sampling.parts} x {sampling.batch_size} in a "
            "step): the result depends on the number of ranks. Use tail='keep'"
        )


def _fetch(x: Any) -> np.ndarray:
    value = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "c": np.complex128}
    return value.astype(wide[value.dtype.kind])


def _add(total: Any, sums: Any) -> Any:
    sums = jax.tree.map(_fetch, sums)
    return sums if total is None else jax.tree.map(np.add, total, sums)


def _check(sums: Any, ctx: Context) -> None:
    """Refuse results that are not sums of all ranks."""
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


def _check_weight(step: Callable[..., Any], state: list[Any], batch: Any, sums: Any) -> None:
    """Sums of two halves of the examples give the sum of all; means, maxima, and sums that ignore the weight do not."""
    examples, weight = batch
    if isinstance(weight, Padded):
        return
    half = weight * (np.arange(len(weight)) % 2 == 0)  # on the devices, if it is there
    halves = [jax.tree.leaves(step(*state, (examples, part))) for part in (half, weight - half)]
    for (path, whole), *parts in zip(jax.tree_util.tree_leaves_with_path(sums), *halves, strict=True):
        a, b, both = map(_fetch, (*parts, whole))
        largest = max(np.max(np.abs(x), initial=0.0) for x in (a, b, both))
        if np.isfinite(both).all() and not np.max(np.abs(a + b - both), initial=0.0) <= _APART * largest:
            told = (f"{x.ravel()[0]:.4g}" + ", …" * bool(x.ndim) for x in (a, b, both))
            raise ValueError(
                f"evaluate: result{jax.tree_util.keystr(path)} of the step is not a sum over the examples with a "
                "weight: the two halves of a batch give {} and {}, the whole gives {}. Return sums and counts, "
                "jnp.sum(losses * weight) and jnp.sum(weight), and divide the results of evaluate".format(*told)
            )


def gather_for_metrics(tree: Any, weight: Any, mesh: Mesh | Sizes | None = None) -> Any:
    """Gather the values that a step computed for the real examples of all ranks. Every process calls it.

    Args:
      tree: arrays with one entry per example, as a decorated step returns them, or this process's own.
      weight: the weight of a loader with ``tail="pad"``, or the weight that the step returned.
      mesh: the mesh of the loader.

    Returns:
      A pytree of NumPy arrays with the structure of `tree`, on every process, without the entries of weight 0. Over an
      epoch, it contains each example once.

    Raises:
      ValueError: an array does not have one entry per example.

    Example:
      >>> import jaxdist, numpy as np
      >>> from jaxdist.data import gather_for_metrics
      >>> gather_for_metrics({"label": np.array([7, 3, 7])}, np.array([1.0, 1.0, 0.0]))["label"].tolist()
      [7, 3]
    """
    ctx = get_context()
    own, parts = ctx.parts(mesh)
    passed = parts_of_ranks(ctx, mesh)
    once = [next((r, of.index(part)) for r, of in enumerate(passed) if part in of) for part in range(parts)]

    def whole(x: Any) -> np.ndarray:
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding):
            return np.asarray(unshard(x))
        rows = np.asarray(x)
        if not rows.ndim or len(own) == parts:
            return rows
        rows = rows.reshape(len(own), -1, *rows.shape[1:])
        everyone = np.asarray(allgather(rows)).reshape(ctx.size, *rows.shape)
        return np.concatenate([everyone[at] for at in once])

    real = whole(weight) > 0

    def select(path: Any, x: Any) -> np.ndarray:
        rows = whole(x)
        if rows.shape[:1] != real.shape:
            name = jax.tree_util.keystr(path) or "tree"
            raise ValueError(f"{name} has shape {rows.shape}, and there are {len(real)} examples with a weight")
        return rows[real]

    return jax.tree_util.tree_map_with_path(select, tree)
