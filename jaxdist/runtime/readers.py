"""grain's threads and worker processes: errors and results of the user's code there reach the loop over batches."""

import functools
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from jaxdist import compat
from jaxdist.errors import in_words

_WHY = {
    0: ", before its work was done: do the source, transform=, or the script itself call os._exit or sys.exit?",
    -signal.SIGBUS: " (SIGBUS): is /dev/shm full? Batches go through it (docker run --shm-size=8g; fewer workers)",
    -signal.SIGKILL: " (SIGKILL): did the system run out of memory?",
}


@functools.cache
def guard() -> Callable[..., None]:
    """Put the functions below around grain's, and return grain's own of a worker."""
    return compat.guard_readers(_read_in_thread, read_in_worker, _check_worker)


def _read_in_thread(read: Callable[..., None], *, buffer: Any, **kwargs: Any) -> None:
    try:
        read(buffer=buffer, **kwargs)
    except BaseException as error:
        buffer.put((None, None, error))


def read_in_worker(*, buffer: Any, **kwargs: Any) -> None:
    """Run a worker process; public, since it is pickled by its name."""
    parent: Any = multiprocessing.parent_process()
    # If that is killed, grain would wait forever to hand over a batch. (The kernel's parent-death signal would already
    # come when the thread that started the worker ends.)
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    put = buffer.put
    buffer.put = lambda parts, timeout=None: put(_Message(parts), timeout=timeout)
    try:
        guard()(buffer=buffer, **kwargs)
    except BaseException as error:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
        buffer.put((None, None, None, error, None))


class _Message:
    """A batch, two positions, an error and its traceback; an error in their place if they can't be sent."""

    def __init__(self, parts: tuple[Any, ...]):
        self._parts = parts

    def __reduce__(self) -> Any:
        *_, error, trace = self._parts
        problem = error
        for dumps in (ForkingPickler.dumps, cloudpickle.dumps):  # the second: classes of the user's script
            try:
                data = bytes(dumps(self._parts))
                if error is not None:
                    pickle.loads(data)  # some exceptions pickle, and do not unpickle
                return pickle.loads, (data,)
            except BaseException as failure:
                problem = error or failure
        what = "" if error else "a worker process can't send its batch: "
        return tuple, ((None, None, None, RuntimeError(what + in_words(problem)), trace),)


def _check_worker(iterator: Any) -> bool:
    """Raise an error if the worker has ended and left nothing to read."""
    worker = iterator._prefetch_process
    if worker is None or worker.exitcode is None or not iterator._buffer.empty():
        return False
    code = worker.exitcode
    raise RuntimeError(f"a worker process of the loader ended with exit code {code}{_WHY.get(code, '')}") from None
