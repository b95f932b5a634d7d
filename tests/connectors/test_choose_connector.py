"""Which connector: what `auto` makes of each launcher's environment, and what it refuses."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from jaxdist import connectors
from jaxdist.connectors import mpi
from jaxdist.connectors.base import Connector, local_position
from jaxdist.connectors.local import LocalConnector

OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "4"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[1-2]"}
SRUN = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, "local"),
        (OMPI, "mpi"),
        (HYDRA, "mpi"),
        ({"PMIX_RANK": "0"}, "mpi"),
        (TORCHRUN, "env://"),
        (OMPI | TORCHRUN, "mpi"),
        (SRUN, "slurm"),
        (BATCH, "local"),  # in the batch script, beside no other task
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "local"),  # salloc
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, "local"),
        (SRUN | {"PMI_SIZE": "4", "PMI_RANK": "1"}, "slurm"),  # srun sets PMI for any program
        (SRUN | OMPI, "mpi"),  # mpirun inside sbatch starts its daemons with srun
        (SRUN | HYDRA, "mpi"),
        (OMPI | {"JAXDIST_CONNECTOR": "local"}, "local"),
        (TORCHRUN | {"JAXDIST_CONNECTOR": "tcp://h:1"}, "tcp://h:1"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "env://"),
    ],
)
def test_auto_is_the_launcher_that_is_there(env, expected):
    assert connectors.choose(env) == expected


def test_incomplete_environment_lists_what_is_missing():
    for missing in TORCHRUN:
        env = {k: v for k, v in TORCHRUN.items() if k != missing}
        with pytest.raises(ValueError, match=rf"missing: {missing} \(set: ") as caught:
            connectors.choose(env)
        if missing in ("RANK", "WORLD_SIZE"):
            continue
        assert "RANK=1" in str(caught.value)


def test_an_mpi_launcher_without_mpi4py_is_an_error_never_many_trainings_alone(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"one of 4, but mpi4py.*pip install"):
        connectors.choose(OMPI)
    with pytest.raises(ImportError, match="pip install"):
        connectors.choose({"PMIX_RANK": "0"})
    assert connectors.choose(OMPI | {"OMPI_COMM_WORLD_SIZE": "1"}) == "local"


def test_mpi4py_absent_gives_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    monkeypatch.delitem(__import__("sys").modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ImportError, match="pip install 'jaxdist"):
        mpi.MpiConnector()


def test_unknown_names_and_misplaced_ranks():
    with pytest.raises(ValueError, match=r"unknown connector 'mpl'; valid: auto, mpi, slurm, env"):
        connectors.connect("mpl")
    with pytest.raises(ValueError, match="rank= and size="):
        connectors.connect("local", rank=0, size=2)


def test_an_object_of_the_users_own():
    class Mine(LocalConnector):
        name = "mine"

    mine = Mine()
    assert connectors.connect(mine) is mine
    assert isinstance(mine, Connector)
    thing: Any = object()
    with pytest.raises(TypeError, match="lacks name, rank, size"):
        connectors.connect(thing)
    mine.rank = 3
    with pytest.raises(ValueError, match="rank 3 of size 1"):
        connectors.connect(mine)


def test_local_position_counts_by_host():
    hosts = ["a", "b", "a", "b", "b"]
    assert [local_position(hosts, r) for r in range(5)] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
