"""Ranks on other hosts over ssh: are the hosts there, and the command that starts each one's ranks."""

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxdist.control.keys import is_loopback
from jaxdist.launch.agent import FAILURE_MARK, Task
from jaxdist.launch.command import Command
from jaxdist.launch.hosts import Host
from jaxdist.launch.ranks import free_port

_CONNECT_S = 10
_ANSWER_S = 30.0  # for a login shell and a first Python from a slow disk
# BatchMode: a job can't answer a question. The alive messages end ssh when its network has gone.
_SSH = ("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=10")
_PROBE = """
import importlib.util, socket, sys
if importlib.util.find_spec("jaxdist") is None: sys.exit("no jaxdist in this Python")
s = socket.socket(); s.bind(("", 0)); print("port", s.getsockname()[1])
"""
_AGENT = "import sys; from jaxdist.launch.agent import main; sys.exit(main())"

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


def check_hosts(hosts: Sequence[Host]) -> dict[str, int]:
    """A free port on each host, once all of them could be reached and have this folder, this Python and jaxdist."""
    answers = _answers(hosts)
    problems = [f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str)]
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}. Expected: `ssh {problems[0].partition(':')[0]} true` works without a "
            f"password, and {Path.cwd()} and {sys.executable} with jaxdist are on every host (a shared disk, or "
            "the same installation)"
        )
    ports = {name: answer for name, answer in answers.items() if isinstance(answer, int)}
    return {host.name: ports[host.name] if host.name in ports else free_port() for host in hosts}


def that_answer(hosts: Sequence[Host]) -> list[Host]:
    """Those that could be used now."""
    answers = _answers(hosts)
    return [host for host in hosts if not isinstance(answers.get(host.name), str)]


def _answers(hosts: Sequence[Host]) -> dict[str, int | str]:
    """A free port on each other host, or why it can't be used."""
    remote = [host for host in hosts if not host.local]
    if remote and shutil.which("ssh") is None:
        raise ValueError(f"no ssh on PATH to reach {remote[0].name} with: apt-get install openssh-client")
    with ThreadPoolExecutor(32) as pool:
        return dict(zip([host.name for host in remote], pool.map(_probe, remote), strict=True))


def remote_commands(
    command: list[str],
    hosts: Sequence[Host],
    environment: Mapping[str, str],
    prefix: bool,
    only_rank: int | None,
) -> list[Command]:
    """One command per host, which starts that host's ranks and ends them when the connection ends."""
    ports = check_hosts(hosts)
    root = hosts[0]
    shared = {
        **forwarded_environment(),
        **environment,
        "WORLD_SIZE": str(sum(host.slots for host in hosts)),
        "MASTER_ADDR": _address(root, alone=all(host.local for host in hosts)),
        "MASTER_PORT": str(ports[root.name]),
        # Over standard input, not a command line that all may read.
        "JAXDIST_SECRET": secrets.token_hex(16),
    }
    commands = []
    first = 0
    for host in hosts:
        task = Task(command, first, host.slots, str(Path.cwd()), shared, prefix, only_rank)
        last = first + host.slots - 1
        commands.append(
            Command(
                name=f"{host.name} ({f'rank {first}' if first == last else f'ranks {first} to {last}'})",
                argv=_on(host, [sys.executable, "-c", _AGENT]),
                environment={},
                line_filter=lambda line: line,
                orders=task.line(),
                failure_mark=FAILURE_MARK,
            )
        )
        first += host.slots
    return commands


def _probe(host: Host) -> int | str:
    """A free port of the host, or what is wrong with it."""
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
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0 and last and last[0].startswith("port "):
        return int(last[0].removeprefix("port "))
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1].strip() if lines else f"ssh ended with exit code {done.returncode}"


def _on(host: Host, command: list[str]) -> list[str]:
    """`command` as run on the host, in this folder and with this PYTHONPATH."""
    if host.local:
        return command
    path = os.environ.get("PYTHONPATH")
    settings = ["env", f"PYTHONPATH={path}"] if path else []
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*settings, *command])}"
    return [*_SSH, host.name, remote]


def _address(root: Host, *, alone: bool) -> str:
    """What the other ranks call the host of rank 0."""
    if alone:
        return "127.0.0.1"
    return socket.gethostname() if is_loopback(root.name) else root.name
