"""Where the main thread is, as its other threads see it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time

from jaxdist.control.stacks import main_thread_line, main_thread_stack

_WAITS = r"in (join|_wait_for_tstate_lock): "  # since Python 3.13; before


def test_from_another_thread() -> None:
    line = stack = ""

    def look() -> None:
        nonlocal line, stack
        end = time.monotonic() + 60
        while not re.search(_WAITS, stack) and time.monotonic() < end:  # at first it is still within start()
            time.sleep(0.01)
            line, stack = main_thread_line(), main_thread_stack()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()  # here
    assert line.startswith(f"{__file__}:")
    assert line.endswith(" in test_from_another_thread")
    assert "thread.join()  # here" in stack
    assert re.search(rf"in test_from_another_thread: .*\n.*{_WAITS}", stack)
    assert len(stack.splitlines()) <= 5  # a job of two ranks prints both


_BUSY = """
import faulthandler, io, sys, threading
from jaxdist.control.stacks import main_thread_line

faulthandler.enable()
sys.setswitchinterval(1e-6)
looks, wanted = [], 5000

def look():
    while len(looks) < wanted:
        looks.append(main_thread_line())

def deep(n):
    yield from deep(n - 1) if n else ()
    yield n

def free(_):
    last = io.FileIO("/dev/null")  # to close it lets other threads run

def call(n):
    list(map(free, range(3)))
    return call(n - 1) + sum(deep(3)) if n else sorted(range(3), key=lambda x: sum(deep(x)))[0]

threads = [threading.Thread(target=look) for _ in range(3)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    call(12)
print(len(looks) >= wanted)
"""


def test_a_busy_thread_is_looked_at_without_harm() -> None:
    # Python 3.11.7 through sys._current_frames, 3.13.0 through faulthandler: a segmentation fault in each of five runs.
    done = subprocess.run([sys.executable, "-c", _BUSY], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
