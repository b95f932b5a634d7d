"""This machine's ranks as processes of our own, told who they are as torchrun tells its own."""

import os
import re
import socket
import sys
from collections.abc import Mapping

from jaxdist.launch.command import Command
from jaxdist.launch.output import LineFilter

# What a rank says before it ends because of another one (`jaxdist.control`).
CAUSE = re.compile(
    rb"\[jaxdist rank \d+\] ((rank \d+) \([^)]*, pid \d+\)"
    rb"(?:: | failed: | ended its script | was interrupted| died without | can't be reached ).*)"
)


def own_processes(
    command: list[str],
    ranks: range,
    environment: Mapping[str, str],
    prefix: bool,
    only_rank: int | None,
    *,
    whole_lines: bool = False,
) -> list[Command]:
    """The processes of `ranks`, which are all that run on this machine."""
    alone = len(ranks) == 1 and not whole_lines
    shared = {**environment, "LOCAL_WORLD_SIZE": str(len(ranks))}
    if not alone and sys.stdout.isatty():
        # Their output comes through pipes, where Python would hold it back until it has 8 KiB.
        shared = {"PYTHONUNBUFFERED": "1", **shared}
    return [
        Command(
            name=f"rank {rank}",
            argv=command,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
            line_filter=_lines_of(rank, prefix, only_rank, alone),
            cause=CAUSE,
        )
        for local_rank, rank in enumerate(ranks)
    ]


def thread_environment(ranks: int) -> dict[str, str]:
    """Shares the cores out: N processes with a thread per core each would fight for them.

    XLA's CPU client reads PJRT_NPROC, not OMP_NUM_THREADS. What the user has set stays.
    """
    if ranks == 1:
        return {}
    threads = str(max(1, cores() // ranks))
    names = ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: threads for name in names if name not in os.environ}


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    """A TCP port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _lines_of(rank: int, prefix: bool, only_rank: int | None, alone: bool) -> LineFilter | None:
    """Line by line: what ranks write in pieces (all print()s under PYTHONUNBUFFERED, tracebacks) would mix."""
    if only_rank is not None and rank != only_rank:
        return lambda line: None
    if prefix:
        return lambda line: b"[%d] %b" % (rank, line)
    return None if alone else lambda line: line
