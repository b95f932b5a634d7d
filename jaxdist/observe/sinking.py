"""A sink of metrics at work: in a thread of its own, so that a slow one, or one that fails, can't hold up training."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping

from jaxdist.errors import in_words
from jaxdist.sinks import Sink

_MOST = 100_000  # steps that a sink may be behind
_END, _FAILED_END = 60.0, 5.0  # seconds that the end of a run waits for a sink: other ranks wait too

_log = logging.getLogger("jaxdist")


class Sinking:
    """A sink that is open; gets nothing any more once it has failed."""

    def __init__(self, sink: Sink):
        self._sink, self._name = sink, type(sink).__name__
        self._left_out = False
        self._work: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"jaxdist-{self._name}", daemon=True)
        self._thread.start()

    def drop(self, step: int) -> None:
        """What was logged for this step and later ones is to go."""
        self._put(f"drop({step})", functools.partial(self._sink.drop, step))

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Returns at once."""
        if self._work.qsize() >= _MOST:
            self._leave_out(f"is {_MOST} steps behind")
        self._put(f"step {step}", functools.partial(self._sink.write, step, time, metrics))

    def close(self, failed: bool) -> None:
        """Waits for the sink, but not for ever."""
        self._put("its end", functools.partial(self._sink.close, failed))
        self._work.put(None)
        self._thread.join(patience := _FAILED_END if failed else _END)
        if self._thread.is_alive():
            self._leave_out(f"is still at work {patience:g} s after the end of the run")

    def _put(self, what: str, call: Callable[[], None]) -> None:
        if not self._left_out:
            self._work.put((what, call))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            what, call = work
            try:
                if not self._left_out:
                    call()
            except BaseException as error:  # SystemExit would end this thread in silence
                self._leave_out(f"failed at {what}: {in_words(error)}")

    def _leave_out(self, why: str) -> None:
        if not self._left_out:
            self._left_out = True
            _log.warning("run_log: %s %s. It gets no more metrics; metrics.jsonl has all", self._name, why)
