"""MPI: Open MPI from the wheel, and MPICH where Debian's package is installed."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import sys
import types
from pathlib import Path

import pytest
from harness import jobs

from jaxdist.connectors import mpi

_SCRIPT = """
import sys
import numpy as np
from jaxdist.runtime.context import init
ctx = init(timeout=60)
c = ctx.connector
assert (ctx.broadcast(np.full(3_000_000, ctx.rank), root=1) == 1).all()
# One write: unbuffered, print() makes one of each argument, and hydra puts those of several ranks on one line.
said = ("job", c.name, c.rank, c.size, c.local_rank, c.local_size, ctx.communicator)
sys.stdout.write(" ".join(map(str, said)) + chr(10))
if "fail" in sys.argv:
    ctx.barrier()
    if ctx.rank == 1:
        raise ValueError("boom on purpose")
    ctx.barrier()
"""
_TWO = [["mpi", str(r), "2", str(r), "2", "xla"] for r in range(2)]


def _lines(result: jobs.Result) -> list[list[str]]:
    return sorted(line.split()[1:] for line in result.stdout.splitlines() if line[:4] == "job ")


def _mpich() -> tuple[str, str]:
    launcher = shutil.which("mpiexec.hydra") or shutil.which("mpiexec.mpich")
    library = next((p for d in ("/usr/lib", "/usr/lib64") for p in Path(d).glob("*/libmpich.so.12")), None)
    if launcher is None or library is None:
        pytest.skip(
            "NOT CHECKED: connector mpi under MPICH (no mpiexec.hydra with libmpich.so.12; "
            "apt-get install mpich brings them)"
        )
    return launcher, str(library)


@pytest.mark.mpi
@pytest.mark.slow
def test_mpich_from_debian(tmp_path):
    launcher, library = _mpich()
    (tmp_path / "libmpi.so.12").symlink_to(library)

    def run(command: list[str], env: dict[str, str] | None = None) -> jobs.Result:
        job = jobs.Job()
        job.start(command, env)
        return job.finish(90)[0]

    command = [launcher, "-np", "2", sys.executable, "-c", _SCRIPT]
    # The same as Intel MPI's mpirun in an sbatch script leaves it: SLURM_PROCID is 0 on every rank.
    allocation = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost",
                  "I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_BOOTSTRAP": "slurm"}  # fmt: skip
    failed = run([*command, "fail"], {"LD_LIBRARY_PATH": str(tmp_path)} | allocation)
    assert _lines(failed) == _TWO, failed.output
    # mpi4jax is compiled for Open MPI, so what is chosen for the arrays is xla, and the root says why
    assert failed.stderr.count("arrays move over gloo, not over MPI: mpi4jax was compiled for Open MPI") == 1
    assert failed.returncode != 0
    assert "ValueError: boom on purpose" in failed.output
    if Path(sys.prefix, "lib", "libmpi.so.40").exists():
        # the wheel's Open MPI is found first: not two trainings alone, but an error
        mixed = run(command)
        assert mixed.returncode != 0
        assert "hydra_pmi_proxy) started 2 processes, this one as rank" in mixed.output
        # What it says to do works, in the same shell.
        fix = re.search(r"Before the job starts: (mkdir .*MPI4PY_LIBMPI=libmpi.so.12); or start it", mixed.output)
        assert fix is not None, mixed.output
        assert str(Path(sys.prefix, "bin", "mpirun")) in mixed.output
        fixed = run(["bash", "-c", f"{fix[1]} && exec {shlex.join(command)}"], {"HOME": str(tmp_path)})
        assert (fixed.returncode, _lines(fixed)) == (0, _TWO), fixed.output


_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}


_ALONE = (
    ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0"}, "the launcher (MVAPICH"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "I_MPI_MPIRUN": "mpirun"}, "(Intel MPI"),
    (_STEP | {"SLURM_PROCID": "1", "JAXDIST_CONNECTOR": "mpi"}, "Under srun connector 'slurm' needs no MPI"),
    ({"PMIX_RANK": "1"}, "started several processes, this one as rank 1"),
)


@pytest.mark.slow
@pytest.mark.mpi
def test_alone_in_the_eyes_of_mpi_and_one_of_several_for_the_launcher():
    """The launcher's variables, seen by a library of another MPI, which starts as a job of its own."""
    jobs.mpirun_path()
    script = """
import json, os, sys
from mpi4py import MPI  # before: Open MPI would look for the server of PMIX_RANK
from jaxdist.runtime.context import init
for env in json.loads(sys.argv[1]):
    os.environ.update(env)
    try:
        init(timeout=30)
    except RuntimeError as error:
        print(repr(str(error)))
    for name in env:
        del os.environ[name]
"""
    job = jobs.Job()
    job.start([sys.executable, "-c", script, json.dumps([env for env, _ in _ALONE])])
    result = job.finish(60)[0]
    said = result.stdout.splitlines()
    assert len(said) == len(_ALONE), result.output
    for (_, words), line in zip(_ALONE, said, strict=True):
        assert words in ast.literal_eval(line)
        assert "sees 1: they are of different MPIs" in line


_LOCAL = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
_NETWORKS, _YIELD = {"OMPI_MCA_btl": "^ofi"}, {"OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.mark.parametrize(
    ("env", "cores", "settings"),
    [
        (_LOCAL, 4, _NETWORKS),
        (_LOCAL, 2, _NETWORKS | _YIELD),
        (_LOCAL, 1, _NETWORKS | _YIELD),  # pinned
        (_LOCAL | {"OMPI_COMM_WORLD_SIZE": "4"}, 4, {}),  # two hosts
        (_LOCAL | {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_mpi_yield_when_idle": "0"}, 1, {}),  # the user knows better
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 1, {}),  # MPICH
    ],
)
def test_what_open_mpi_is_told(env, cores, settings):
    assert mpi.open_mpi_settings(env, cores) == settings


def test_programs_started_from_here_are_not_told(monkeypatch):
    ((name, value),) = _YIELD.items()
    monkeypatch.delenv(name, raising=False)
    with mpi.in_environment(_YIELD):
        assert os.environ[name] == value
    assert name not in os.environ


def test_open_mpi_is_told_before_it_starts(monkeypatch):
    class Mpi4py(types.ModuleType):
        @property
        def MPI(self):  # what is imported, and starts MPI
            return dict(os.environ)

    for name, value in _LOCAL.items():
        monkeypatch.setenv(name, value)
    for name in _NETWORKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", Mpi4py("mpi4py"))
    assert mpi.load().items() >= _NETWORKS.items()


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_does_not_come_to_mpi_init_is_not_waited_for_without_end():
    script = (
        "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': time.sleep(90)\nimport jaxdist; jaxdist.init()"
    )
    result = jobs.mpirun(2, ["-c", script], {"JAXDIST_TIMEOUT": "2"}, timeout=60)
    assert result.returncode != 0
    assert "_wait_for_all_ranks_in_mpi_init" in result.output
