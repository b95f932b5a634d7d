"""Choose the communicator of a job: "xla", or "mpi" where MPI and mpi4jax are installed and fit."""

import importlib.util
import os
from pathlib import Path

from jaxdist.machine import Platform


def alone(wanted: str, devices: int, platform: Platform) -> str:
    """Return the communicator of a process alone."""
    if wanted != "mpi":
        return "xla"
    if platform == "tpu":
        raise ValueError(f"communicator 'mpi': {NO_TPUS}")
    if devices > 1:
        raise ValueError(
            f"communicator 'mpi' moves arrays between processes, and this is one process with {devices} devices: use "
            f"communicator 'xla', or start with mpirun -np {devices}"
        )
    if problem := _mpi_problem(1):
        raise type(problem)(f"communicator 'mpi': {problem}")
    return "mpi"


NO_TPUS = "MPI moves no arrays of TPUs. Use communicator 'xla', or run on the CPU with JAX_PLATFORMS=cpu"
ONE_EACH = "MPI moves arrays between processes of one device each. Use communicator 'xla', or one process per device"


def several(
    size: int, connector: str, wanted: str, platform: Platform, devices: int | None = None
) -> tuple[str, Exception | None]:
    """Return the communicator of several processes, and why not "mpi"; never raises, so that all ranks compare."""
    if wanted == "xla" or (wanted == "auto" and platform != "cpu"):
        return "xla", None
    if platform == "tpu":
        return "xla", ValueError(NO_TPUS)
    if wanted == "auto":
        # Only where an MPI launcher is: elsewhere MPI_Init may abort the process.
        pmi = any(name in os.environ for name in ("PMIX_RANK", "PMI_RANK"))
        if connector != "mpi" and not (connector == "slurm" and pmi):
            return "xla", None
    problem = ValueError(ONE_EACH) if (devices or 1) > 1 else _mpi_problem(size)
    return "xla" if problem else "mpi", problem


def _mpi_problem(size: int) -> ImportError | ValueError | None:
    """Why communicator "mpi" can't work here, if it can't."""
    from jaxdist.connectors import site
    from jaxdist.connectors.mpi import load

    for module in ("mpi4py", "mpi4jax"):
        if importlib.util.find_spec(module) is None:
            return ImportError(f"{module} is not installed. Install: {site.install()}")
    try:
        mpi = load()
    except ImportError as error:
        return error
    if mpi.COMM_WORLD.size != size:
        return ValueError(
            f"MPI's world has {mpi.COMM_WORLD.size} processes, the job has {size}: start the "
            f"script with `mpirun -np {size}` (or srun --mpi=...), or use communicator 'xla'"
        )
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:  # XLA's threads call it while the script may
        return ValueError(
            "MPI was initialized to be called by one thread at a time: leave mpi4py.rc.threads and "
            "mpi4py.rc.thread_level unchanged (\"multiple\"), or use communicator 'xla'"
        )
    built, loaded = _mpi4jax_built_for(), "Open MPI" if "Open MPI" in mpi.Get_library_version() else "MPICH"
    if built and built != loaded:
        rebuild = site.rebuild_mpi4jax(site.loaded() or "")
        return ValueError(
            f"mpi4jax was compiled for {built}, this process runs under {loaded}. Use "
            f"communicator 'xla', or rebuild it with the mpicc of that MPI: {rebuild}"
        )
    return None


def _mpi4jax_built_for() -> str | None:
    """Read off the library name that its extension is linked to; loading it could crash."""
    spec = importlib.util.find_spec("mpi4jax")
    assert spec is not None
    assert spec.origin is not None
    for library in sorted(Path(spec.origin).parent.rglob("*cpu*.so")):
        content = library.read_bytes()
        if b"libmpi.so.40" in content:
            return "Open MPI"
        if b"libmpi.so.12" in content or b"libmpich.so.12" in content:
            return "MPICH"
    return None
