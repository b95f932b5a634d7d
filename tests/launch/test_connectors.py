"""Which connector, rank and size: what each launcher's environment gives, and what is refused."""

import ast
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import jobs
from harness.errors import missing, raises

from jaxdist import connectors  # private: what an environment of a cluster chooses, where there is no cluster

SCRIPTS = Path(__file__).parent / "scripts"
WHO = [sys.executable, str(SCRIPTS / "who.py")]

OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "4"}
INTEL = HYDRA | {"MPI_LOCALRANKID": "1", "I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_BOOTSTRAP": "slurm"}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
MVAPICH_3 = {name.replace("MV2", "MVP"): value for name, value in MVAPICH.items()}
PMI = {"PMI_SIZE": "4", "PMI_RANK": "1"}
MODULE = {"I_MPI_ROOT": "/opt/impi", "I_MPI_PMI_LIBRARY": "/usr/lib64/libpmi2.so"}  # without being started by it
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "n[1-2]"}
SRUN = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n1"}
DAEMON = SRUN | {"SLURM_STEP_NUM_TASKS": "2"}  # of mpirun, on each of two nodes
SECOND = SRUN | {"SLURM_PROCID": "1"}
# As Kubeflow's controllers set them, of Trainer and of the older JAXJob.
TRAINER = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "train-0.train:29500"}
JAXJOB = {"NUM_PROCESSES": "2", "PROCESS_ID": "1", "COORDINATOR_ADDRESS": "train-worker-0", "COORDINATOR_PORT": "6666"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}

CHOSEN = [
    ({}, "local"),
    *((env, "mpi") for env in (OMPI, HYDRA, MVAPICH, MVAPICH_3, INTEL, PMI)),
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
    *(
        (allocation | launcher, "mpi")  # mpirun inside sbatch starts its daemons with srun
        for allocation in (BATCH, SRUN, DAEMON, SRUN | {"SLURM_STEP_NUM_TASKS": "1"})
        for launcher in (OMPI, HYDRA, INTEL, MVAPICH, MVAPICH_3, PMI, PMI | MODULE, {"MPI_LOCALRANKID": "1"})
    ),
    (BATCH | {"PMIX_RANK": "1"}, "mpi"),
    (OMPI | {"JAXDIST_CONNECTOR": "local"}, "local"),
    (TORCHRUN | {"JAXDIST_CONNECTOR": "tcp://h:1"}, "tcp://h:1"),
    ({"RANK": "0", "WORLD_SIZE": "1"}, "env://"),
    (TRAINER, "kubeflow"),
    (JAXJOB, "kubeflow"),
    (TRAINER | {"JAX_NUM_PROCESSES": "1"}, "local"),
    ({"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "h:1"}, "kubeflow"),  # which says that one is missing
]


def test_the_launcher_that_is_there_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # mpi4py is installed
    wrong = [(env, want, got) for env, want in CHOSEN if (got := connectors.choose(env)) != want]
    assert wrong == []


@pytest.mark.parametrize(
    "env",
    [
        SRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        PMI | {"RANK": "0", "WORLD_SIZE": "1"},
        SRUN | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        SRUN | {"PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
)
def test_alone_by_leftovers_but_one_of_several_by_the_launcher(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # mpi4py is not installed
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with raises(RuntimeError, "of 4", "JAXDIST_CONNECTOR=local"):
        connectors.connect()
    monkeypatch.setenv("JAXDIST_CONNECTOR", "local")
    assert connectors.connect().size == 1


def test_an_mpi_launcher_without_mpi4py_is_an_error_never_many_trainings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for env in (OMPI, {"PMIX_RANK": "0"}):
        with raises(ImportError, "mpi4py", "pip install"):
            connectors.choose(env)
    assert connectors.choose({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == "local"
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with raises(ImportError, "pip install", "jaxdist"):
        connectors.connect("mpi")


def test_a_job_of_several_tasks_that_was_started_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert connectors.choose(BATCH) == "local"
    assert "4 tasks" in caplog.text
    assert "srun" in caplog.text
    caplog.clear()
    assert connectors.choose(BATCH | {"SLURM_NTASKS": "1"}) == "local"
    assert connectors.choose(SRUN) == "slurm"
    assert not caplog.text


TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def without(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


@pytest.mark.parametrize(
    ("spec", "env", "given", "tokens"),
    [
        *(("auto", without(TORCHRUN, name), {}, [name]) for name in TORCHRUN),
        ("env://", without(TWO, "MASTER_ADDR", "MASTER_PORT"), {}, ["missing", "MASTER_ADDR", "MASTER_PORT"]),
        ("env://", TWO | {"RANK": "2"}, {}, ["RANK", "'2'"]),
        ("env://", TWO | {"WORLD_SIZE": "0"}, {}, ["WORLD_SIZE", "'0'"]),
        ("env://", TWO | {"MASTER_PORT": "99999"}, {}, ["99999"]),
        *((url, {}, {"rank": 0, "size": 1}, ["tcp://host:port"]) for url in ("tcp://host", "tcp://:5", "tcp://h:0")),
        ("tcp://h:5", {}, {}, ["RANK", "WORLD_SIZE"]),
        ("tcp://h:5", {}, {"rank": 0}, ["WORLD_SIZE"]),
        ("slurm", {"SLURM_NTASKS": "2"}, {}, ["SLURM_PROCID", "SLURM_JOB_ID", "SLURM_NODELIST"]),
        *(("slurm", BATCH | {"SLURM_NODELIST": x}, {}, [x]) for x in ("node[1-2", "node[]", "node]")),
        ("mpl", {}, {}, ["'mpl'", "auto", "mpi", "slurm", "env"]),
        ("local", {}, {"rank": 0, "size": 2}, ["rank=", "size="]),
    ],
)
def test_what_is_missing_or_malformed_is_named(
    spec: str, env: dict[str, str], given: Any, tokens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with raises(ValueError, *tokens):
        connectors.connect(spec, timeout=1.0, **given)


def unknown(*_: object, **__: object) -> None:
    raise socket.gaierror("no such host")  # at once: a network that is not there may take its time


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a.invalid,b,c", "a.invalid"),
        ("node[3,5-7].invalid,other", "node3.invalid"),
        ("n[1-2]-ib[007-009].invalid", "n1-ib007.invalid"),
    ],
)
def test_slurms_root_is_on_the_first_host(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SECOND | {"SLURM_STEP_NODELIST": nodes}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with raises(TimeoutError, first):
        connectors.connect("slurm", timeout=0.3)


def test_an_object_of_the_users_own() -> None:
    mine: Any = connectors.connect("local")
    assert connectors.connect(mine) is mine
    assert isinstance(mine, connectors.Connector)
    thing: Any = object()
    with raises(TypeError, "name", "rank", "size"):
        connectors.connect(thing)
    mine.rank = 3
    with raises(ValueError, "rank 3", "size 1"):
        connectors.connect(mine)


def test_who_does_not_come_is_named_in_the_time_given() -> None:
    url = f"tcp://127.0.0.1:{jobs.free_port()}"
    start = time.monotonic()
    with raises(TimeoutError, url, "0.5 s"):
        connectors.connect(url, timeout=0.5, rank=1, size=2)
    assert 0.4 < time.monotonic() - start < 20
    with raises(TimeoutError, "1 of 3", "1, 2"):
        connectors.connect(f"tcp://127.0.0.1:{jobs.free_port()}", timeout=0.5, rank=0, size=3)


def test_a_taken_port_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with raises(OSError, f"port {port}"):
            connectors.connect(f"tcp://127.0.0.1:{port}", timeout=5, rank=0, size=2)


def said(result: jobs.Result) -> list[list[str]]:
    return sorted(line.split()[1:] for line in result.stdout.splitlines() if line.startswith("job "))


AGENT = {"LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "{taken}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
POD = {"JAX_PROCESS_ID": "{rank}", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:{port}"}
OLD_POD = {"PROCESS_ID": "{rank}", "COORDINATOR_ADDRESS": "127.0.0.1", "COORDINATOR_PORT": "{port}"}
# As in GKE. JAX takes a process to be on a TPU's host where it finds chips, or where this is set.
TPU = {
    "JAX_FORCE_TPU_INIT": "1", "TPU_WORKER_HOSTNAMES": "127.0.0.1", "TPU_WORKER_ID": "0", "MEGASCALE_NUM_SLICES": "",
    "MEGASCALE_SLICE_ID": "", "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1", "JAX_COORDINATOR_PORT": "{port}",
}  # fmt: skip
MEETINGS = {
    "an address": ("tcp://127.0.0.1:{port}", {"RANK": "{rank}", "WORLD_SIZE": "2"}, "tcp://127.0.0.1:{port}"),
    "torchrun": (
        "env://", {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"} | AGENT,
        "env",
    ),
    "Kubeflow's Trainer": ("auto", TRAINER | POD, "env"),
    "Kubeflow's JAXJob": ("auto", JAXJOB | OLD_POD, "env"),
    "a TPU slice": ("auto", TPU | {"TPU_WORKER_HOSTNAMES": "127.0.0.1,localhost", "TPU_WORKER_ID": "{rank}"}, "env"),
    "TPU slices": (
        "auto", TPU | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "{rank}"}, "env"
    ),
}  # fmt: skip
"""What `init` is given, what the environment holds, and the connector's name."""


@pytest.mark.parametrize("name", ["an address", *(pytest.param(x, marks=pytest.mark.slow) for x in [*MEETINGS][1:])])
def test_two_ranks(name: str) -> None:
    """Of torchrun, whose own port is left alone."""
    (where, env, connector), port, job = MEETINGS[name], jobs.free_port(), jobs.Job()
    with socket.create_server(("127.0.0.1", 0)) as agent:
        for rank in (1, 0):  # the root comes last
            filled = {"rank": rank, "port": port, "taken": agent.getsockname()[1]}
            own = {key: value.format(**filled) for key, value in env.items()}
            job.start([*WHO, where.format(**filled)], {"JAXDIST_SECRET": "x", **own})
        done = job.end(60)
    assert said(done) == [[connector.format(port=port), str(r), "2", str(r), "2", "xla"] for r in range(2)], done.output


@pytest.mark.parametrize(
    ("where", "env", "tokens"),
    [
        (
            "auto",
            TPU | {"MEGASCALE_NUM_SLICES": None, "GCE_METADATA_IP": "127.0.0.1:9"},
            ("TPU_WORKER_ID", "WORLD_SIZE"),
        ),
        ("tpu", {}, ("connector 'tpu'", "no TPU")),
    ],
)
def test_a_tpu_whose_slice_is_not_known(where: str, env: dict[str, str | None], tokens: tuple[str, ...]) -> None:
    done = jobs.Job().start([*WHO, where], env | {"JAX_COORDINATOR_PORT": None}).end(60)
    assert done.returncode != 0
    assert missing(tokens, done.output) == []


@pytest.mark.slow
@pytest.mark.parametrize("differs", [{"SLURM_JOB_ID": "4712"}, {"SLURM_RESTART_COUNT": "1"}], ids=["id", "requeued"])
def test_two_slurm_jobs_at_once_on_one_host_do_not_mix(differs: dict[str, str]) -> None:
    """Nor one with what is left of its first run."""
    shared = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    shared |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODELIST": "127.0.0.1"}
    one, other = jobs.Job(), jobs.Job()

    def start(job: jobs.Job, rank: int) -> None:
        own = {"SLURM_JOB_ID": "4711", **(differs if job is other else {})}
        job.start(WHO, shared | own | {"SLURM_PROCID": str(rank)})

    start(one, 0)
    start(other, 1)
    time.sleep(2)  # in which they would meet
    for job, rank in ((one, 1), (other, 0)):
        start(job, rank)  # the other job is not complete without what has met the first one
        assert said(job.end(60)) == [["slurm", str(rank), "2", str(rank), "2", "xla"] for rank in range(2)]


def mpich() -> tuple[str, str]:
    launcher = shutil.which("mpiexec.hydra") or shutil.which("mpiexec.mpich")
    library = next((p for d in ("/usr/lib", "/usr/lib64") for p in Path(d).glob("*/libmpich.so.12")), None)
    if launcher is None or library is None:
        pytest.skip("NOT CHECKED: connector mpi under MPICH (apt-get install mpich brings it)")
    return launcher, str(library)


@pytest.mark.slow
@pytest.mark.mpi
def test_mpich_of_the_machine_and_what_is_said_where_another_mpi_is_loaded(tmp_path: Path) -> None:
    launcher, library = mpich()
    (tmp_path / "libmpi.so.12").symlink_to(library)

    def run(command: list[str], env: dict[str, str] | None = None) -> jobs.Result:
        return jobs.Job().start(command, env).end(90)

    two = [["mpi", str(r), "2", str(r), "2", "xla"] for r in range(2)]
    command = [launcher, "-np", "2", *WHO]
    # As Intel MPI's mpirun in an sbatch script leaves it: SLURM_PROCID is 0 on every rank.
    allocation = BATCH | {"SLURM_NTASKS": "2", "I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_BOOTSTRAP": "slurm"}
    failed = run([*command, "fail"], {"LD_LIBRARY_PATH": str(tmp_path)} | allocation)
    assert said(failed) == two, failed.output
    assert failed.stderr.count("mpi4jax was compiled for Open MPI") == 1  # so xla is chosen for arrays
    assert failed.returncode != 0
    assert "ValueError: boom on purpose" in failed.output
    job = jobs.Job().start([*command, "goes on"], {"LD_LIBRARY_PATH": str(tmp_path)})
    job.wait_for(lambda text: text.count("job") == 2)
    (daemon,) = (int(entry.split()[0]) for entry in job.alive() if "hydra_pmi_proxy" in entry.split()[1])
    os.kill(daemon, signal.SIGKILL)
    assert job.finish(30)[0].returncode != 0  # no rank has outlived it
    if Path(sys.prefix, "lib", "libmpi.so.40").exists():
        # The wheel's Open MPI is found first: not two trainings alone, but an error that says what to set.
        mixed = run(command)
        assert mixed.returncode != 0
        assert "MPI4PY_LIBMPI" in mixed.output
        fixed = run(command, {"LD_LIBRARY_PATH": str(tmp_path), "MPI4PY_LIBMPI": "libmpi.so.12"})
        assert (fixed.returncode, said(fixed)) == (0, two), fixed.output


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
ALONE = (
    ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0"}, "MVAPICH"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "I_MPI_MPIRUN": "mpirun"}, "Intel MPI"),
    (STEP | {"SLURM_PROCID": "1", "JAXDIST_CONNECTOR": "mpi"}, "'slurm'"),
    ({"PMIX_RANK": "1"}, "rank 1"),
)


@pytest.mark.slow
@pytest.mark.mpi
def test_alone_in_the_eyes_of_mpi_and_one_of_several_for_the_launcher() -> None:
    jobs.mpirun_path()
    command = [sys.executable, str(SCRIPTS / "alone.py"), json.dumps([env for env, _ in ALONE])]
    result = jobs.Job().start(command).end(60)
    lines = [ast.literal_eval(line) for line in result.stdout.splitlines()]
    assert len(lines) == len(ALONE), result.output
    for (_, token), line in zip(ALONE, lines, strict=True):
        assert token in line
        assert "different MPIs" in line


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_does_not_come_to_mpi_init_is_not_waited_for_without_end() -> None:
    assert jobs.launch("mpirun", 2, [*WHO[1:], "late"], {"JAXDIST_TIMEOUT": "2"}).end(60).returncode != 0


# --- engines


@pytest.mark.parametrize("dies", [False, True], ids=["to the end", "a worker is killed"])
def test_workers_of_ray_train_are_ranks_of_one_job(dies: bool, tmp_path: Path) -> None:
    """Also after one was killed: Ray starts all of them again, and they go on from the checkpoint."""
    asked = [sys.executable, "-c", "from ray.train.v2.jax import JaxTrainer"]
    there = subprocess.run(asked, capture_output=True, text=True, check=False)
    if there.returncode:  # Ray alone lacks what `ray[train]` brings
        pytest.skip(f"NO RAY TRAIN: uv run --group integrations ({there.stderr.splitlines()[-1]})")
    command = [sys.executable, str(SCRIPTS / "ray_train.py"), str(tmp_path), *["dies"] * dies]
    # Under `uv run`, Ray would build an environment anew for each worker, and wait for it no longer than a minute.
    env = {"JAX_PLATFORMS": "cpu", "RAY_TRAIN_V2_ENABLED": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "XLA_FLAGS": None}
    result = jobs.Job().start(command, env).end(300)
    assert result.returncode == 0, result.output
    said = [(tmp_path / f"said-{rank}").read_text() for rank in range(2)]
    first, devices = (2, 2) if dies else (0, 4)
    assert said == [f"rank {rank} of 2 by ray from {first} mean 1.5 0.06250 on {devices}" for rank in range(2)]
