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

GCLOUD = """#!/bin/bash
# Two hosts of a slice, each of which runs the command as `gcloud compute tpus tpu-vm ssh --worker=all` does.
[ "$1 $2 $3 $4 $5" = "compute tpus tpu-vm ssh my-slice" ] && [ "$7" = --worker=all ] || exit 3
for TPU_WORKER_ID in 0 1; do TPU_WORKER_ID=$TPU_WORKER_ID bash -c "${8#--command=}" & done
wait -n && wait -n
"""


@pytest.mark.slow
def test_hosts_of_a_tpu_slice_are_ranks_of_one_job(tmp_path: Path) -> None:
    gcloud, path = tmp_path / "gcloud", ROOT / "deploy" / "tpu" / "vm.sh"
    gcloud.write_text(GCLOUD)
    gcloud.chmod(0o755)
    (tmp_path / "jaxdist").mkdir()
    slice_of_two = {"TPU_WORKER_HOSTNAMES": "127.0.0.1,localhost", "JAX_COORDINATOR_PORT": str(jobs.free_port())}
    slice_of_two |= dict.fromkeys(["MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"], "")
    env = jobs.environment(slice_of_two | {"JAX_FORCE_TPU_INIT": "1", "TPU": "my-slice", "ZONE": "z"})
    env["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{env['PATH']}"

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["bash", path, *arguments]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    done = run(WHO)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[1:4] for line in done.stdout.splitlines()) == [["env", str(r), "2"] for r in range(2)]
    assert run().returncode == 2


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
