"""One start of a job: its ranks through mpirun or as processes of our own, to their end."""

import importlib.util
import os
import re
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from jaxdist.connectors import site
from jaxdist.control import scratch
from jaxdist.launch.command import ASK_TO_END, Command, under_mpirun
from jaxdist.launch.hosts import Host
from jaxdist.launch.mpi import Mpirun, find_mpirun, mpi_library, split_tag
from jaxdist.launch.output import LineFilter, say
from jaxdist.launch.processes import Failed, run_job
from jaxdist.launch.ranks import CAUSE, cores, free_port, own_processes, thread_environment
from jaxdist.launch.remote import check_hosts, forwarded_environment, mpirun_uses_ssh

# What a rank says that hears of another's failure, and what Open MPI says. With the network gone neither Open MPI nor
# MPICH would end after that: they wait for their other half to confirm.
_LAST_WORDS = re.compile(
    rb"\[jaxdist rank \d+\] (rank \d+ \(|.* not every rank has come)|(prterun|mpirun) (has )?detected that one"
)

_RANKS_A_CORE = 64  # each is a Python with JAX, of 80 MiB before it has done anything


class LauncherName(StrEnum):
    """Who starts the ranks."""

    auto = "auto"
    mpirun = "mpirun"
    env = "env"


def launch(
    command: list[str],
    size: int,
    mpirun: Mpirun | None,
    environment: Mapping[str, str],
    *,
    hosts: Sequence[Host] = (),
    prefix: bool = False,
    only_rank: int | None = None,
    whole_lines: bool = False,
    on_failure: Callable[[Failed], None],
) -> int:
    """Runs a job to its end, on other hosts through mpirun; returns 0, or the exit code of what failed first. Call it
    from the main thread."""
    if not hosts and size > _RANKS_A_CORE * cores():
        raise ValueError(
            f"{size} ranks on {cores()} cores: expected at most {_RANKS_A_CORE} for each; --hosts has more"
        )
    environment = {
        "JAXDIST_CONNECTOR": "env://" if mpirun is None else "mpi",
        # Python orders a set of strings anew in each process: a step that loops over one differs between ranks.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        **environment,
    }
    with scratch.folder("jaxdist-run-") as folder:
        if mpirun is not None:
            one = _under_mpirun(mpirun, command, size, hosts, environment, prefix, only_rank, folder)
            commands = [one]
        else:
            shared = {**environment, **_alone(size)}
            commands = own_processes(command, range(size), shared, prefix, only_rank, whole_lines=whole_lines)
        return run_job(commands, on_failure=on_failure)


def choose(launcher: LauncherName, needs_mpi: bool) -> Mpirun | None:
    """The mpirun to use, or None for processes of our own."""
    if launcher is LauncherName.env:
        if needs_mpi:
            raise ValueError("--launcher env starts processes that know nothing of MPI: leave it out, or MPI")
        return None
    must = needs_mpi or launcher is LauncherName.mpirun
    mpirun = find_mpirun()
    if mpirun is None:
        if must:
            raise ValueError(f"no mpirun in this environment or on PATH: {site.install()}")
        return None
    if importlib.util.find_spec("mpi4py") is None:
        if must and launcher is not LauncherName.mpirun:
            raise ValueError(f"mpi4py is not installed: {site.install()}")
        return mpirun if must else None
    library = mpi_library()
    if not library.problem and mpirun.fits(library):
        return mpirun
    what = f"{mpirun.path} is {mpirun.version}, but {library.problem or f'mpi4py loads {library.version}'}"
    fix = f"To load its library: {site.how_to_load(mpirun.path)}"
    if must:
        raise ValueError(
            f"{what}: the ranks would not find each other. {fix}. Or do without mpirun: --launcher env "
            '(of jaxdist.spawn: communicator="xla")'
        )
    say(f"without mpirun. ({what}; {fix})")
    return None


def _under_mpirun(
    mpirun: Mpirun,
    command: list[str],
    size: int,
    hosts: Sequence[Host],
    environment: dict[str, str],
    prefix: bool,
    only_rank: int | None,
    folder: str,
) -> Command:
    if hosts:
        if mpirun_uses_ssh():
            check_hosts(hosts)  # MPICH waits for ever for a host that it can't reach
        export = {**forwarded_environment(), **environment}
    else:
        # In /tmp a job of Open MPI that was killed leaves a directory by its number, and the next to get that number
        # fails: "The PMIx server's listener thread failed to start".
        environment = {"PRTE_MCA_prte_tmpdir_base": folder, **environment, **thread_environment(size)}
        export = {}
    tag = prefix or only_rank is not None
    spread = bool(hosts) or cores() >= 2 * size
    return Command(
        name="mpirun",
        argv=mpirun.command(size, [*under_mpirun(), *command], tag=tag, spread=spread, hosts=hosts, export=export),
        environment={**mpirun.environment(hosts), **environment},
        end_signal=ASK_TO_END,
        line_filter=_lines_of_mpirun(tag, prefix, only_rank),
        last_words=_LAST_WORDS if hosts else None,
        cause=CAUSE,
        # Of its daemons on other hosts it has to take leave. Here its ranks end with it; and Linux would send a SIGTERM
        # for each of its threads, at the second of which Open MPI leaves its ranks alone.
        death_signal=signal.SIGTERM if hosts else signal.SIGKILL,
    )


def _alone(size: int) -> dict[str, str]:
    """What the ranks of one machine share."""
    return {
        **thread_environment(size),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        # Keeps other users of this machine out of the job's control channel.
        "JAXDIST_SECRET": secrets.token_hex(16),
    }


def _lines_of_mpirun(tagged: bool, prefix: bool, only_rank: int | None) -> LineFilter:
    def line_filter(line: bytes) -> bytes | None:
        rank, text = split_tag(line) if tagged else (None, line)
        if rank is None:  # mpirun's own words, or nobody's in particular
            return text
        if only_rank is not None and rank != only_rank:
            return None
        return b"[%d] %b" % (rank, text) if prefix else text

    return line_filter
