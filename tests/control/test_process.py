"""A rank that ends while nobody reads what it says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

from jaxdist.control.process import within


def stuck(script: str) -> int:
    """The exit code of a process whose standard error is a full pipe that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    try:
        command = [sys.executable, "-c", f"import sys, time\nfrom jaxdist.control.process import Process\n{script}"]
        return subprocess.run(command, stderr=writing, timeout=60, check=False).returncode
    finally:
        os.close(reading)
        os.close(writing)


def test_a_message_that_nobody_reads_does_not_keep_a_rank_from_ending() -> None:
    assert stuck("Process(1).end_because_of('rank 0 failed', 0.0, stacks=True); time.sleep(300)") == 1


def test_nor_a_traceback() -> None:
    script = """
import socket
from jaxdist.control import failfast
class Control:
    rank, size, process = 1, 2, Process(1)
    who = staticmethod(str)
    def alarm(self, message, **how): pass
failfast.install(Control(), failfast.ScriptExit())
raise ValueError('boom')
"""
    assert stuck(script) == 1


def test_what_blocks_is_left_behind() -> None:
    done = threading.Event()
    assert within(60.0, done.set)
    assert done.is_set()
    assert not within(0.05, lambda: threading.Event().wait(30.0))
