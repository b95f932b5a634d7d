"""MPI calls from Python, outside of programs: whether all ranks make the same call, and the commonest sums."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
import numpy as np

from jaxdist import compat
from jaxdist.communicators.mpi_groups import library, world
from jaxdist.errors import ControlError
from jaxdist.runtime.context import Context

_SPIN = 1e-4  # seconds before a rank that waits lets others have its core
_NAP = 1e-3  # seconds of sleep at most between two tests
_ELSEWHERE = 2.0  # seconds after which a rank seen in another call is not just ahead of this one
_WAITING = "waiting for an eager collective"  # tag of the exchange that finds out who is missing
_PIECE = 1 << 22  # bytes of one message: most of it stays in a core's cache
_OPS = {"sum": "SUM", "avg": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}


class HostMpi:
    """The calls of one context, through a communicator of their own.

    Programs run in XLA's threads, so that their messages are in no order with these.
    """

    def __init__(self, ctx: Context):
        self._ctx, self._control = ctx, ctx.control
        self._grace = min(1.0, ctx.timeout / 4)
        self._comm: Any = None
        self._mine, self._all = np.empty(2, np.int64), np.empty(2, np.int64)
        self._broken = ""

    def same(self, fingerprint: int, what: str) -> bool:
        """Whether all ranks have this fingerprint; waits for them. The control channel takes 30 times as long."""
        if self._broken:
            raise ControlError(
                f"rank {self._ctx.rank}: {what} comes after one that failed ({self._broken}): the ranks' calls no "
                "longer fit together, start the job again"
            )
        if self._comm is None:  # making a communicator knows no timeout: see first that everyone is there
            self._control.exchange("the first eager collective", None, self._ctx.timeout)
            pairs = world(self._ctx.rank)
            # Of the communicator that the group is from: MPICH 4.0 crashes on another one's.
            self._comm = pairs.Create_group(pairs.Get_group(), 7000)
        self._mine[:] = fingerprint, ~fingerprint
        try:
            if _WAITING in self._control.tags:
                self._ask(what)  # the others gave up before this rank came
            self._wait(self._comm.Iallreduce(self._mine, self._all, op=library().MAX), what)
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        high, low = self._all.tolist()
        return high == ~low

    def _wait(self, request: Any, what: str) -> None:
        """Until all have come. After the timeout, or soon if others are seen in another call, ask who is missing."""
        start = asked = time.monotonic()
        elsewhere = math.inf  # when others were first seen in another call
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
        """Who is missing? Raises, unless everyone waits as this rank does."""
        try:
            self._control.exchange(_WAITING, None, self._grace)
        except ControlError as error:
            raise ControlError(
                f"{what}: not every rank came to it (timeout: {self._ctx.timeout:g} s; see jaxdist.init). {error}"
            ) from None

    def allreduce(self, x: np.ndarray, op: str) -> jax.Array:
        """The reduction over all ranks.

        To dispatch a program takes as long as a message of 64 KiB, and the pages of a large result, new to the process,
        more than all messages. NumPy asks for huge ones.
        """
        compat.release_dropped()  # the memory of the last result serves for this one
        memory = np.empty(x.nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64  # JAX copies what is not aligned
        given, out = np.ascontiguousarray(x).reshape(-1), memory[start : start + x.nbytes].view(x.dtype)
        step = _PIECE // x.itemsize
        for i in range(0, x.size, step):
            self._comm.Allreduce(given[i : i + step], out[i : i + step], op=getattr(library(), _OPS[op]))
        if op == "avg":
            out /= self._ctx.size
        return jax.device_put(out.reshape(x.shape))


def reduces(op: str, dtype: np.dtype[Any]) -> bool:
    """Whether MPI's operation is the right one: not all types are MPI's, and its extremes lose NaN."""
    return op != "avg" if dtype.kind in "iu" else dtype.char in "fdFD" and op not in ("min", "max")
