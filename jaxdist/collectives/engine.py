"""Collectives between processes, outside a step: the ranks first agree that they make the same call, then data move."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxdist.agreement.description import Description, difference
from jaxdist.agreement.ledger import Entry, Ledger
from jaxdist.agreement.turns import Turns
from jaxdist.collectives.call import Call
from jaxdist.compat import under_no_mesh
from jaxdist.errors import in_words
from jaxdist.runtime import commlog

_DETAILS = "details of an eager collective"
_ADVICE = "Nothing was sent. Every rank must come with the same shapes and dtypes"


@dataclass(frozen=True)
class Prepared:
    """A checked call with its data."""

    call: Call | None  # what to do; None: send
    description: Description  # of it
    leaves: Sequence[Any]  # as the wire loaded them


class Eager:
    """The eager collectives of one context, of two processes or more."""

    def __init__(self, ctx: Any):
        self.ctx = ctx
        self.timeout: float = getattr(ctx, "timeout", 300.0)
        self.debug = os.environ.get("JAXDIST_DEBUG", "0") not in ("", "0")
        self._logs = ctx.is_root and commlog.asked()
        self._sequence = 0
        self._world = Call("barrier").group(ctx.rank, ctx.size)
        self._lock = threading.Lock()  # of threads that call at once, the order is still to be the same on every rank
        if ctx.communicator == "mpi":
            from jaxdist.collectives.mpi import MpiWire as Wire
        else:
            from jaxdist.collectives.xla import XlaWire as Wire
        self.wire = Wire(ctx, self.timeout)
        self._turns, self._ledger = ctx.only(Turns), ctx.only(Ledger)

    @under_no_mesh
    def collective(self, kind: str, prepare: Callable[[Any], Prepared]) -> tuple[Call, list[Any] | None]:
        """Prepares the call, agrees on it with all ranks, and makes it.

        Returns the call, and the result of each leaf: None where this rank's own value stays. None in place of the
        list: this rank acts alone.
        """
        with self._lock:
            return self._collective(kind, prepare)

    def _collective(self, kind: str, prepare: Callable[[Any], Prepared]) -> tuple[Call, list[Any] | None]:
        self._sequence += 1
        self._turns.begin()
        problem, ready = None, None
        try:
            ready = prepare(self.wire)
            mine = ready.description
        except Exception as error:
            problem = error
            mine = Description(kind, problem=in_words(error))
        if self.debug:
            self._compare_aloud(mine, problem, ready)
        entry = Entry(mine.fingerprint.to_bytes(8, "little"), str(mine))
        if ready:
            self._ledger.announce(entry)
        what = lambda: f"{mine} (eager collective {self._sequence})"
        if self.wire.differ(mine.fingerprint, self._sequence, what) or problem:
            self._explain(mine, problem, self.ctx.control.exchange(_DETAILS, mine, self.timeout))
        assert ready is not None
        self._ledger.enter(entry)
        call = ready.call
        assert call is not None
        group = self._world if call.groups is None else call.group(self.ctx.rank, self.ctx.size)
        if self._logs:
            commlog.eager(self._sequence, mine, kind, sum(x.nbytes for x in ready.leaves), group.n)
        if group.n == 1:
            return call, None
        found = self.wire.run(call, ready.leaves, group)
        if self.wire.in_programs:  # else it is done, and a step that was called before it may not be
            self._turns.dispatched(next((x for x in found if isinstance(x, jax.Array)), None))
        return call, found

    def _compare_aloud(self, mine: Description, problem: Exception | None, ready: Prepared | None) -> None:
        nbytes = sum(x.nbytes for x in ready.leaves) if ready else 0
        self.ctx.control.say(
            f"eager collective {self._sequence}: {problem or mine}, {nbytes} bytes, fingerprint {mine.fingerprint:016x}"
        )
        everyone = self.ctx.control.exchange("JAXDIST_DEBUG: an eager collective", mine, self.timeout)
        if problem or len(set(everyone)) > 1:
            self._explain(mine, problem, everyone)

    def _explain(self, mine: Description, problem: Exception | None, everyone: Sequence[Description]) -> None:
        """Raises what is wrong."""
        if problem is not None:
            raise problem
        found = difference(everyone, lambda _: _ADVICE)
        raise ValueError(f"rank {self.ctx.rank}, eager collective {self._sequence}: {found}")

    # --- between two

    @under_no_mesh
    def send(self, prepare: Callable[[Any], Prepared], to: int) -> None:
        """Sends the leaves; does not wait until they are received."""
        try:
            ready = prepare(self.wire)
        except Exception as error:  # the other rank must not wait for it
            self.wire.send(Description("send", problem=in_words(error)), [], to)
            raise
        if self._logs:
            commlog.say(f"{ready.description} to rank {to}: {sum(x.nbytes for x in ready.leaves)} bytes")
        self.wire.send(ready.description, ready.leaves, to)

    @under_no_mesh
    def recv(self, mine: Description, likes: Sequence[jax.ShapeDtypeStruct], source: int) -> list[jax.Array]:
        """Receives leaves of the types described."""

        def accept(theirs: Description) -> Sequence[jax.ShapeDtypeStruct]:
            check_received(mine, theirs, self.ctx.rank, source)
            return likes

        return self.wire.recv(source, f"recv of {mine.values()} from rank {source}", accept)


def check_received(mine: Description, theirs: Description, rank: int, source: int) -> None:
    """Raises if rank `source` sent something else than this rank expects."""
    if theirs.problem:
        raise ValueError(f"rank {rank}: recv from rank {source}: its send failed there: {theirs.problem}")
    # Names may differ: the types count, and their order.
    if [kind for _, kind in theirs.entries] != [kind for _, kind in mine.entries]:
        raise ValueError(
            f"rank {rank}: recv(like, src={source}) expects {mine.values()}, and rank {source} sent "
            f"{theirs.values()}: pass a `like` of the same shapes and dtypes in the same order"
        )


def own(leaf: Any) -> jax.Array:
    """A rank's own value as a result: never the memory of a NumPy array that its owner may change."""
    return leaf if isinstance(leaf, jax.Array) else jax.numpy.array(np.asarray(leaf))
