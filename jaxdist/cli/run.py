"""`jaxdist run`: one program on N ranks, through mpirun or as processes of its own."""

import importlib.util
import os
import secrets
import signal
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from jaxdist.cli.mpi import Mpirun, find_mpirun, mpi_library, split_tag
from jaxdist.cli.processes import LineFilter, Program, run_job
from jaxdist.cli.program import program_command

_GET_MPI = "pip install 'jaxdist[mpi]' brings mpirun and mpi4py (see `jaxdist info`)"


class Launcher(StrEnum):
    """Who starts the ranks."""

    auto = "auto"
    mpirun = "mpirun"
    env = "env"


class Connector(StrEnum):
    """How the ranks that `run` starts may find each other."""

    auto = "auto"
    mpi = "mpi"
    env = "env://"


class Communicator(StrEnum):
    """How arrays move."""

    auto = "auto"
    xla = "xla"
    mpi = "mpi"


class RunCommand(TyperCommand):
    """Ends the options of `run` at `-m`, as Python does: what follows is the module's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name
            for param in self.params
            if not getattr(param, "is_flag", False)
            for name in param.opts
            if name.startswith("-")
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            if args[at] == "-m":
                args = [*args[:at], "--", *args[at:]]
                break
            at += 2 if args[at] in takes_value else 1
        return super().parse_args(ctx, args)


def run(
    script: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT [ARGS]...",
            help="A .py file, `-m module` or an executable, with its own arguments.",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option("-n", "--np", min=1, help="Number of processes.")] = 1,
    launcher: Annotated[
        Launcher, typer.Option(help="mpirun where it is there, else env: own processes.")
    ] = Launcher.auto,
    connector: Annotated[Connector, typer.Option(help="How processes find each other.")] = Connector.auto,
    communicator: Annotated[Communicator, typer.Option(help="How arrays move.")] = Communicator.auto,
    prefix: Annotated[bool, typer.Option("--prefix", help="Write [rank] before each line.")] = False,
    only_rank: Annotated[int | None, typer.Option(min=0, help="Show the output of this rank only.")] = None,
    hosts: Annotated[str | None, typer.Option(help="host1:slots,host2:slots (with mpirun).")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="A host file of mpirun's own format.", exists=True)] = None,
) -> None:
    """Runs SCRIPT on N ranks. The exit code is that of the first rank that fails."""
    try:
        if only_rank is not None and only_rank >= ranks:
            raise ValueError(f"--only-rank {only_rank} is not one of the {ranks} ranks")
        command = program_command(script)
        mpirun = _choose(launcher, connector, communicator, remote=bool(hosts or hostfile))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    environment = _thread_environment(ranks) if not (hosts or hostfile) else {}
    environment["JAXDIST_CONNECTOR"] = "env://" if mpirun is None else "mpi"
    if communicator is not Communicator.auto:
        environment["JAXDIST_COMMUNICATOR"] = str(communicator)

    if mpirun is None:
        programs = _own_processes(command, ranks, environment, prefix, only_rank)
    else:
        tag = prefix or only_rank is not None
        line = mpirun.command(
            ranks,
            command,
            tag=tag,
            spread=_cores() >= 2 * ranks,
            hosts=hosts,
            hostfile=hostfile,
            export=environment if hosts or hostfile else (),
        )
        one_machine = not (hosts or hostfile)
        programs = [
            Program(
                name="mpirun",
                command=line,
                environment={**mpirun.environment(one_machine=one_machine), **environment},
                line_filter=_tagged_lines(prefix, only_rank) if tag else None,
                # Not SIGKILL: mpirun has to end its ranks, on other hosts too.
                death_signal=signal.SIGTERM,
            )
        ]
    raise typer.Exit(run_job(programs))


def _choose(launcher: Launcher, connector: Connector, communicator: Communicator, *, remote: bool) -> Mpirun | None:
    """The mpirun to use, or None for processes of our own."""
    needs_mpi = connector is Connector.mpi or communicator is Communicator.mpi or remote
    wants_env = launcher is Launcher.env or connector is Connector.env
    if wants_env and (needs_mpi or launcher is Launcher.mpirun):
        raise ValueError(
            "--launcher env and --connector env:// start processes on this machine that know "
            "nothing of MPI: leave out --launcher mpirun, --connector mpi, --communicator mpi, "
            "--hosts and --hostfile, or leave out env"
        )
    if wants_env:
        return None
    must = needs_mpi or launcher is Launcher.mpirun
    mpirun = find_mpirun()
    if mpirun is None:
        if must:
            raise ValueError(f"no mpirun in this environment or on PATH; {_GET_MPI}")
        return None
    if importlib.util.find_spec("mpi4py") is None:
        if must and launcher is not Launcher.mpirun:
            raise ValueError(f"mpi4py is not installed; {_GET_MPI}")
        return mpirun if must else None
    library = mpi_library()
    if library is None or "unknown" in (mpirun.family, library[0]) or mpirun.family == library[0]:
        return mpirun
    if must:
        raise ValueError(
            f"{mpirun.path} is {mpirun.version} but mpi4py loads {library[1]}: each process would "
            "be a job of one rank. Put the mpirun of that library first on PATH, or run with "
            "--launcher env"
        )
    return None


def _own_processes(
    command: list[str],
    ranks: int,
    environment: dict[str, str],
    prefix: bool,
    only_rank: int | None,
) -> list[Program]:
    shared = {
        **environment,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        # Keeps strangers on this machine out of the job's control channel.
        "JAXDIST_SECRET": secrets.token_hex(16),
    }
    return [
        Program(
            name=f"rank {rank}",
            command=command,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            line_filter=_lines_of(rank, prefix, only_rank),
        )
        for rank in range(ranks)
    ]


def _lines_of(rank: int, prefix: bool, only_rank: int | None) -> LineFilter | None:
    if only_rank is not None and rank != only_rank:
        return lambda line: None
    if prefix:
        return lambda line: b"[%d] %b" % (rank, line)
    return None


def _tagged_lines(prefix: bool, only_rank: int | None) -> LineFilter:
    def line_filter(tagged: bytes) -> bytes | None:
        rank, line = split_tag(tagged)
        if rank is None:  # mpirun's own words
            return line
        if only_rank is not None and rank != only_rank:
            return None
        return b"[%d] %b" % (rank, line) if prefix else line

    return line_filter


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _thread_environment(ranks: int) -> dict[str, str]:
    """Shares the cores out: N processes with a thread per core each would fight for them.

    XLA's CPU client reads PJRT_NPROC, not OMP_NUM_THREADS. What the user has set stays.
    """
    if ranks == 1:
        return {}
    threads = str(max(1, _cores() // ranks))
    names = ("PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: threads for name in names if name not in os.environ}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
