"""Processes that mpirun, mpiexec or srun --mpi started, through mpi4py."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.connectors import launchers, site
from jaxdist.connectors.base import Found


def connect(timeout: float) -> Found:
    """Through a duplicate of COMM_WORLD, so that no message mixes with the user's."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):  # Linux
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ranks would outlive a killed daemon of MPICH
    mpi = _wait_for_all_ranks_in_mpi_init(timeout)
    comm = mpi.COMM_WORLD.Dup()
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    found = Found("mpi", comm.rank, comm.size, node.rank, node.size, comm.bcast)
    # Take the names off the memory that Open MPI's ranks of a host share: none is left when they are killed.
    node.alltoall([None] * node.size)  # after this, each rank has mapped every other rank's memory
    with contextlib.suppress(OSError):
        for path in site.mapped("sm_segment."):
            path.unlink(missing_ok=True)
    node.Free()
    return found


def load() -> Any:
    """mpi4py.MPI, with the library that fits the launcher."""
    if "mpi4py.MPI" not in sys.modules:
        env = os.environ
        hydra = "OMPI_COMM_WORLD_SIZE" not in env and launchers.by_mpi(env) is not None
        if hydra and not env.get("MPI4PY_LIBMPI") and not env.get("MPI4PY_MPIABI"):
            with contextlib.suppress(OSError):
                ctypes.CDLL("libmpi.so.12")  # MPICH's ABI name, as of Intel MPI and MVAPICH
                env["MPI4PY_LIBMPI"] = "libmpi.so.12"
    try:
        with in_environment(_open_mpi_settings()):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = " / ".join(str(error).splitlines()[:4])
        raise ImportError(
            f"connector 'mpi' needs mpi4py and an MPI library ({why}). Install: {site.install()}. If an MPI is here, "
            f"{site.LOAD}"
        ) from error
    return MPI


def _wait_for_all_ranks_in_mpi_init(timeout: float) -> Any:
    """Call `load` with a time limit. MPI_Init waits forever and holds Python's lock: no Python thread can stop it."""
    if "mpi4py.MPI" in sys.modules:
        return load()
    faulthandler.dump_traceback_later(timeout, exit=True, file=2)  # this function's name is the message
    try:
        return load()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _open_mpi_settings() -> dict[str, str]:
    """Return the settings that Open MPI starts with."""
    settings, size = dict[str, str](), os.environ.get("OMPI_COMM_WORLD_SIZE")
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if local == size:
        # Through memory alone: over TCP each rank would listen on all interfaces, where a stranger's bytes can stop it,
        # and MPI_Init looks for libfabric's networks for a second, though none leads to this host.
        settings["OMPI_MCA_btl"] = "self,sm"
    if size and len(os.sched_getaffinity(0)) < 2 * int(local):
        # A rank waits for the others in a loop. With a core for each rank Python needs that core to send off the next
        # step meanwhile, or all wait for it then.
        settings["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return settings


@contextlib.contextmanager
def in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Settings in the environment, but for the user's own, and out again: not for programs started from here."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]
