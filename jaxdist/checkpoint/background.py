"""Background saves: all ranks agree that a save is complete, and the script waits for it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxdist import compat
from jaxdist.agreement.description import first_problem
from jaxdist.agreement.every_rank import patience
from jaxdist.checkpoint.manifest import brief
from jaxdist.control import failfast
from jaxdist.errors import CheckpointError
from jaxdist.runtime.context import Context
from jaxdist.tracebacks import api_boundary

_SLICE = 5.0  # seconds between checks of a waiting rank whether the job is ending
_pending: Saving | None = None


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, step: int):
        self.step = step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @api_boundary
    def wait(self) -> None:
        """Return when the checkpoint is complete and on disk everywhere; raise its error, once."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _start(self, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised by wait()
                self._error = error

        global _pending
        _pending = self
        self._thread = threading.Thread(target=run, name="jaxdist-save")
        self._thread.start()


def await_pending() -> None:
    """Wait for the save in the background, if any, and raise its error."""
    global _pending
    if _pending is not None:
        pending, _pending = _pending, None
        pending.wait()


@functools.cache
def at_exit(ctx: Context) -> None:
    """Make the end of the script wait for the last save, and fail if that failed."""
    # Import here, since modules can no longer register exit handlers in the thread.
    import orbax.checkpoint  # noqa: F401

    def end() -> None:  # before `jaxdist.runtime.farewell`
        if _pending is not None and _pending._error is not None:
            failfast.fail_at_exit(ctx.control, f"the script ended, but its last save had failed: {_pending._error}")

    compat.before_threads_end(lambda: _pending and _pending._thread and _pending._thread.join())
    atexit.register(end)


def together(ctx: Context, what: str, tag: str, work: Callable[[], Any], conclude: Callable[[list[Any]], None]) -> None:
    """Work on each rank, then conclude on the root, by mail, which works in threads; if any fails, all ranks raise."""
    mine, cause = _attempt(work)
    if ctx.is_root:
        verdict = first_problem(what, {0: "interrupted"})
        try:
            results = [mine, *(_await(ctx, tag, what, rank) for rank in range(1, ctx.size))]
            problems = {rank: problem for rank, (problem, _) in enumerate(results) if problem}
            if not problems:
                (problem, _), cause = _attempt(lambda: conclude([value for _, value in results]))
                problems = {0: problem} if problem else {}
            verdict = first_problem(what, problems) if problems else ""
        finally:
            ctx.control.put(tag, verdict)
    else:
        ctx.control.put(tag, mine, to=0)
        verdict = _await(ctx, tag, what, 0)
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C
    if verdict:
        raise CheckpointError(verdict) from cause


def _attempt(work: Callable[[], Any]) -> tuple[tuple[str, Any], BaseException | None]:
    try:
        return ("", work()), None
    except BaseException as error:  # Ctrl-C too: the other ranks would wait for this one
        return (f"{brief(error)} (host {socket.gethostname()})", None), error


def _await(ctx: Context, tag: str, what: str, rank: int) -> Any:
    """Wait for a rank while it lives: the control channel notices its end, and ends this process."""
    with patience(ctx, "save"):
        while not ctx.control.ending:
            with contextlib.suppress(queue.Empty):
                return ctx.control.take(tag, rank, _SLICE)
    raise CheckpointError(f"{what}: rank {ctx.rank} stops because the job is ending")
