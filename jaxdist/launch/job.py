"""One start of a job: its ranks through mpirun or as processes of our own, to their end."""

import importlib.util
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jaxdist.connectors import site
from jaxdist.launch.command import Command
from jaxdist.launch.hosts import Host, check_hosts
from jaxdist.launch.mpi import Mpirun, cores, find_mpirun
from jaxdist.launch.processes import Ended, Job

Launcher = Literal["auto", "mpirun", "env"]  # who starts the ranks
_THREADS = ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def program_command(script: list[str]) -> list[str]:
    """The command of one rank for `script.py args`, `-m module args` or `executable args`."""
    first, *arguments = script
    if first.endswith(".py") and not Path(first).is_file():
        raise ValueError(f"no such script: {first} (looked in {Path.cwd()})")
    if first == "-m" or first.endswith(".py"):
        compile(Path(first).read_bytes() if first != "-m" else "", first, "exec")  # not a syntax error of each rank
        return [sys.executable, *script]
    # This environment's interpreter, whichever comes first on PATH.
    found = sys.executable if first in ("python", "python3") else shutil.which(first)
    if found is None:
        raise ValueError(f"no such command: {first}; expected a .py file, `-m module` or an executable on PATH")
    return [found, *arguments]


def choose(launcher: Launcher, needs_mpi: bool) -> Mpirun | None:
    """The mpirun to use, or None for processes of our own."""
    if launcher == "env":
        if needs_mpi:
            raise ValueError("--launcher env starts processes that know nothing of MPI: leave it out, or MPI")
        return None
    mpirun = find_mpirun()
    problem = "no mpirun in this environment or on PATH" if mpirun is None else ""
    if importlib.util.find_spec("mpi4py") is None and launcher != "mpirun":
        problem = problem or "mpi4py is not installed"
    if problem and (needs_mpi or launcher == "mpirun"):
        raise ValueError(f"{problem}: {site.install()}")
    return None if problem else mpirun


def launch(
    command: list[str],
    size: int,
    mpirun: Mpirun | None,
    environment: Mapping[str, str],
    *,
    hosts: Sequence[Host] = (),
    prefix: bool = False,
) -> Ended:
    """Run a job to its end, from the main thread."""
    # N processes with a thread per core each would fight for the cores. XLA's CPU client reads PJRT_NPROC, not
    # OMP_NUM_THREADS. The user's own values stay.
    threads = {} if size == 1 or (mpirun and hosts) else dict.fromkeys(_THREADS, str(max(1, cores() // size)))
    environment = {
        # For a debugger: mpirun reads a terminal only as its foreground job.
        **({"JAXDIST_TERMINAL": os.ttyname(0)} if os.isatty(0) and (not hosts or hosts[0].local) else {}),
        "JAXDIST_CONNECTOR": "env://" if mpirun is None else "mpi",
        # Python orders a set of strings anew in each process: a step that loops over one differs between ranks.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        **{name: number for name, number in threads.items() if name not in os.environ},
        **environment,
    }
    with tempfile.TemporaryDirectory(prefix="jaxdist-run-") as folder:
        if mpirun is not None:
            check_hosts(hosts)  # MPICH waits for ever for a host that it can't reach
            commands = [mpirun.command(command, size, hosts, environment, folder, prefix)]
        else:
            commands = _on_this_machine(command, size, environment, prefix)
        return Job(commands).run()


def _on_this_machine(command: list[str], size: int, environment: Mapping[str, str], prefix: bool) -> list[Command]:
    """The ranks, told who they are as torchrun tells its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        # Through a pipe Python would hold their output back until it has 8 KiB.
        **({"PYTHONUNBUFFERED": "1"} if sys.stdout.isatty() else {}),
        **environment,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Keeps other users of this machine out of the job's control channel.
        "JAXDIST_SECRET": secrets.token_hex(16),
    }
    return [
        Command(
            name=f"rank {rank}",
            argv=command,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            line_filter=(f"[{rank}] ".encode().__add__) if prefix else bytes,
        )
        for rank in range(size)
    ]
