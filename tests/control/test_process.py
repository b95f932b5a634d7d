"""A rank that ends while nobody reads what it says."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

from jaxdist.control.process import within

# The second one fails of an error that its hooks print.
STUCK = [
    "Process(1).end_because_of('rank 0 failed', 0.0, stacks=True); time.sleep(300)",
    """
from jaxdist.control import failfast
class Control:
    rank, size, process = 1, 2, Process(1)
    who = staticmethod(str)
    def alarm(self, message, **how): pass
failfast.install(Control(), failfast.ScriptExit())
raise ValueError('boom')
""",
]


def test_what_nobody_reads_does_not_keep_a_rank_from_ending() -> None:
    """A message, or a traceback, into a full pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    begin = "import time\nfrom jaxdist.control.process import Process\n"
    ranks = [subprocess.Popen([sys.executable, "-c", begin + script], stderr=writing) for script in STUCK]
    try:
        assert [rank.wait(60) for rank in ranks] == [1, 1]
    finally:
        for rank in ranks:
            rank.kill()
        os.close(reading)
        os.close(writing)


def test_what_blocks_is_left_behind() -> None:
    done = threading.Event()
    assert within(60.0, done.set)
    assert done.is_set()
    assert not within(0.05, lambda: threading.Event().wait(30.0))
