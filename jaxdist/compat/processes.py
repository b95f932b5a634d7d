"""Processes: what grain's workers share with the one that started them, and how Python ends its threads."""

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any


def forget_name(array: Any) -> Any:
    """Return the array, with its shared memory unlinked if a worker sent it that way, so that no exit can leak it."""
    # Grain unlinks the memory when the array is freed. JAX may still hold the array at exit, and Python then warns of
    # a leak. There is no public way to unlink earlier; a grain without this attribute doesn't need it.
    if getattr(array, "_unlink_on_del", False):
        array.shm.unlink()
        array._unlink_on_del = False
    return array


@functools.cache
def end_with_parent() -> None:
    """Exit this worker when its parent process is killed. Grain's workers would wait forever to hand over a batch."""
    # The kernel's parent-death signal would already fire when the thread that started the worker ends.
    parent = multiprocessing.parent_process()

    def wait(parent: Any) -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=wait, args=(parent,), daemon=True).start()


def start_tracker() -> None:
    """Start Python's resource tracker, which cleans up the semaphores and shared memory of a killed process."""
    # In a session of its own, since MPI launchers kill a rank's group; and silent. Python has no option for either.
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    read, tracker._fd = os.pipe()
    os.set_inheritable(read, True)
    main = f"from multiprocessing.resource_tracker import main; main({read})"
    argv = [sys.executable, "-W", "ignore:resource_tracker", "-c", main]
    tracker._pid = os.posix_spawn(sys.executable, argv, os.environ, setsid=True)
    os.close(read)


def before_threads_end(call: Callable[[], None]) -> None:
    """Run `call` when the main thread ends, while executors still accept work."""
    # `atexit` is too late for a thread that is saving with orbax: before Python joins its threads, it stops executors
    # from accepting work (`concurrent.futures.thread._python_exit`, which registers the same way; the last to register
    # runs first). Python 3.9-3.14 have this and nothing public.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(call)  # pyright: ignore[reportAttributeAccessIssue]
