"""A rank ends with its MPI launcher, from the import of jaxdist on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import jobs

from jaxdist.control import guard, orphan

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="NO /proc: no launcher was looked for")

# Of another session it does not belong to the launcher's job: it stays until the test ends.
LAUNCHER = """
import subprocess, sys
python, how, rank = sys.argv[1:]
command = [python, "-c", rank]
if how == "wrapped":
    command = ["sh", "-c", '"$@"; exit', "sh", *command]
if how == "apart":
    command = [python, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:], start_new_session=True)", *command]
subprocess.run(command)
"""
RANK = """
import os, sys, time
import jaxdist
os.write(1, f"{os.getpid()}\\n".encode())
if "jax" in sys.modules:
    os.write(1, b"jax was imported\\n")
time.sleep(300)
"""


def gone(name: guard.Name, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen = guard.look(name.pid)
        if seen is None or seen.name != name:
            return True
        time.sleep(0.05)
    return False


def named(pid: int) -> guard.Name:
    seen = guard.look(pid)
    assert seen is not None
    return seen.name


@pytest.mark.parametrize("how", ["wrapped", "apart"])
def test_a_rank_ends_when_its_launcher_is_killed(how: str, tmp_path: Path) -> None:
    """Also one that a program started which runs in between; not what one has started in a session of its own."""
    fake = tmp_path / "mpirun"
    fake.symlink_to(Path(sys.executable).resolve())
    command = [fake, "-S", "-c", LAUNCHER, sys.executable, how, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        rank = named(int(launcher.stdout.readline()))
        try:
            assert orphan.of(rank.pid) == (None if how == "apart" else named(launcher.pid))
            launcher.kill()
            launcher.wait()
            if how == "apart":
                assert not gone(rank, 2)
            else:
                assert gone(rank, 60)
                assert launcher.stderr.read().strip() == (
                    f"[jaxdist] the MPI launcher (pid {launcher.pid}) has ended, and its rank (pid {rank.pid}) does"
                )
        finally:
            if not gone(rank, 0.1):
                os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.mpi
def test_all_ranks_end_when_mpirun_is_killed() -> None:
    job = jobs.start_mpirun(2, ["-c", "import jaxdist, time; print('UP', flush=True); time.sleep(300)"])
    job.wait_for(lambda text: text.count("UP") == 2)
    job.processes[0].kill()
    left = job.alive(patience=60)
    job.kill()
    job.clean()
    assert not left
