"""Processes: what grain's workers share with the one that started them, and how Python ends its threads."""

import functools
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any, NoReturn


def forget_name(array: Any) -> Any:
    """Return the array, with its shared memory unlinked if a worker sent it that way, so that no exit can leak it."""
    # Grain unlinks the memory when the array is freed. JAX may still hold the array at exit, and Python then warns of
    # a leak. There is no public way to unlink earlier; a grain without this attribute doesn't need it.
    if getattr(array, "_unlink_on_del", False):
        array.shm.unlink()
        array._unlink_on_del = False
    return array


def guard_readers(
    in_thread: Callable[..., None], in_worker: Callable[..., None], check_worker: Any
) -> Callable[..., None]:
    """Have grain's threads and workers run these functions, and return its own of a worker; the thread's is given."""
    # In grain 0.2.16-0.2.18 a BaseException (sys.exit, CancelledError, a panic in Rust) ends a thread or worker without
    # a word, as os._exit(0) does a worker, and a worker drops a batch it can't pickle: the loop waits, or misses it.
    from absl import flags

    if not flags.FLAGS.is_parsed():  # grain reads some; programs without absl.app parse none
        flags.FLAGS.mark_as_parsed()
    try:
        from grain._src.python.dataset.transformations import prefetch, process_prefetch

        of_thread = prefetch._put_iterator_elements_in_buffer
        of_worker = process_prefetch._put_dataset_elements_in_buffer
    except (ImportError, AttributeError):  # a later grain, left unchanged
        return in_worker
    prefetch._put_iterator_elements_in_buffer = functools.partial(in_thread, of_thread)
    process_prefetch._put_dataset_elements_in_buffer = in_worker
    process_prefetch.ProcessPrefetchDatasetIterator._process_failed = check_worker
    return of_worker


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


_TOOL = 4  # of the numbers that PEP 669 leaves to any tool, the one that fewer take


def watch_exits(note: Callable[[Any], None]) -> None:
    """Call `note` with the code of a SystemExit when it is raised, and with None when it is caught."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None or monitoring.get_tool(_TOOL) is not None:
        # Before Python 3.12, only the calls of `sys.exit` are seen, caught or not.
        python = sys.exit

        def leave(status: Any = None, /) -> NoReturn:
            note(status)
            python(status)

        sys.exit = leave
        return
    raised = lambda _code, _offset, error: note(error.code) if isinstance(error, SystemExit) else None
    caught = lambda _code, _offset, error: note(None) if isinstance(error, SystemExit) else None
    events = monitoring.events
    monitoring.use_tool_id(_TOOL, "jaxdist")
    # `finally` and `with` catch an error and raise it again.
    for event, call in (events.RAISE, raised), (events.RERAISE, raised), (events.EXCEPTION_HANDLED, caught):
        monitoring.register_callback(_TOOL, event, call)
    monitoring.set_events(_TOOL, events.RAISE | events.RERAISE | events.EXCEPTION_HANDLED)
