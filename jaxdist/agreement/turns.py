"""One program after the other on each rank, whichever threads call them."""

from __future__ import annotations

import contextlib
import threading

import jax

from jaxdist.runtime.context import Context


class Turns:
    """Programs that talk to other processes, in the order of their calls.

    XLA runs the programs of one thread on CPUs one after the other. Those of two run at once, and would take each
    other's messages."""

    def __init__(self, context: Context):
        self._alone = context.size == 1
        self._thread: threading.Thread | None = None
        self._output: jax.Array | None = None

    def begin(self) -> None:
        """Begin a call: wait for the one before, if a different thread made it."""
        if self._alone or (thread := threading.current_thread()) is self._thread:
            return
        output, self._output, self._thread = self._output, None, thread
        with contextlib.suppress(RuntimeError):  # it was donated to a later program, or its own program failed
            if output is not None:
                output.block_until_ready()

    def dispatched(self, output: jax.Array | None) -> None:
        """The call's program was dispatched; `output`: an array of its result, None if it has ended."""
        self._output = output
