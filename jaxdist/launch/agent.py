"""The far end of `jaxdist run --hosts`: starts the ranks of its host, and ends them when the near end is gone.

On standard input comes one line of JSON (`Task`), then the number of each signal to pass on, a line each. The end of
input means that the launcher has died, was killed or lost its connection.
"""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from typing import BinaryIO

from jaxdist.control.process import within
from jaxdist.launch.processes import FAILURE_GRACE_S, Failed, run_job
from jaxdist.launch.ranks import own_processes, thread_environment

# Begins the line by which the launcher hears of the first failure at once: this process ends only after the other
# ranks of its host have.
FAILURE_MARK = b"\0jaxdist exit code "
_REPORT_S = 1.0  # in which it is read, if anybody reads


@dataclass(frozen=True)
class Task:
    """What one host has to run."""

    command: list[str]
    first_rank: int
    count: int
    folder: str
    environment: dict[str, str]
    prefix: bool
    only_rank: int | None

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> int:
    """Runs the task that comes on standard input; returns the exit code of the first rank that failed."""
    orders = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 (a device)
        os.dup2(nothing.fileno(), 0)  # a rank that reads its input must not take the orders
    task = Task(**json.loads(orders.readline()))
    os.chdir(task.folder)
    os.environ.update(task.environment)
    ranks = range(task.first_rank, task.first_rank + task.count)
    commands = own_processes(
        task.command, ranks, thread_environment(task.count), task.prefix, task.only_rank, whole_lines=True
    )
    return run_job(commands, on_start=lambda: _obey(orders), on_failure=_report)


def _obey(orders: BinaryIO) -> None:
    def read() -> None:
        for line in orders:
            os.kill(os.getpid(), int(line))
        for _ in range(2):  # the second ends them at once
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(FAILURE_GRACE_S)

    threading.Thread(target=read, daemon=True).start()


def _report(failed: Failed) -> None:
    within(_REPORT_S, lambda: os.write(2, b"%b%d\n" % (FAILURE_MARK, failed.code)))
