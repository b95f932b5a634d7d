"""The mpirun that belongs to this environment, and how to call it."""

import contextlib
import functools
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxdist.control.rendezvous import interfaces
from jaxdist.launch.command import UNDER_MPIRUN, Command
from jaxdist.launch.hosts import Host, forwarded_variables

Family = Literal["openmpi", "mpich", "unknown"]

# Both Open MPI 4 and 5 ask for this pair; 4 reads the first of the other two, 5 (PRRTE) the second.
ROOT_ENV = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
OVERSUBSCRIBE_ENV: Mapping[str, str] = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}
_TAG = re.compile(rb"^\[(?:[^\]\s]*,)?(\d+)\]<(?:stdout|stderr|stddiag)>: ?")


@dataclass(frozen=True)
class Mpirun:
    """An MPI launcher: its path, whose it is, and its version line."""

    path: Path
    family: Family
    version: str

    def command(
        self, program: list[str], ranks: int, hosts: Sequence[Host], given: Mapping[str, str], folder: str, prefix: bool
    ) -> Command:
        """The command that starts `ranks` of a program with some variables, and keeps its files in a folder."""
        options, settings = list[str](), dict[str, str]()
        where = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        if self.family == "mpich":
            options += ["-prepend-rank"] if prefix else []
            options += ["-hosts", where] if hosts else []
        else:
            settings |= ROOT_ENV if os.geteuid() == 0 else {}
            options += ["--tag-output"] if prefix else []
            options += ["--bind-to", "none"] if hosts or cores() >= 2 * ranks else []
            if hosts:
                # Slot by slot: with `:oversubscribe` alone, which people export for use on one machine, Open MPI 5 puts
                # all ranks on the first host, and without it refuses more slots than cores.
                options += ["--map-by", "slot:oversubscribe", "--host", where]
                for name in sorted({*forwarded_variables(), *given}):
                    options += ["-x", name]
                network = _shared_network(hosts)
                settings |= {"OMPI_MCA_btl_tcp_if_include": network} if network else {}
            else:
                # In /tmp a job of Open MPI that was killed leaves a directory by its number, and the next to get that
                # number fails: "The PMIx server's listener thread failed to start".
                settings |= {**OVERSUBSCRIBE_ENV, "PRTE_MCA_prte_tmpdir_base": folder}
        return Command(
            name="mpirun",
            argv=[str(self.path), "-n", str(ranks), *options, *UNDER_MPIRUN, *program],
            environment={**settings, **given},
            is_mpirun=True,
            # With the rank before each line in MPICH's way, where Open MPI has written its own.
            line_filter=functools.partial(_TAG.sub, rb"[\1] ") if prefix else bytes,
            # Of its daemons on other hosts it has to take leave. Here its ranks end with it; and Linux would send a
            # SIGTERM for each of its threads; at the second one, Open MPI leaves its ranks alone.
            death_signal=signal.SIGTERM if hosts else signal.SIGKILL,
        )


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def _shared_network(hosts: Sequence[Host]) -> str | None:
    """The smallest IPv4 network of this machine with all other hosts, such as "10.0.0.0/24"; None if there is none."""
    # Open MPI uses every card that is up, and waits for ever for an answer from one that only looks the same on both
    # sides: Docker's bridge is 172.17.0.1 on every host.
    if any(name.startswith("OMPI_MCA_btl_tcp_if_") for name in os.environ):  # the user has chosen
        return None
    try:
        reached = [ipaddress.IPv4Address(socket.gethostbyname(host.name)) for host in hosts if not host.local]
    except OSError:
        return None
    networks = [one.network for one in interfaces() if reached and all(address in one.network for address in reached)]
    return str(max(networks, key=lambda network: network.prefixlen)) if networks else None


def run_outside(argv: list[str], seconds: float) -> "subprocess.CompletedProcess[str] | None":
    """Run a program outside of any MPI job to its end; None if it can't be run, or takes longer than this."""
    # With an MPI launcher's variables a child of a rank would take itself for that rank.
    launchers = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "OPAL_", "MV2_COMM_", "MVP_COMM_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    try:
        return subprocess.run(
            argv, env=env, timeout=seconds, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def family_of(text: str) -> Family:
    """Whose MPI describes itself so."""
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    mpich = any(name in text.upper() for name in ("HYDRA", "MPICH", "INTEL(R) MPI", "MVAPICH"))  # one ABI, and hydra
    return "mpich" if mpich else "unknown"


@functools.cache
def find_mpirun() -> Mpirun | None:
    """The mpirun of this environment's prefix, else the first on PATH, else None."""
    path = shutil.which("mpirun", path=os.pathsep.join([f"{sys.prefix}/bin", os.environ.get("PATH", os.defpath)]))
    if path is None:
        return None
    with contextlib.suppress(RuntimeError):  # this user has no home
        os.environ.setdefault("HOME", str(Path.home()))  # Open MPI does not start without it
    done = run_outside([path, "--version"], 20)
    if done is None:
        return None
    text = done.stdout + done.stderr
    number = re.search(r"Version:\s*(\S+)", text)  # hydra's first line is a title
    return Mpirun(
        Path(path), family_of(text), f"MPICH (hydra) {number[1]}" if number else text.strip().partition("\n")[0]
    )
