"""deploy/, the Dockerfile and .github name what there is, and ranks that are started as they say meet.

Their syntax is for their own tools: `.ci/run` calls these.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import jobs
from harness.commands import command as jaxdist

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SBATCH = sorted((DEPLOY / "slurm").iterdir())
POD: dict[str, Any]
SERVICE, CLAIM, JOB = yaml.safe_load_all((DEPLOY / "kubernetes" / "job.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
MPI_JOB = yaml.safe_load((DEPLOY / "kubernetes" / "mpijob.yaml").read_text())
DOCKERFILE = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

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
        ["bash", path, "-m", "jaxdist", "info", "--json"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"]["connector"] == "slurm"
    assert json.loads(done.stdout)["job"]["processes"] == 2
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


@pytest.mark.slow
def test_pods_of_the_kubernetes_job_are_ranks_of_one_job() -> None:
    """With the variables of the file; where a name is resolved, and the number of pods, are this machine's."""
    given = {entry["name"]: entry.get("value") for entry in POD["containers"][0]["env"]}
    given |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(jobs.free_port()),
        "WORLD_SIZE": "2",
        "JAXDIST_SECRET": "x",
    }
    job = jobs.Job()
    for index in range(2):
        job.start([sys.executable, "-m", "jaxdist", "info", "--json"], {**given, "RANK": str(index)})
    results = job.finish()
    assert [result.returncode for result in results] == [0, 0], results
    said = json.loads(results[0].stdout)["job"]
    assert (said["connector"], said["processes"]) == ("env", 2)


def commands() -> dict[str, list[str]]:
    """What the containers run, and the image by itself."""
    roles = MPI_JOB["spec"]["mpiReplicaSpecs"]
    of = {"job.yaml": POD, **{role: about["template"]["spec"] for role, about in roles.items()}}
    found = {name: pod["containers"][0]["command"] for name, pod in of.items()}
    return found | {"Dockerfile": json.loads(re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)[0])}


@pytest.mark.parametrize("name", ["job.yaml", "Launcher", "Dockerfile"])
def test_commands_name_scripts_and_options_that_there_are(name: str) -> None:
    command = commands()[name]
    (script,) = (word for word in command if word.endswith(".py"))
    at = command.index(script)
    taken = set(re.findall(r'add_argument\("(--[\w-]+)"', (ROOT / script).read_text()))
    assert {word for word in command[at:] if word.startswith("--")} <= taken
    if "jaxdist" in command:
        start = command.index("jaxdist")
        options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", jaxdist(command[start + 1], "--help")[1]))
        assert {word for word in command[start:at] if word.startswith("-")} <= options


def test_the_image_is_made_of_what_there_is() -> None:
    extras = set(re.findall(r'--extra "?([\w$]+)"?', DOCKERFILE))
    assert {extra.replace("$CUDA", "12") for extra in extras} <= set(EXTRAS)
    assert "openssh-server" in DOCKERFILE  # the operator's workers run it
    assert commands()["Worker"][0] == "/usr/sbin/sshd"
    for line in re.findall(r"^COPY (.*) \./$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"jaxdist", "examples", "pyproject.toml", "README.md", "LICENSE"} & set(ignored)


def test_files_that_are_named_are_there() -> None:
    texts = [path.read_text() for folder in (DEPLOY, ROOT / ".github") for path in folder.rglob("*") if path.is_file()]
    named = {name for text in texts for name in re.findall(r"\b(?:deploy|tests|docs)/[\w/.-]+\.\w+", text)}
    assert len(named) > 4
    assert [name for name in named if not (ROOT / name).is_file()] == []
    links = re.findall(r"\]\(([^)#:]+)\)", (DEPLOY / "README.md").read_text())
    assert [link for link in links if not (DEPLOY / link).is_file()] == []
