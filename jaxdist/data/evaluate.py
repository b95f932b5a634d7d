"""`evaluate`: sums over all examples of a loader, exact on any number of ranks."""

from __future__ import annotations

import logging
import operator
import weakref
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.data.loader import Loader
from jaxdist.data.sampling import Place
from jaxdist.placements.layouts import Padded
from jaxdist.runtime.context import Context, get_context
from jaxdist.step.tracing import say_once

_AHEAD = 32  # batches that the host may be ahead of the device
_APART = 0.05  # of the largest sum: more than rounding
_EXACT = "Return sums and counts, jnp.sum(losses * weight) and jnp.sum(weight), and divide what evaluate returns"

_checked: weakref.WeakSet[Any] = weakref.WeakSet()
_log = logging.getLogger("jaxdist")


def evaluate(step: Callable[..., Any], *arguments: Any, limit: int | None = None) -> Any:
    """Add up what a decorated step returns for each batch: ``evaluate(step, *state, batches)``.

    The step returns sums and counts over the examples of a batch; their quotients are then exact means over the data
    set, whatever the number of ranks and the batch size. Nothing waits for the device before the last batch, but where
    the host is 32 batches ahead. Sums are added in float64, integers without overflow.

    Every process calls it. With a `jaxdist.loader` it goes over one whole epoch. With ``tail="keep"`` the last batch is
    smaller. With ``tail="pad"`` the step's last argument is ``(batch, weight)``, and the first time the step is called
    twice more, on two halves of the examples, to see that its sums heed the weight.

    Args:
      step: ``(*state, batch) -> sums``, decorated with `jaxdist.data_parallel` or `jaxdist.parallel`; `sums` is a
        pytree of arrays of 32 bits or more, typically a dict. On one process ``jax.jit(step)`` does as well.
      *arguments: those of the step; in place of the batch, which comes last, a loader or another iterable of batches,
        of equal number on every rank.
      limit: at most so many batches: of a loader that shuffles the same ones in each call.

    Returns:
      Of the structure of `sums`, the same on every rank: Python numbers for scalars, else numpy arrays.

    Raises:
      ValueError: (on every rank) there is no batch; the step returns something else than sums: an entry an example, 16
        bits, means (seen with ``tail="pad"``), or what is not of all ranks.
      ControlError: (on every rank) a rank has more batches than another.

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
    if limit is not None and operator.index(limit) < 1:
        raise ValueError(f"evaluate(limit={limit}): expected a positive number of batches")
    *state, batches = arguments
    ctx, padded = get_context(), isinstance(batches, Loader) and batches._reader.sampling.pad
    if isinstance(batches, Loader):
        _start(batches, limit, ctx)
    waiting: deque[Any] = deque()
    total, count = None, 0
    for batch in islice(batches, limit):
        sums = step(*state, batch)
        if count == 0:
            _check(sums, ctx)
            if padded and not _is_checked(step):
                _check_weight(step, state, batch, sums)
        for x in jax.tree.leaves(sums):
            getattr(x, "copy_to_host_async", bool)()
        waiting.append(sums)
        count += 1
        if len(waiting) > _AHEAD:
            total = _add(total, waiting.popleft())
    on_every_rank(ctx, "evaluate", lambda: Part(None, (("the number of batches", str(count)),)))
    if not count:
        raise ValueError("evaluate: there is no batch, on any rank. (An iterator that was used up has none)")
    for sums in waiting:
        total = _add(total, sums)
    return jax.tree.map(lambda x: x if np.ndim(x) else x.item(), total)


def _start(batches: Loader, limit: int | None, ctx: Context) -> None:
    """At the begin of an epoch; and say what the result depends on beside the examples."""
    at, sampling = batches._at, batches._reader.sampling
    if limit is not None and sampling.shuffle:
        batches._go(Place())
    elif at.position:  # it was restored, or left
        batches._go(Place(at.epoch + 1))
    known = not batches._reader.streams  # how many examples there are
    dropped = sampling.length % sampling.whole if known else None
    if sampling.pad or sampling.keep or dropped == 0 or not ctx.is_root:
        return
    if limit is None or (known and limit >= len(batches)):
        which = f"{dropped} of {sampling.length} examples" if known else "what fills no batch at the end of the stream"
        say_once(
            f"evaluate: with tail='drop' the loader leaves out {which}, as {sampling.parts} parts take "
            f"{sampling.batch_size} each in a step: the result depends on the number of ranks. Make it with tail='keep'"
        )


def _fetch(x: Any) -> np.ndarray:
    value = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "c": np.complex128}
    return value.astype(wide[value.dtype.kind])


def _add(total: Any, sums: Any) -> Any:
    sums = jax.tree.map(_fetch, sums)
    return sums if total is None else jax.tree.map(np.add, total, sums)


def _check(sums: Any, ctx: Context) -> None:
    """What a step returns has to be sums, and of all ranks."""
    leaves = jax.tree_util.tree_leaves_with_path(sums, is_leaf=lambda x: isinstance(x, Padded))
    for path, x in leaves:
        name = f"evaluate: result{jax.tree_util.keystr(path)} of the step"
        sharding, dtype = getattr(x, "sharding", None), np.dtype(jax.dtypes.result_type(x))
        if isinstance(x, Padded) or (isinstance(x, jax.Array) and not x.is_fully_replicated):
            raise ValueError(
                f"{name} has shape {np.shape(x)} and is split over the devices: an entry an example, it seems. Return "
                "the sum; jaxdist.gather_for_metrics takes what each example gives"
            )
        if ctx.size > 1 and not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{name} is of this rank's examples alone, and there are {ctx.size} ranks: decorate the step with "
                "jaxdist.data_parallel"
            )
        if dtype.kind not in "fiuc" or dtype.itemsize < 4:
            raise ValueError(
                f"{name} is {dtype}, which does not hold sums: sum in 32 bits, jnp.sum(x, dtype=jnp.float32)"
            )
    if not leaves:
        raise ValueError(f"evaluate: the step returns {sums!r}: expected sums, such as a dict of arrays")


def _is_checked(step: Any) -> bool:
    seen = step in _checked
    _checked.add(step)
    return seen


def _check_weight(step: Callable[..., Any], state: list[Any], batch: Any, sums: Any) -> None:
    """Sums of two halves of the examples give the sum of all; means, maxima, and sums that ignore the weight do not."""
    examples, weight = batch
    if isinstance(weight, Padded):
        return
    half = weight * (np.arange(len(weight)) % 2 == 0)  # on the devices, if it is there
    halves = [step(*state, (examples, part)) for part in (half, weight - half)]
    for (path, whole), *parts in zip(
        jax.tree_util.tree_leaves_with_path(sums), *(jax.tree.leaves(x) for x in halves), strict=True
    ):
        (a, b), both = map(_fetch, parts), _fetch(whole)
        largest = max(np.max(np.abs(x), initial=0.0) for x in (a, b, both))
        if np.isfinite(both).all() and not np.max(np.abs(a + b - both), initial=0.0) <= _APART * largest:
            raise ValueError(
                f"evaluate: result{jax.tree_util.keystr(path)} of the step is no sum over the examples with a weight: "
                f"{_brief(a)} of one half and {_brief(b)} of the other, but {_brief(both)} of both. {_EXACT}"
            )


def _brief(x: np.ndarray) -> str:
    return f"{x.item():.4g}" if x.ndim == 0 else f"{x.ravel()[0]:.4g}, …"
