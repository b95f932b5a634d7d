"""The hosts of a job, with the number of ranks on each: `--hosts`, and the host files of Open MPI and of MPICH; whether
they answer, and the variables that they get from this environment."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jaxdist.control.rendezvous import is_loopback

_FORMS = "`node1 slots=2` (Open MPI), `node1:2` (MPICH) or `node1` (one rank)"
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<after_colon>\d+)|\s+slots=(?P<slots>\d+))?(?:\s+max[_-]slots=\d+)?"
)
_ANSWER_S = 30.0  # for a login shell and a first Python from a slow disk
# BatchMode: a job can't answer a question.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_PROBE = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('jaxdist') and 'no jaxdist in this Python')"

# Variables of this shell that a program sees on every host. CUDA_VISIBLE_DEVICES and the like are each host's own.
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "NPROC", "PJRT_NPROC")
_FORWARDED_FAMILIES = ("JAX", "XLA_", "NCCL_", "TF_CPP_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "MPI4PY_", "MPI4JAX_")

# Here mpirun has other ways to the hosts than ssh.
_OTHER_WAYS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP",
               "PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm", "OMPI_MCA_plm_rsh_agent")  # fmt: skip


@dataclass(frozen=True)
class Host:
    """A host and the number of its ranks."""

    name: str
    slots: int

    @property
    def local(self) -> bool:
        """Check whether it is this machine."""
        own_name = socket.gethostname()
        return is_loopback(self.name) or self.name.split(".")[0] == own_name.split(".")[0]


def parse_hosts(entries: Iterable[str]) -> list[Host]:
    """The hosts of `node1:2,node2:2`, or of the lines of a file, in that order; `#` starts a comment."""
    hosts: dict[str, Host] = {}
    for entry in filter(None, (entry.partition("#")[0].strip() for entry in entries)):
        match = _LINE.fullmatch(entry)
        slots = int(match["after_colon"] or match["slots"] or 1) if match else 0
        if match is None or slots < 1 or match["name"] in hosts:
            raise ValueError(f"{entry!r} is not a host with its slots, or is listed twice; expected {_FORMS}")
        hosts[match["name"]] = Host(match["name"], slots)
    if not hosts:
        raise ValueError(f"no host is named; expected {_FORMS}")
    return list(hosts.values())


def forwarded_variables() -> list[str]:
    """The variables of this process that other hosts get."""
    return [name for name in os.environ if name in _FORWARDED or name.startswith(_FORWARDED_FAMILIES)]


def check_hosts(hosts: Sequence[Host]) -> None:
    """Refuse hosts that can't be used now."""
    if problems := _problems(hosts):
        raise ValueError(
            f"{'; '.join(f'{name}: {problem}' for name, problem in problems.items())}. Expected: `ssh HOST "
            f"true` works without a password, and {Path.cwd()} and {sys.executable} with jaxdist are on every host (a "
            "shared disk, or the same installation)"
        )


def those_there(hosts: Sequence[Host]) -> Sequence[Host]:
    """The hosts that can be used now; all, if it is this one that reaches none."""
    problems = _problems(hosts)
    return [host for host in hosts if host.name not in problems] or hosts


def _problems(hosts: Sequence[Host]) -> dict[str, str]:
    """Why hosts can't be reached, or don't have this folder, this Python and jaxdist, by name; if mpirun uses ssh."""
    remote = [host.name for host in hosts if not host.local]
    if not remote or any(name in os.environ for name in _OTHER_WAYS):
        return {}
    if shutil.which("ssh") is None:
        raise ValueError(f"no ssh on PATH to reach {remote[0]} with: apt-get install openssh-client")
    with ThreadPoolExecutor(32) as pool:
        return {name: problem for name, problem in zip(remote, pool.map(_probe, remote), strict=True) if problem}


def _probe(host: str) -> str:
    """Describe the problem of a host, or return "" if it has none."""
    python = shlex.join(["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", sys.executable, "-c", _PROBE])
    command = [*_SSH, host, f"cd {shlex.quote(str(Path.cwd()))} && exec {python}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"ssh gave no answer within {_ANSWER_S:g} s"
    lines = (done.stderr.strip() or done.stdout.strip() or f"ssh ended with exit code {done.returncode}").splitlines()
    return lines[-1].strip() if done.returncode else ""
