"""Lanes: the devices of a job whose bits do not depend on the number of its processes."""

import os

import jax

from jaxdist import compat
from jaxdist.control.channel import Control
from jaxdist.runtime import devices


def check(control: Control, lanes: int | None, platform: str, wanted: str) -> None:
    """Refuse lanes that can't be."""
    rank, size = control.rank, control.size
    if lanes is None:
        return
    if platform != "cpu":
        raise ValueError(
            f"rank {rank}: lanes={lanes} are CPU devices, and this job would run on GPUs, where a process has one. "
            "Set JAX_PLATFORMS=cpu, or leave lanes out: the same number of GPUs gives the same sums"
        )
    if lanes % size:
        raise ValueError(
            f"rank {rank}: {size} processes for lanes={lanes}: they share the lanes out evenly, so the number of "
            f"processes has to divide {lanes}"
        )
    if wanted == "mpi":
        raise ValueError(
            f"rank {rank}: communicator 'mpi' adds up in MPI's order, which depends on the number of processes. With "
            "lanes use communicator 'xla' (or leave it out)"
        )


def start(control: Control, lanes: int) -> None:
    """Have this process's lanes as its devices; before the backend starts."""
    # As many threads for XLA on each process, however many cores it has: XLA divides a program's work by the number of
    # threads (`_set_up_cpus`), and sums over the rows of a tall array had other bits with another number.
    if compat.backend_started():
        raise devices.too_late(control.rank)
    jax.config.update("jax_num_cpu_devices", lanes // control.size)
    jax.config.update("jax_platforms", "cpu")
    os.environ["PJRT_NPROC"] = str(lanes)
