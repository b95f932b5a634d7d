"""Find the line that this process's main thread executes, for the messages of other threads."""

import faulthandler
import re
import sys
import tempfile
import threading
import traceback
from types import TracebackType

from jaxdist.sources import of_the_user


def users_line(trace: TracebackType | None) -> str:
    """Return the file and line of the innermost frame in the user's own code, or "" if there are none."""
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if of_the_user(file := frame.f_code.co_filename):
            return f"{file}:{line}"
    return ""


def main_thread_line() -> str:
    """File and line that the main thread executes; of the user's own code, where there is any."""
    main = threading.main_thread().ident or 0
    # To walk them ends in a segmentation fault now and then before Python 3.12 (seen with 3.11.7). What faulthandler
    # does there in its place ends in one later, while a function's last value is freed by C code that lets other
    # threads run, as a JAX array is (cpython#123967, seen with 3.13.0).
    if sys.version_info < (3, 12):
        frames = _told_by_faulthandler(main)
    else:
        inner = sys._current_frames().get(main)
        frames = traceback.StackSummary.extract(traceback.walk_stack(inner), lookup_lines=False) if inner else []
    if not frames:
        return "its end"
    frame = next((frame for frame in frames if of_the_user(frame.filename)), frames[0])
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _told_by_faulthandler(thread: int) -> list[traceback.FrameSummary]:
    """The frames of a thread, the innermost first; none where there are more than a hundred threads."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode(errors="replace")
    own = re.search(rf"^.*hread 0x0*{thread:x} .*\n((?:  .*\n)*)", text, re.MULTILINE)
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own[1] if own else "", re.MULTILINE)
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in found]
