"""Where the main thread of this process is, for the messages of its other threads."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_JAXDIST = f"{Path(__file__).parent}/"


def main_thread_line() -> str:
    """File and line that the main thread executes; of the user's own code, where there is any."""
    frame = _main_thread()
    if frame is None:
        return "its end"
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append((code.co_filename, f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"))
        frame = frame.f_back
    foreign = ("<frozen", _JAXDIST, *_LIBRARIES)
    return next((line for file, line in lines if not file.startswith(foreign)), lines[0][1])


def main_thread_stack() -> str:
    """All of its Python frames, the innermost last, as a traceback shows them."""
    frame = _main_thread()
    return "its main thread is at its end" if frame is None else "".join(
        ["its main thread (most recent call last):\n", *traceback.format_stack(frame)]
    ).rstrip()  # fmt: skip


def _main_thread() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
