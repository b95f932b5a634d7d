"""Ranks that are started as the files of deploy/ say meet.

Their syntax is for their own tools: `.ci/run` calls these.
"""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from harness import jobs

ROOT = Path(__file__).parents[2]
WHO = ROOT / "tests" / "launch" / "scripts" / "who.py"
SBATCH = sorted((ROOT / "deploy" / "slurm").iterdir())

SRUN = """#!/bin/bash
# Two tasks of a step, as srun starts them.
while [[ $1 == --* ]]; do echo "option $1" >&2; shift; done
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" &
wait -n && wait -n
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", SBATCH, ids=lambda path: path.name)
def test_tasks_of_the_sbatch_scripts_are_ranks_of_one_job(path: Path, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    own = {"SLURM_JOB_ID": str(uuid.uuid4().int % 10**9), "SLURM_CPUS_PER_TASK": "1", "MPI_PLUGIN": "pmix"}
    env = jobs.environment(own)
    env["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        ["bash", path, WHO],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[1:4] for line in done.stdout.splitlines()) == [["slurm", str(r), "2"] for r in range(2)]
    assert "option --cpus-per-task=1\noption --kill-on-bad-exit=1\n" in done.stderr
    usage = subprocess.run(["bash", path], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    assert usage.stderr.startswith("usage: sbatch ")
