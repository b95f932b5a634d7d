"""Find the launcher of this process, its rank, and the size in the variables that MPI launchers set."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxdist.connectors import slurm
from jaxdist.connectors.base import read_int

# The prefix of each launcher's RANK and SIZE. No other program sets these.
_OWN_NAMES = (
    ("Open MPI", "OMPI_COMM_WORLD_"),  # 4 and 5
    ("MVAPICH", "MV2_COMM_WORLD_"),  # MVAPICH2: mpirun_rsh, and its hydra
    ("MVAPICH", "MVP_COMM_WORLD_"),  # MVAPICH 3 and later
)
# Only hydra (MPICH's mpiexec, Intel MPI's, MVAPICH's) sets one of these for its ranks. `I_MPI_ROOT` and the like come
# with `module load` and say nothing about who started the process.
_HYDRA = ("MPI_LOCALNRANKS", "MPI_LOCALRANKID", "HYDI_CONTROL_FD")


class Launched(NamedTuple):
    """One process of a job, as its launcher sees it."""

    by: str  # the launcher, for messages
    rank: int | None  # of this process, or None if the launcher does not set it
    size: int | None  # number of processes, or None if the launcher does not set it
    certain: bool  # the variables are of one launcher only. Those of PMI alone may be left over from an outer one


def by_mpi(env: Mapping[str, str]) -> Launched | None:
    """The MPI launcher that started this process, if one did."""
    # srun gives every program PMI variables too (`--mpi=pmi2`), and mpirun inside an allocation starts its daemons with
    # srun, so that ranks inherit the variables of a step. They are srun's own where both say the same.
    for by, prefix in _OWN_NAMES:
        if prefix + "RANK" in env and prefix + "SIZE" in env:
            return _launched(by, env, prefix + "RANK", prefix + "SIZE", certain=True)
    hydra = any(name in env for name in _HYDRA)
    if hydra or "PMI_RANK" in env:
        found = _launched("MPICH or Intel MPI" if hydra else "PMI", env, "PMI_RANK", "PMI_SIZE", certain=hydra)
        return found if hydra or (found.rank, found.size) != slurm.step(env) else None
    if "PMIX_RANK" in env and not env.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        step = slurm.step(env)
        if step is None or step[1] == 1:
            return Launched("PMIx", read_int(env, "PMIX_RANK"), None, certain=False)
    return None


def several(env: Mapping[str, str]) -> Launched | None:
    """Return the launcher that started (or may have started) this process as one of several, or None."""
    found, step = by_mpi(env), slurm.step(env)
    if found is not None and found.size != 1 and (found.rank, found.size) != (0, None):  # which may be alone
        return found
    return Launched("srun", *step, certain=True) if step is not None and step[1] > 1 else None


def _launched(by: str, env: Mapping[str, str], rank: str, size: str, *, certain: bool) -> Launched:
    number = read_int(env, size, 1) if size in env else None
    highest = None if number is None else number - 1
    return Launched(by, read_int(env, rank, 0, highest) if rank in env else None, number, certain)
