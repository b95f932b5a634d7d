"""The other hosts of a job, to which mpirun goes over ssh: are they there, and what they get of this environment."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxdist.launch.hosts import Host

_CONNECT_S = 10
_ANSWER_S = 30.0  # for a login shell and a first Python from a slow disk
# BatchMode: a job can't answer a question. The alive messages end ssh when its network has gone.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=10")
_PROBE = """
import importlib.util, sys
if importlib.util.find_spec("jaxdist") is None: sys.exit("no jaxdist in this Python")
print("jaxdist is here")
"""

# What a program sees of this shell on every host. CUDA_VISIBLE_DEVICES and the like are each host's own.
_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "NPROC", "PJRT_NPROC")
_FORWARDED_FAMILIES = ("JAX", "XLA_", "NCCL_", "TF_CPP_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "MPI4PY_", "MPI4JAX_")

# Here mpirun has other ways to the hosts than ssh.
_OTHER_WAYS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP",
               "PRTE_MCA_plm", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm", "OMPI_MCA_plm_rsh_agent")  # fmt: skip


def forwarded_environment() -> dict[str, str]:
    """The part of this process's environment that other hosts get."""
    return {
        name: value for name, value in os.environ.items() if name in _FORWARDED or name.startswith(_FORWARDED_FAMILIES)
    }


def mpirun_uses_ssh() -> bool:
    """Whether mpirun reaches hosts as `check_hosts` does, as far as one can tell."""
    return not any(name in os.environ for name in _OTHER_WAYS)


def check_hosts(hosts: Sequence[Host]) -> None:
    """Refuse hosts that can't be reached, or don't have this folder, this Python and jaxdist."""
    if problems := _problems(hosts):
        first = next(iter(problems))
        raise ValueError(
            f"{'; '.join(f'{name}: {problem}' for name, problem in problems.items())}. Expected: `ssh {first} true` "
            f"works without a password, and {Path.cwd()} and {sys.executable} with jaxdist are on every host (a shared "
            "disk, or the same installation)"
        )


def that_answer(hosts: Sequence[Host]) -> list[Host]:
    """Those that could be used now."""
    problems = _problems(hosts)
    return [host for host in hosts if host.name not in problems]


def _problems(hosts: Sequence[Host]) -> dict[str, str]:
    """Why hosts can't be used, by name."""
    remote = [host for host in hosts if not host.local]
    if remote and shutil.which("ssh") is None:
        raise ValueError(f"no ssh on PATH to reach {remote[0].name} with: apt-get install openssh-client")
    with ThreadPoolExecutor(32) as pool:
        found = zip([host.name for host in remote], pool.map(_probe, remote), strict=True)
        return {name: problem for name, problem in found if problem}


def _probe(host: Host) -> str:
    """What is wrong with a host; "": nothing."""
    try:
        done = subprocess.run(
            _on(host, [sys.executable, "-c", _PROBE]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"ssh gave no answer within {_ANSWER_S:g} s"
    # What a login script prints comes before.
    if done.returncode == 0 and done.stdout.strip().endswith("jaxdist is here"):
        return ""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1].strip() if lines else f"ssh ended with exit code {done.returncode}"


def _on(host: Host, command: list[str]) -> list[str]:
    """`command` as run on another host, in this folder and with this PYTHONPATH."""
    path = os.environ.get("PYTHONPATH")
    settings = ["env", f"PYTHONPATH={path}"] if path else []
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*settings, *command])}"
    return [*_SSH, host.name, remote]
