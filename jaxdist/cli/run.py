"""`jaxdist run`: run a program on N ranks, and restart it if a rank fails."""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.connectors import site
from jaxdist.launch.hosts import Host, parse_hosts, those_there
from jaxdist.launch.job import Launcher, choose, launch, program_command
from jaxdist.launch.output import say
from jaxdist.launch.processes import Ended

_SOON = 15.0  # a job that fails within this many seconds has made no progress
_ENOUGH = 6  # limit on such failures in a row


def run(
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="A .py file, a module (-m), or an executable, with arguments."),
    ],
    is_module: Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, like `python -m`.")] = False,
    ranks: Annotated[
        int | None, typer.Option("-n", "--np", min=1, help="Number of ranks (default: 1, or all slots of the hosts).")
    ] = None,
    launcher: Annotated[
        Launcher, typer.Option(help="mpirun, env (jaxdist starts the ranks on this machine), or auto.")
    ] = "auto",
    prefix: Annotated[bool, typer.Option("--prefix", help="Write the rank before each line of output.")] = False,
    hosts: Annotated[str | None, typer.Option(help="Hosts and the number of ranks on each: node1:4,node2:4.")] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A file with one host per line, like `node1 slots=2`."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restart the job at most this many times if a rank fails.")
    ] = 0,
    lanes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of virtual CPU devices; any number of ranks that divides it gives the same bits."
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Number of devices of each rank (default: 1 CPU, or its GPUs).")
    ] = None,
    debug: Annotated[
        int | None, typer.Option(min=0, help="Open pdb at an uncaught exception of this rank. The others wait.")
    ] = None,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="On a restart, skip hosts that do not respond; use one rank fewer if enough remain."
        ),
    ] = False,
) -> None:
    """Run SCRIPT on several ranks, on this machine or several hosts.

    The exit code is the code of the first rank that fails.
    """
    try:
        if hosts is not None and hostfile is not None:
            raise ValueError("--hosts and --hostfile are mutually exclusive")
        named = hostfile.read_text().splitlines() if hostfile else hosts.split(",") if hosts is not None else None
        placed = parse_hosts(named) if named is not None else []
        slots = sum(host.slots for host in placed)
        size = ranks or slots or 1
        if placed and size > slots:
            raise ValueError(f"-n {size}, but the hosts have {slots} slots: leave out -n, or give the hosts more slots")
        command = program_command(["-m", *script] if is_module else script)
        mpirun = choose(launcher, needs_mpi=os.environ.get("JAXDIST_COMMUNICATOR") == "mpi")
        if mpirun is None and not all(host.local for host in placed):
            raise ValueError(f"ranks on several hosts need mpirun: {site.install()}")
        if lanes and lanes % size:
            raise ValueError(f"{size} ranks can't share --lanes {lanes} evenly: {size} does not divide {lanes}")
        if size > 1 or placed:
            where = f"{len(placed) or 1} host{'s' * (len(placed) > 1)}"
            how = f"through {mpirun.version}" if mpirun else "without mpirun"
            say(f"{size} rank{'s' * (size > 1)} on {where}, {how}")
        if debug is not None and debug >= size:
            raise ValueError(f"--debug {debug}: valid: 0..{size - 1}")
        settings = {"JAXDIST_DEBUG": debug, "JAXDIST_LANES": lanes, "JAXDIST_DEVICES": devices}
        environment = {name: str(value) for name, value in settings.items() if value is not None}

        def start(size: int, hosts: Sequence[Host], restart: int) -> Ended:
            variables = {**environment, "JAXDIST_RESTARTS": str(restart)}
            return launch(command, size, mpirun, variables, hosts=hosts, prefix=prefix)

        raise typer.Exit(_run_until_it_ends(start, size, placed, max_restarts, lanes, elastic))
    except SyntaxError as error:
        typer.echo("".join(traceback.format_exception_only(error)), err=True, nl=False)
        raise typer.Exit(1) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _run_until_it_ends(
    start: Callable[[int, Sequence[Host], int], Ended],
    size: int,
    hosts: Sequence[Host],
    max_restarts: int,
    lanes: int | None,
    elastic: bool,
) -> int:
    """Start a job, and again if it fails; return its exit code."""
    whole, reachable, soon = size, hosts, 0  # `soon`: quick failures in a row
    for restart in range(max_restarts + 1):
        begin = time.monotonic()
        ended = start(size, reachable, restart)
        if not ended.failed or restart == max_restarts:
            return ended.code
        soon = soon + 1 if time.monotonic() - begin < _SOON else 0
        if soon == _ENOUGH:
            left = f"{max_restarts - restart} of --max-restarts {max_restarts} are left"
            say(f"not restarted: the last {_ENOUGH} starts failed within {_SOON:g} s each. {left}")
            return ended.code
        time.sleep(2.0 ** (soon - 2) if soon > 1 else 0)  # a full disk or an unreachable host may recover
        if elastic:
            reachable = those_there(hosts)
            most = min(whole, sum(host.slots for host in reachable) or whole)
            most -= most == size > 1
            size = next(n for n in range(most, 0, -1) if not lanes or lanes % n == 0)
        say(f"restart {restart + 1} of {max_restarts}, with {size} rank{'s' * (size > 1)}")
    raise AssertionError("unreachable: the last start returns")
