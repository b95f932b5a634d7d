"""Slurm: host lists, and steps simulated by their environment (no Slurm here: srun not checked)."""

from __future__ import annotations

import sys

import pytest
from harness import jobs

from jaxdist.connectors import slurm

_SCRIPT = """
from jaxdist.connectors import connect
c = connect(timeout=30)
jobs = c.control.exchange("job", __import__("os").environ["SLURM_JOB_ID"])
assert len(set(jobs)) == 1, jobs
print(c.name, c.rank, c.size, c.local_rank, c.local_size)
c.control.close()
"""


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("a,b,c", "a"),
        ("node[01-04]", "node01"),
        ("node[3,5-7],other", "node3"),
        ("n[1-2]-ib[007-009]", "n1-ib007"),
        ("gpu-a[12-15,20].cluster,login1", "gpu-a12.cluster"),
    ],
)
def test_first_host(nodelist, first):
    assert slurm.first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", "node[1-2", "node[]", "node]"])
def test_malformed_host_list(nodelist):
    with pytest.raises(ValueError, match="Slurm host list"):
        slurm.first_host(nodelist)


def test_missing_variables_are_listed():
    with pytest.raises(ValueError, match="missing: SLURM_PROCID, SLURM_JOB_ID, SLURM_NODELIST"):
        slurm.connect(env={"SLURM_NTASKS": "2"})


@pytest.mark.slow
def test_two_jobs_at_once_on_one_host_do_not_mix():
    started = []
    for number in ("4711", "4712"):
        job = jobs.Job()
        for rank in range(2):
            job.start(
                [sys.executable, "-c", _SCRIPT],
                {"SLURM_JOB_ID": number, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2",
                 "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
                 "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODELIST": "127.0.0.1"},
            )  # fmt: skip
        started.append(job)
    for job in started:
        for rank, result in enumerate(job.finish(60)):
            assert result.returncode == 0, result.output
            assert result.stdout.split() == ["slurm", str(rank), "2", str(rank), "2"]
