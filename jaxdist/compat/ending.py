"""How Python ends a process."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from typing import Any


def on_exit_code(note: Callable[[Any], None]) -> None:
    """Have `note` told the code of the SystemExit that ends the script, before the functions of atexit run.

    Python tells nobody: neither excepthook nor atexit. But the interpreter then asks the exception for its `code`, with
    no frame of Python on the stack; so that attribute is one of ours. (Seen to work with Python 3.8 to 3.13.)
    """
    members = gc.get_referents(SystemExit.__dict__)[0]
    code = members["code"]

    def get(error: SystemExit) -> Any:
        value = code.__get__(error)
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            note(value)
        return value

    members["code"] = property(get, code.__set__, code.__delete__)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def before_threads_end(call: Callable[[], None]) -> None:
    """Run something when the main thread is at its end and executors of other threads still work.

    `atexit` is too late for what a thread does with orbax meanwhile: before Python waits for its threads it forbids
    new work for executors (`concurrent.futures.thread._python_exit`, which registers itself in the same way; what
    registered last runs first). Python 3.9-3.14 have this and nothing public.
    """
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(call)  # pyright: ignore[reportAttributeAccessIssue]
