"""Processes: what grain's workers share with the one that started them, and how Python ends its threads."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any


def forget_name(array: Any) -> Any:
    """The array; if a worker sent it in shared memory, this loses its name, and is freed whatever ends the process."""
    # Grain removes the name with the array, but JAX may still use it at exit: Python then says that it was leaked. No
    # public way does it earlier; a version that keeps its arrays otherwise needs nothing.
    if getattr(array, "_unlink_on_del", False):
        array.shm.unlink()
        array._unlink_on_del = False
    return array


@functools.cache
def end_with_parent() -> None:
    """In a worker: end when the process that started it is killed. Grain's wait for ever to hand over a batch."""
    # A death signal of the kernel would come when the thread ends that started it.
    parent = multiprocessing.parent_process()

    def wait(parent: Any) -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=wait, args=(parent,), daemon=True).start()


def start_quiet_tracker() -> None:
    """Have what removes the semaphores and shared memory of a process that is killed do so without a word."""
    # It is a process of Python's, started with the first semaphore; filters are given to it by `sys.warnoptions` alone.
    sys.warnoptions.append("ignore:resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove("ignore:resource_tracker")


def before_threads_end(call: Callable[[], None]) -> None:
    """Run something when the main thread is at its end and executors of other threads still work."""
    # `atexit` is too late for what a thread does with orbax meanwhile: before Python waits for its threads it forbids
    # new work for executors (`concurrent.futures.thread._python_exit`, which registers itself in the same way; what
    # registered last runs first). Python 3.9-3.14 have this and nothing public.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(call)  # pyright: ignore[reportAttributeAccessIssue]
