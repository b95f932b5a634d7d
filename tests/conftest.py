"""Eight virtual CPU devices and float64 for every test; processes of an MPI job have one device each."""

from __future__ import annotations

import os

if "OMPI_COMM_WORLD_SIZE" not in os.environ and "PMI_SIZE" not in os.environ:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_ENABLE_X64", "1")
# Unbuffered, a print() is one write for its text and one for the end of its line, and lines of ranks that share a pipe
# mix. Tests that want it so say so.
os.environ.pop("PYTHONUNBUFFERED", None)

import sys
from collections.abc import Iterator

import pytest
from started import jaxdist, launcher, mpirun_there, wait_gone  # noqa: F401 (fixtures of several folders)

from jaxdist.placements import small

# Arrays are small here, and yet the tests are about what moves between devices; placements/test_small.py is not.
small.limits = small.Limits(fewer=10**9)


@pytest.fixture(autouse=True)
def no_locks_left() -> Iterator[None]:
    """Each has a thread, and a process shows where its main thread is among a hundred at most."""
    yield
    if lock := sys.modules.get("jaxdist.checkpoint.lock"):
        lock.release_all()
