"""`jaxdist run`: one program on N ranks, through mpirun or as processes of its own."""

import importlib.util
import itertools
import re
import secrets
import signal
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from jaxdist.cli.advice import crowded, misplaced_options
from jaxdist.cli.hosts import Host, parse_hosts, read_hostfile, total_ranks
from jaxdist.cli.mpi import Mpirun, find_mpirun, mpi_library, split_tag
from jaxdist.cli.processes import LineFilter, Program, run_job, say
from jaxdist.cli.program import program_command
from jaxdist.cli.ranks import cores, free_port, own_processes, thread_environment
from jaxdist.cli.remote import check_hosts, forwarded_environment, mpirun_uses_ssh, remote_programs, that_answer
from jaxdist.connectors import site

# What a rank says that hears of another's failure, and what Open MPI says. With the network gone neither Open MPI nor
# MPICH would end after that: they wait for their other half to confirm.
_LAST_WORDS = re.compile(
    rb"\[jaxdist rank \d+\] (rank \d+ \(|.* not every rank has come)|(prterun|mpirun) (has )?detected that one"
)


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
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--np", min=1, help="Number of processes; default: 1, or all slots of the hosts."),
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option(help="mpirun where it is there, else env: own processes (over ssh on other hosts).")
    ] = Launcher.auto,
    connector: Annotated[Connector, typer.Option(help="How processes find each other.")] = Connector.auto,
    communicator: Annotated[Communicator, typer.Option(help="How arrays move.")] = Communicator.auto,
    prefix: Annotated[bool, typer.Option("--prefix", help="Write [rank] before each line.")] = False,
    only_rank: Annotated[int | None, typer.Option(min=0, help="Show the output of this rank only.")] = None,
    hosts: Annotated[str | None, typer.Option(help="host1:slots,host2:slots")] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            help="A host a line: `node1 slots=2`, `node1:2` or `node1`.", exists=True, dir_okay=False, readable=True
        ),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Start the job again when a rank fails, so many times: from its last checkpoint.")
    ] = 0,
    shrink: Annotated[
        bool,
        typer.Option("--shrink", help="Without the hosts that don't answer any more; if all do, with one rank fewer."),
    ] = False,
) -> None:
    """Runs SCRIPT on N ranks, here or on several hosts. The exit code is that of the first rank that fails."""
    try:
        placed = _hosts(hosts, hostfile)
        size = total_ranks(placed, ranks) if placed else ranks or 1
        if only_rank is not None and only_rank >= size:
            raise ValueError(f"--only-rank {only_rank} is not one of the {size} ranks")
        command = program_command(script)
        hint = misplaced_options(script, ranks_given=ranks is not None or bool(placed))
        for advice in (hint, "" if placed else crowded(size, command)):
            if advice:
                say(advice)
        mpirun = _choose(launcher, connector, communicator)
        environment = {"JAXDIST_CONNECTOR": "env://" if mpirun is None else "mpi"}
        if communicator is not Communicator.auto:
            environment["JAXDIST_COMMUNICATOR"] = str(communicator)
        for restart in itertools.count():
            environment["JAXDIST_RESTARTS"] = str(restart)
            failed: list[int] = []  # stays empty if it was the user who ended the job
            with tempfile.TemporaryDirectory(prefix="jaxdist-", ignore_cleanup_errors=True) as scratch:
                if mpirun is not None:
                    programs = [_under_mpirun(mpirun, command, size, placed, environment, prefix, only_rank, scratch)]
                elif placed:
                    programs = remote_programs(command, placed, environment, prefix, only_rank)
                else:
                    programs = own_processes(command, range(size), {**environment, **_alone(size)}, prefix, only_rank)
                code = run_job(programs, on_failure=failed.append)
            if not failed or restart == max_restarts:
                raise typer.Exit(code)
            if shrink and size > 1:
                placed = _what_remains(placed)
                size = sum(host.slots for host in placed) if placed else size - 1
            say(f"restart {restart + 1} of {max_restarts}, with {size} rank{'s' * (size > 1)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _what_remains(hosts: list[Host]) -> list[Host]:
    """Those that answer; if all do, one slot fewer on the last."""
    answering = that_answer(hosts)
    if not answering or answering != hosts:
        return answering
    *others, last = hosts
    return [*others, Host(last.name, last.slots - 1)] if last.slots > 1 else others


def _hosts(hosts: str | None, hostfile: Path | None) -> list[Host]:
    if hosts is not None and hostfile is not None:
        raise ValueError("--hosts and --hostfile both say which hosts: leave one out")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return [] if hosts is None else parse_hosts(hosts)


def _under_mpirun(
    mpirun: Mpirun,
    command: list[str],
    size: int,
    hosts: Sequence[Host],
    environment: dict[str, str],
    prefix: bool,
    only_rank: int | None,
    scratch: str,
) -> Program:
    if hosts:
        if mpirun_uses_ssh():
            check_hosts(hosts)  # MPICH waits for ever for a host that it can't reach
        export = {**forwarded_environment(), **environment}
    else:
        # In /tmp a job of Open MPI that was killed leaves a directory by its number, and the next to get that number
        # fails: "The PMIx server's listener thread failed to start".
        environment = {"PRTE_MCA_prte_tmpdir_base": scratch, **environment, **thread_environment(size)}
        export = {}
    line_filter: LineFilter | None = (lambda line: line) if hosts else None
    tag = prefix or only_rank is not None
    spread = bool(hosts) or cores() >= 2 * size
    return Program(
        name="mpirun",
        command=mpirun.command(size, command, tag=tag, spread=spread, hosts=hosts, export=export),
        environment={**mpirun.environment(hosts), **environment},
        line_filter=_tagged_lines(prefix, only_rank) if tag else line_filter,
        last_words=_LAST_WORDS if hosts else None,
        # Not SIGKILL: mpirun has to end its ranks, on other hosts too.
        death_signal=signal.SIGTERM,
    )


def _choose(launcher: Launcher, connector: Connector, communicator: Communicator) -> Mpirun | None:
    """The mpirun to use, or None for processes of our own."""
    needs_mpi = connector is Connector.mpi or communicator is Communicator.mpi
    wants_env = launcher is Launcher.env or connector is Connector.env
    if wants_env and (needs_mpi or launcher is Launcher.mpirun):
        raise ValueError(
            "--launcher env and --connector env:// start processes that know nothing of MPI: leave out "
            "--launcher mpirun, --connector mpi and --communicator mpi, or leave out env"
        )
    if wants_env:
        return None
    must = needs_mpi or launcher is Launcher.mpirun
    mpirun = find_mpirun()
    if mpirun is None:
        if must:
            raise ValueError(f"no mpirun in this environment or on PATH: {site.install()}")
        return None
    if importlib.util.find_spec("mpi4py") is None:
        if must and launcher is not Launcher.mpirun:
            raise ValueError(f"mpi4py is not installed: {site.install()}")
        return mpirun if must else None
    library = mpi_library()
    if not library.problem and ("unknown" in (mpirun.family, library.family) or mpirun.family == library.family):
        return mpirun
    what = f"{mpirun.path} is {mpirun.version}, but {library.problem or f'mpi4py loads {library.version}'}"
    fix = f"To load its library: {site.how_to_load(mpirun.path)}"
    if must:
        raise ValueError(f"{what}: the ranks would not find each other. {fix}. Or leave mpirun out: --launcher env")
    say(f"without mpirun. ({what}; {fix})")
    return None


def _alone(size: int) -> dict[str, str]:
    """What the ranks of one machine share."""
    return {
        **thread_environment(size),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        # Keeps strangers on this machine out of the job's control channel.
        "JAXDIST_SECRET": secrets.token_hex(16),
    }


def _tagged_lines(prefix: bool, only_rank: int | None) -> LineFilter:
    def line_filter(tagged: bytes) -> bytes | None:
        rank, line = split_tag(tagged)
        if rank is None:  # mpirun's own words
            return line
        if only_rank is not None and rank != only_rank:
            return None
        return b"[%d] %b" % (rank, line) if prefix else line

    return line_filter
