"""Tasks of a Slurm step: rank and size from srun's environment, the root on its first host."""

import hashlib
import os
import re
from collections.abc import Mapping

from jaxdist.connectors import tcp
from jaxdist.connectors.base import Found, need, read_int
from jaxdist.control.wire import job_key

_CANDIDATES = 8


def first_host(nodelist: str) -> str:
    """The first host of a Slurm host list."""
    first = re.match(r"(?:[^\[\],]+|\[[^\[\]]+\])+(?=,|$)", nodelist.strip())
    if first is None:
        raise ValueError(f"Slurm host list {nodelist!r}: expected e.g. node[01-04] or a,b,c")
    return re.sub(r"\[([^-,\]]+)[^\]]*\]", r"\1", first[0])  # of each bracket, the first number


def step(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, size) of this task if srun started it, else None."""
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, though it runs alone: what srun adds is the step's own
    # variables.
    of_step = any(name in env for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_ID"))
    if "SLURM_PROCID" not in env or not of_step:
        return None
    return read_int(env, "SLURM_PROCID"), _size(env)


def tasks(env: Mapping[str, str]) -> int:
    """Return the number of tasks of the job's allocation, or 0 if there is none, or it does not say."""
    return int(env["SLURM_NTASKS"]) if "SLURM_JOB_ID" in env and env.get("SLURM_NTASKS", "").isdigit() else 0


def connect(timeout: float = 300.0) -> Found:
    """The connector of a Slurm step, at one of some ports that follow from its ids, as the token of the proof does."""
    env = dict(os.environ)
    env.setdefault("SLURM_NTASKS", env.get("SLURM_STEP_NUM_TASKS", ""))
    env.setdefault("SLURM_NODELIST", env.get("SLURM_STEP_NODELIST", ""))
    need(
        env, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_NODELIST"), "slurm",
        "Start the script with srun (in an sbatch script: `srun python script.py`)",
    )  # fmt: skip
    size = _size(env)
    rank = read_int(env, "SLURM_PROCID", 0, size - 1)
    hosts = env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"]
    host = first_host(hosts)
    if host == hosts.strip():
        host = "127.0.0.1"  # all are on one host: nobody else has to come
    token = f"slurm {env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '0')}.{env.get('SLURM_RESTART_COUNT', '0')}"
    # Below Linux's ephemeral ports, where any outgoing connection may sit on the port.
    base = 12000 + int.from_bytes(hashlib.sha256(token.encode()).digest()[:4]) % 20000
    addresses = [(host, base + i) for i in range(_CANDIDATES)]
    key = job_key(host, token) if size > 1 else None
    return tcp.over(addresses, "slurm", rank, size, timeout, key)


def _size(env: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return read_int(env, name, 1) if env.get(name) else 1
