"""Ranks that are started as the files of deploy/ say meet.

Their syntax is for their own tools: `.ci/run` calls these.
"""

import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import jobs

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WHO = ROOT / "tests" / "launch" / "scripts" / "who.py"
SBATCH = sorted((DEPLOY / "slurm").iterdir())
POD: dict[str, Any]
SERVICE, CLAIM, JOB = yaml.safe_load_all((DEPLOY / "kubernetes" / "job.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]

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


def test_numbers_and_names_of_the_kubernetes_job_agree() -> None:
    name, spec = JOB["metadata"]["name"], JOB["spec"]
    env = {entry["name"]: entry.get("value") for entry in POD["containers"][0]["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(env["WORLD_SIZE"])
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert env["MASTER_ADDR"] == f"{name}-0.{SERVICE['metadata']['name']}"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert {v["name"] for v in POD["volumes"]} == {v["name"] for v in POD["containers"][0]["volumeMounts"]}
    assert POD["volumes"][0]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JAXDIST_SECRET"} <= env.keys()
