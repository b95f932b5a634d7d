"""How long a collective between processes takes, and the bandwidth that makes: what `jaxdist bench` shows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.collectives import public as jd
from jaxdist.runtime.context import Context

# Samples of a measurement: fewer where they would take longer than asked for.
_MOST, _LEAST = 20, 3
_TAG = "jaxdist bench"


@dataclass(frozen=True)
class Measurement:
    """One collective at one size.

    Attributes:
      collective: its name.
      size: bytes asked for; 0 for a barrier.
      nbytes: bytes measured: `size` rounded down to whole elements of each rank.
      samples: how many times the clock was read, on every rank.
      calls: in a sample, one after another.
      median_s: seconds a call, of the slowest rank in each sample.
      min_s: of the fastest sample.
      max_s: of the slowest sample.
      algorithm_gb_s: `nbytes` / `median_s`, in 1e9 bytes per second.
      bus_gb_s: that times `bus_factor`.
    """

    collective: str
    size: int
    nbytes: int
    samples: int
    calls: int
    median_s: float
    min_s: float
    max_s: float
    algorithm_gb_s: float
    bus_gb_s: float


def _ring(x: Any, ctx: Context) -> Any:
    jd.send(x, (ctx.rank + 1) % ctx.size)
    return jd.recv(x, (ctx.rank - 1) % ctx.size)


_CALLS: dict[str, Callable[[Any, Context], Any]] = {
    "allreduce": lambda x, _: jd.allreduce(x),
    "allgather": lambda x, _: jd.allgather(x),
    "reduce_scatter": lambda x, _: jd.reduce_scatter(x),
    "broadcast": lambda x, _: jd.broadcast(x),
    "reduce": lambda x, _: jd.reduce(x),
    "all_to_all": lambda x, _: jd.all_to_all(x),
    "gather": lambda x, _: jd.gather(x),
    "scatter": lambda x, _: jd.scatter(x),
    "sendrecv": _ring,
    "barrier": lambda x, _: jd.barrier(),
}
COLLECTIVES = tuple(_CALLS)

# The size is that of all ranks' parts together, on the input of these two else on each rank's whole buffer.
_PARTS_IN = ("allgather", "gather")
_PARTS = (*_PARTS_IN, "reduce_scatter", "all_to_all", "scatter")


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth: what each rank's link carries for each byte of the size.

    Args:
      collective: one of `COLLECTIVES`.
      ranks: number of processes.

    Example:
      >>> bus_factor("allreduce", 4), bus_factor("allgather", 4), bus_factor("broadcast", 4)
      (1.5, 0.75, 1.0)

    Source: nccl-tests, doc/PERFORMANCE.md; src/gather.cu, scatter.cu and sendrecv.cu for those three.
    """
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in _PARTS else 1.0


def bandwidths(collective: str, nbytes: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s (1e9 bytes per second).

    Args:
      collective: one of `COLLECTIVES`.
      nbytes: the size (see `elements`).
      seconds: a call takes.
      ranks: number of processes.

    Example:
      >>> bandwidths("allreduce", 4_000_000, 0.002, ranks=4)
      (2.0, 3.0)
    """
    algorithm = nbytes / seconds / 1e9
    return algorithm, algorithm * bus_factor(collective, ranks)


def elements(collective: str, size: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """Elements of each rank's input, and the bytes that count as the size.

    allreduce, broadcast, reduce, sendrecv: the size of a rank's array. allgather, gather: of the result, all parts
    together. reduce_scatter, all_to_all, scatter: of the input, all parts together.

    Args:
      collective: one of `COLLECTIVES`.
      size: bytes; rounded down to whole elements, with parts to as many for each rank.
      itemsize: bytes of an element.
      ranks: number of processes.

    Raises:
      ValueError: less than one element.

    Example:
      >>> elements("allgather", 4096, itemsize=4, ranks=2)
      (512, 4096)
      >>> elements("scatter", 4096, itemsize=4, ranks=3)
      (1023, 4092)
    """
    if collective == "barrier":
        return 0, 0
    unit = ranks if collective in _PARTS else 1
    whole = size // (itemsize * unit) * unit
    if whole == 0:
        raise ValueError(
            f"size {size} B is too small for {collective}: {unit} element(s) of {itemsize} bytes are the least "
            f"between {ranks} ranks"
        )
    return whole // ranks if collective in _PARTS_IN else whole, whole * itemsize


def sampling(call: float, seconds: float) -> tuple[int, int]:
    """How many samples to take, and how many calls make one.

    Short calls are timed many at once, or the clock would mostly see how far apart the ranks leave a barrier.

    Args:
      call: seconds that one takes.
      seconds: of the measurement.

    Example:
      >>> sampling(1e-4, seconds=0.5), sampling(0.1, seconds=0.5), sampling(10.0, seconds=0.5)
      ((20, 250), (5, 1), (3, 1))
    """
    call = max(call, 1e-7)
    calls = max(1, int(seconds / _MOST / call))
    return max(_LEAST, min(_MOST, int(seconds / calls / call))), calls


def measure(ctx: Context, collective: str, size: int, dtype: str, seconds: float) -> Measurement:
    """Times a collective; every rank calls it, and gets the same numbers.

    After two calls to compile and warm up, the ranks agree on the number of calls. In each sample they start together,
    and the slowest one's time counts.

    Args:
      ctx: the job's context.
      collective: one of `COLLECTIVES`.
      size: bytes (see `elements`).
      dtype: of the elements.
      seconds: to spend, about; three samples of one call are the least.

    Raises:
      ValueError: a size of less than one element.

    Example:
      >>> import jaxdist
      >>> measure(jaxdist.init(), "allreduce", 4096, "float32", seconds=0.01).nbytes
      4096
    """
    count, nbytes = elements(collective, size, jnp.dtype(dtype).itemsize, ctx.size)
    x = jax.block_until_ready(jnp.ones(count, dtype))
    call = _CALLS[collective]

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            jax.block_until_ready(call(x, ctx))
        return (time.perf_counter() - start) / calls

    timed(2)
    trial = max(ctx.control.exchange(_TAG, timed(1)))
    if trial < seconds / 10:  # one call may have had bad luck
        trial = max(ctx.control.exchange(_TAG, timed(int(seconds / 10 / trial))))
    samples, calls = sampling(trial, seconds)
    mine = []
    for _ in range(samples):
        ctx.barrier()
        mine.append(timed(calls))
    times = [max(of_ranks) for of_ranks in zip(*ctx.control.exchange(_TAG, mine), strict=True)]
    median = statistics.median(times)
    return Measurement(
        collective, 0 if collective == "barrier" else size, nbytes, samples, calls, median, min(times), max(times),
        *bandwidths(collective, nbytes, median, ctx.size),
    )  # fmt: skip
