"""The checkpoint that is being written beside the training, and what is done about it when the script ends."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable

from jaxdist import compat
from jaxdist.checkpoint import lock
from jaxdist.control import failfast
from jaxdist.runtime.context import Context
from jaxdist.tracebacks import api_boundary

_pending: Saving | None = None


class Saving:
    """A checkpoint on its way to the disk."""

    def __init__(self, step: int):
        self.step = step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @api_boundary
    def wait(self) -> None:
        """Return when the checkpoint is whole and on disk, on every rank."""
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self, write: Callable[[], None], background: bool) -> None:
        global _pending
        if not background:
            write()
            return

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised by wait()
                self._error = error

        self._thread = threading.Thread(target=run, name="jaxdist-save")
        _pending = self
        self._thread.start()


def await_pending() -> None:
    """Wait for the checkpoint that is written in the background, if any, and raise what went wrong with it."""
    global _pending
    if _pending is not None:
        pending, _pending = _pending, None
        pending.wait()


def _forget() -> None:
    global _pending
    _pending = None


os.register_at_fork(after_in_child=_forget)  # it is the parent's


@functools.cache
def at_exit(ctx: Context) -> None:
    """What is to be done when the script ends; called before the first save.

    It waits for the checkpoint that is being written, gives its directories back, and fails if that one could not be
    written.
    """
    # Here and not in the thread: modules that it imports could not register what they do at the end any more.
    import orbax.checkpoint  # noqa: F401

    def end() -> None:  # before `jaxdist.runtime.farewell`
        lock.release_all()
        if _pending is not None and _pending._error is not None:
            failfast.fail_at_exit(ctx.control, f"the script has ended, and its last save had failed: {_pending._error}")

    compat.before_threads_end(lambda: _pending and _pending._join())
    atexit.register(end)
