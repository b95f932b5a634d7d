"""How far this process is with a step, and whether its newest call has ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeGuard

import jax

_SMALL = 1 << 16  # elements of an output that may be kept a little longer than the user does


@dataclass(eq=False)
class ActiveCall:
    """A call of a step that this rank has committed to."""

    number: int  # from 1
    since: float  # when; of `time.monotonic`
    over: bool = False  # whether it has ended, as far as was seen
    output: Any = None  # one small array of its result

    def finish(self, result: Any) -> None:
        """The program returned `result`, which may not be computed yet; None: it failed."""
        self.output = _an_array(result)
        self.over = self.output is None

    def finished(self) -> bool | None:
        """Whether it has ended; None if that can't be known: its output was donated to another program."""
        output = self.output
        if output is not None:
            try:
                if output.is_deleted():  # is_ready would crash the process (jax 0.10)
                    return None
                self.over = output.is_ready()
            except RuntimeError:  # donated just now
                return None
            if self.over:
                self.output = None
        return self.over


@dataclass
class Progress:
    """How far this rank is with one step."""

    committed: int = 0  # the last call that this rank has entered for good: nothing can stop it from its collectives
    current: ActiveCall | None = None  # the call committed to; None before the first
    failed: str = ""  # the error that the last call ended with after it was committed to; "" if none

    def commit(self, call: int, watched: bool) -> None:
        """This rank has entered a call for good."""
        self.committed = call
        if watched:
            self.current, self.failed = ActiveCall(call, time.monotonic()), ""

    def fail(self, call: int, error: str) -> None:
        """A call has ended with an error; it counts if it was committed to."""
        if self.current is not None and self.current.number == call:
            self.failed = error
            self.current.finish(None)

    @property
    def busy(self) -> bool:
        """Whether this rank is known to be in a call."""
        return self.current is not None and self.current.finished() is False


def _an_array(tree: Any) -> jax.Array | None:
    """Some array of a step's result, a small one if there is one; cheap if the result ends in one."""
    last: Any = tree
    while isinstance(last, (tuple, list, dict)) and last:
        last = next(reversed(last.values())) if isinstance(last, dict) else last[-1]
    if _can_be_asked(last) and last.size <= _SMALL:
        return last
    arrays = list(islice((x for x in jax.tree.leaves(tree) if _can_be_asked(x)), 16))  # not all: it takes time
    return next((x for x in arrays if x.size <= _SMALL), arrays[0] if arrays else None)


def _can_be_asked(x: Any) -> TypeGuard[jax.Array]:
    """Whether it is an array that knows when it is ready: one of random keys does not."""
    return isinstance(x, jax.Array) and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
