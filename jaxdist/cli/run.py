"""`jaxdist run`: one program on N ranks, and again if one fails."""

import itertools
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from jaxdist.control import guard
from jaxdist.launch.advice import crowded, misplaced_options, ranks_and_hosts
from jaxdist.launch.hosts import Host, parse_hosts, read_hostfile, total_ranks
from jaxdist.launch.job import CommunicatorName, ConnectorName, LauncherName, choose, launch
from jaxdist.launch.output import say
from jaxdist.launch.processes import Failed
from jaxdist.launch.program import program_command
from jaxdist.launch.remote import that_answer

_AT_ONCE_S = 15.0  # a job that fails within this time has made no progress
_ENOUGH = 6  # so often in a row; with pauses of 1, 2, 4 and 8 s between


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
        LauncherName, typer.Option(help="mpirun where it is there, else env: own processes (over ssh on other hosts).")
    ] = LauncherName.auto,
    connector: Annotated[ConnectorName, typer.Option(help="How processes find each other.")] = ConnectorName.auto,
    communicator: Annotated[CommunicatorName, typer.Option(help="How arrays move.")] = CommunicatorName.auto,
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
    lanes: Annotated[
        int | None,
        typer.Option(min=1, help="CPU devices of all ranks together: the same bits on as many ranks as divide it."),
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="Restart without the hosts that don't answer (if all do, with one rank fewer), and later with them.",
        ),
    ] = False,
) -> None:
    """Runs SCRIPT on N ranks, here or on several hosts. The exit code is that of the first rank that fails."""
    try:
        placed = _hosts(hosts, hostfile)
        size = total_ranks(placed, ranks) if placed else ranks or 1
        everywhere = placed, size
        if only_rank is not None and only_rank >= size:
            raise ValueError(f"--only-rank {only_rank} is not one of the {size} ranks")
        command = program_command(script)
        hint = misplaced_options(script, ranks_given=ranks is not None or bool(placed))
        for advice in (hint, "" if placed else crowded(size, command)):
            if advice:
                say(advice)
        mpirun = choose(launcher, connector, communicator)
        if lanes and lanes % size:
            raise ValueError(
                f"{size} ranks for --lanes {lanes}: they share the lanes out evenly, so {size} would have to divide "
                f"{lanes}"
            )
        if size > 1 or placed:
            say(ranks_and_hosts(size, len(placed), mpirun.version if mpirun else ""))
        environment = {} if communicator is CommunicatorName.auto else {"JAXDIST_COMMUNICATOR": str(communicator)}
        if "JAXDIST_LOG" not in os.environ:
            environment["JAXDIST_LOG"] = "start"
        if lanes:
            environment["JAXDIST_LANES"] = str(lanes)
        # When this process is killed Linux sends mpirun a SIGTERM for each of its threads; at the second one Open MPI
        # leaves its ranks alone.
        guard.start(whole_job=True)
        at_once = 0  # starts, the latest ones, that soon failed
        for restart in itertools.count():
            environment["JAXDIST_RESTARTS"] = str(restart)
            failed: list[Failed] = []  # stays empty if it was the user who ended the job
            begin = time.monotonic()
            code = launch(
                command, size, mpirun, environment,
                hosts=placed, prefix=prefix, only_rank=only_rank, on_failure=failed.append,
            )  # fmt: skip
            if not failed or restart == max_restarts:
                raise typer.Exit(code)
            at_once = at_once + 1 if time.monotonic() - begin < _AT_ONCE_S else 0
            if at_once == _ENOUGH:
                name, code = failed[0]
                say(
                    f"each of the last {_ENOUGH} starts failed within {_AT_ONCE_S:g} s, the last one when {name} ended "
                    f"with exit code {code}: another would fail, too. Not restarted, although {max_restarts - restart} "
                    f"of --max-restarts {max_restarts} are left"
                )
                raise typer.Exit(code)
            if at_once > 1:  # what it fails of (a full disk, a host that is still down) may pass
                time.sleep(2.0 ** (at_once - 2))
            if elastic:
                placed, size = _found_again(placed, size, *everywhere, lanes) or _what_remains(placed, size, lanes)
            say(f"restart {restart + 1} of {max_restarts}, with {size} rank{'s' * (size > 1)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _what_remains(placed: list[Host], size: int, lanes: int | None) -> tuple[list[Host], int]:
    """The hosts that answer, and the number of ranks there; if all do, one rank fewer."""
    answering = that_answer(placed)
    if placed and answering != placed:
        return _evenly(answering, sum(host.slots for host in answering), lanes)
    return _evenly(_one_fewer(placed), size - 1, lanes) if size > 1 else (placed, size)


def _found_again(
    placed: list[Host], size: int, all_hosts: list[Host], whole: int, lanes: int | None
) -> tuple[list[Host], int] | None:
    """The hosts that answer, and the number of ranks there, if these are more than now."""
    answering = that_answer(all_hosts) if size < whole else []
    ranks = sum(host.slots for host in answering) if all_hosts else whole
    found = _evenly(answering, ranks, lanes)
    return found if found[1] > size else None


def _evenly(placed: list[Host], size: int, lanes: int | None) -> tuple[list[Host], int]:
    """As many of these ranks as divide the lanes."""
    while lanes and size and lanes % size:
        placed, size = _one_fewer(placed), size - 1
    return placed, size


def _one_fewer(placed: list[Host]) -> list[Host]:
    """The hosts, with one slot fewer on the last."""
    if not placed:
        return []
    *others, last = placed
    return [*others, Host(last.name, last.slots - 1)] if last.slots > 1 else others


def _hosts(hosts: str | None, hostfile: Path | None) -> list[Host]:
    if hosts is not None and hostfile is not None:
        raise ValueError("--hosts and --hostfile both say which hosts: leave one out")
    if hostfile is not None:
        return read_hostfile(hostfile)
    return [] if hosts is None else parse_hosts(hosts)
