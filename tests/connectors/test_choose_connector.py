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
INTEL = HYDRA | {"MPI_LOCALRANKID": "1", "I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_BOOTSTRAP": "slurm"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in
           (("SIZE", "4"), ("RANK", "1"), ("LOCAL_SIZE", "2"), ("LOCAL_RANK", "1"))}  # fmt: skip
MVAPICH_3 = {name.replace("MV2", "MVP"): value for name, value in MVAPICH.items()}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "1"}
MODULE = {"I_MPI_ROOT": "/opt/impi", "I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so"}  # without being started by it
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[1-2]"}
SRUN = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n1"}
# A task of srun, which has started one daemon of mpirun on each of two nodes.
DAEMON = SRUN | {"SLURM_STEP_NUM_TASKS": "2"}
SECOND = SRUN | {"SLURM_PROCID": "1"}
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
        (SECOND | PMI, "slurm"),  # srun sets PMI for any program
        (SECOND | PMI | MODULE, "slurm"),
        (SECOND | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, "slurm"),
        (SECOND | PMI | TORCHRUN, "env://"),
        (SRUN | OMPI, "mpi"),  # mpirun inside sbatch starts its daemons with srun
        (SRUN | HYDRA, "mpi"),
        (MVAPICH, "mpi"),
        (MVAPICH_3, "mpi"),
        (INTEL, "mpi"),
        (PMI, "mpi"),
        *(
            (allocation | launcher, "mpi")
            for allocation in (BATCH, SRUN, DAEMON, SRUN | {"SLURM_STEP_NUM_TASKS": "1"})
            for launcher in (OMPI, HYDRA, INTEL, MVAPICH, MVAPICH_3, PMI, PMI | MODULE, {"MPI_LOCALRANKID": "1"})
        ),
        (BATCH | {"PMIX_RANK": "1"}, "mpi"),
        (OMPI | {"JAXDIST_CONNECTOR": "local"}, "local"),
        (TORCHRUN | {"JAXDIST_CONNECTOR": "tcp://h:1"}, "tcp://h:1"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "env://"),
    ],
)
def test_auto_is_the_launcher_that_is_there(env, expected, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # mpi4py is installed
    assert connectors.choose(env) == expected


@pytest.mark.parametrize(
    "env",
    [
        SRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        PMI | {"RANK": "0", "WORLD_SIZE": "1"},
        SRUN | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        SRUN | {"PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
)
def test_alone_by_leftovers_but_one_of_several_by_the_launcher(env):
    with pytest.raises(ValueError, match=r"rank \d of 4: each would train alone.*JAXDIST_CONNECTOR=local"):
        connectors.choose(env)
    assert connectors.choose(env | {"JAXDIST_CONNECTOR": "local"}) == "local"


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
    assert connectors.choose({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == "local"


def test_mpi4py_absent_gives_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    monkeypatch.delitem(__import__("sys").modules, "mpi4py.MPI", raising=False)
    with pytest.raises(ImportError, match=r"Install: .*pip install .*jaxdist"):
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


def test_a_job_of_several_tasks_that_was_started_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert connectors.choose(BATCH) == "local"
    assert "Slurm has given this job 4 tasks, but this process was started without srun or mpirun" in caplog.text
    caplog.clear()
    assert connectors.choose(BATCH | {"SLURM_NTASKS": "1"}) == "local"
    assert connectors.choose(SRUN) == "slurm"
    assert not caplog.text
