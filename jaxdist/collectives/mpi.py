"""MPI calls from Python, outside programs: compare calls between ranks, and run sums and broadcasts."""

import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import compat
from jaxdist.communicators.mpi_groups import library, world
from jaxdist.errors import ControlError
from jaxdist.runtime.context import Context

_SPIN = 1e-4  # seconds before a waiting rank yields its core
_NAP = 1e-3  # longest sleep between two tests, in seconds
_ELSEWHERE = 2.0  # seconds after which a rank in a different call is not just ahead
_WAITING = "waiting for an eager collective"  # tag of the exchange that finds missing ranks
_PIECE = 1 << 22  # bytes per message: most of it stays in a core's cache
_OPS = {"sum": "SUM", "avg": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}


class HostMpi:
    """The calls of one context, on a communicator of its own: programs in XLA's threads keep no order with them."""

    def __init__(self, ctx: Context):
        self._ctx, self._control = ctx, ctx.control
        self._grace = min(1.0, ctx.timeout / 4)
        self._comm: Any = None
        self._mine, self._all = np.empty(2, np.int64), np.empty(2, np.int64)
        self._broken = ""

    def same(self, fingerprint: int, what: str) -> bool:
        """Check whether all ranks have this fingerprint, 30 times faster than by the channel."""
        if self._broken:
            raise ControlError(
                f"rank {self._ctx.rank}: {what} follows a call that failed ({self._broken}), so the calls no "
                "longer match across ranks. Restart the job"
            )
        if self._comm is None:  # creating a communicator has no timeout: wait for everyone first
            self._control.exchange("the first eager collective", None, self._ctx.timeout)
            pairs = world(self._ctx.rank)
            # Use the communicator that the group comes from: MPICH 4.0 crashes on any other.
            self._comm = pairs.Create_group(pairs.Get_group(), 7000)
        self._mine[:] = fingerprint, ~fingerprint
        try:
            if _WAITING in self._control.tags:
                self._ask(what)  # the others gave up before this rank arrived
            self._wait(self._comm.Iallreduce(self._mine, self._all, op=library().MAX), what)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        high, low = self._all.tolist()
        return high == ~low

    def _wait(self, request: Any, what: str) -> None:
        """Wait for all ranks. After the timeout, or soon if others make a different call, ask."""
        start = asked = time.monotonic()
        elsewhere = math.inf  # when others were first seen in a different call
        while not request.Test():
            now, tags = time.monotonic(), self._control.tags
            elsewhere = min(elsewhere, now) if tags or self._control.left else math.inf
            patience = 0 if _WAITING in tags else _ELSEWHERE
            if now > min(asked + self._ctx.timeout - self._grace, elsewhere + patience):
                if request.Test():
                    return
                self._ask(what)
                asked, elsewhere = now, math.inf
            if now - start > _SPIN:
                time.sleep(min(_NAP, (now - start) / 10))

    def _ask(self, what: str) -> None:
        """Find missing ranks, and raise unless every rank is waiting as this one is."""
        try:
            self._control.exchange(_WAITING, None, self._grace)
        except ControlError as error:
            raise ControlError(
                f"{what}: not every rank came to it (timeout: {self._ctx.timeout:g} s; see jaxdist.init). {error}"
            ) from None

    def run(self, arrays: Sequence[Any], op: str = "", root: int = 0) -> list[jax.Array]:
        """Reduce or broadcast over all ranks; dispatching a program instead takes as long as a message of 64 KiB."""
        results = []
        for x in map(np.asarray, arrays):
            compat.release_dropped()  # reuse the memory of the last result
            memory = np.empty(x.nbytes + 64, np.uint8)  # huge pages; small ones take longer than messages
            start = -memory.ctypes.data % 64  # JAX copies unaligned arrays
            given, out = np.ascontiguousarray(x).reshape(-1), memory[start : start + x.nbytes]
            given, out = (given, out.view(x.dtype)) if op else (given.view(np.uint8), out)
            if not op and self._ctx.rank == root:
                out[:] = given
            step = _PIECE // given.itemsize
            for i in range(0, given.size, step):
                if op:
                    self._comm.Allreduce(given[i : i + step], out[i : i + step], op=getattr(library(), _OPS[op]))
                else:
                    self._comm.Bcast(out[i : i + step], root)
            if op == "avg":
                out /= self._ctx.size
            results.append(jax.device_put(out.view(x.dtype).reshape(x.shape)))
        return results


def reduces(op: str, dtype: np.dtype[Any]) -> bool:
    """Check whether MPI's reduction is right: short integers saturate, and products and extremes differ by NaN."""
    if dtype.kind in "iu":
        return op in ("min", "max") or (op != "avg" and dtype.itemsize >= 4)
    return dtype.char in "fdFD" and op in ("sum", "avg")
