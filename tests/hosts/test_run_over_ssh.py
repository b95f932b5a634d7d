"""`jaxdist run --hosts … --launcher env`: how a job on other hosts ends, and what keeps it from starting."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import jobs
from namespaces import Hosts

pytestmark = pytest.mark.slow  # together

RUN = [sys.executable, "-m", "jaxdist", "run", "--launcher", "env", "--hosts"]


def start(hosts: Hosts, *args: str) -> jobs.Job:
    """A job of two ranks on node2 and one on node1, once all three run."""
    job = jobs.Job()
    hosts.start(job, "node1", [*RUN, "node2:2,node1:1", *args])
    job.wait_for(lambda text: text.count(" on node") == 3)
    return job


def send(hosts: Hosts, number: signal.Signals) -> None:
    """A signal for the `jaxdist run` on node1."""
    launchers = [p for p in hosts.processes("node1") if " jaxdist run " in p]
    assert len(launchers) == 1
    os.kill(int(launchers[0].split()[0]), number)


def test_first_failing_exit_code_and_nothing_left_anywhere(hosts: Hosts, sleeper: str) -> None:
    result = start(hosts, sleeper, "1").finish(30)[0]
    assert result.returncode == 7, result.output
    here = str(Path.cwd())
    where = re.findall(r"rank (\d) on (\w+) in (.*)", result.stdout)
    assert sorted(where) == [("0", "node2", here), ("1", "node2", here), ("2", "node1", here)]
    assert "rank 1 failed with exit code 7" in result.stderr
    assert "node2 (ranks 0 to 1) failed with exit code 7; ending the other 1" in result.stderr
    assert result.seconds < 20
    hosts.check_idle()


def test_ctrl_c_reaches_the_ranks(hosts: Hosts, sleeper: str) -> None:
    job = start(hosts, sleeper)
    send(hosts, signal.SIGINT)
    result = job.finish(20)[0]
    assert result.returncode == 130, result.output
    assert [f"rank {rank} heard 2" in result.stdout for rank in range(3)] == [True] * 3
    hosts.check_idle()


@pytest.mark.parametrize("at", ["launcher", "ssh"])
def test_a_lost_connection_ends_the_ranks(hosts: Hosts, sleeper: str, at: str) -> None:
    job = start(hosts, sleeper)
    if at == "launcher":
        send(hosts, signal.SIGKILL)
    else:
        ssh = [p for p in hosts.processes("node1") if "ssh -T" in p]
        os.kill(int(ssh[0].split()[0]), signal.SIGKILL)
    result = job.finish(20)[0]
    assert result.returncode in (-9, 137), result.output
    hosts.check_idle()


def test_hosts_that_are_not_there_are_named_in_seconds(hosts: Hosts) -> None:
    hosts.link("node3", "down")
    begin = time.monotonic()
    result = hosts.run("node1", [*RUN, "node1:1,node2:1,node3:1,node4:1", "true"])
    assert time.monotonic() - begin < 30
    assert result.returncode == 2
    said = " ".join(result.stderr.split())
    assert "node3: ssh: connect to host node3 port 22:" in said
    assert "node4: ssh: Could not resolve hostname node4" in said
    assert "node2:" not in said


@pytest.mark.mpi
def test_mpirun_is_not_even_started_for_a_host_that_is_not_there(hosts: Hosts) -> None:
    jobs.mpirun_path()
    result = hosts.run("node1", [*RUN[:-2], "mpirun", "--hosts", "node1:1,node4:1", "true"])
    assert result.returncode == 2
    assert "node4: ssh: Could not resolve hostname node4" in " ".join(result.stderr.split())


def test_a_host_without_this_folder(hosts: Hosts) -> None:
    elsewhere = ["sh", "-c", 'mkdir /run/mine && cd /run/mine && exec "$@"', "sh"]
    result = hosts.run("node1", [*elsewhere, *RUN, "node2:1", "true"], timeout=30)
    assert result.returncode == 2
    assert re.search(r"node2:.*/run/mine: No such file or directory.*a shared disk", " ".join(result.stderr.split()))


def test_the_tutorials_program(hosts: Hosts, tmp_path: Path) -> None:
    """Its last step, on one rank of each host."""
    root = Path(__file__).parents[2]
    program = tmp_path / "train.py"
    shutil.copy(root / "examples" / "tutorial" / "step4.py", program)
    last = re.findall(r"^epoch 19 loss (\S+)", (root / "docs" / "tutorial.md").read_text(), re.MULTILINE)[0]
    there = ["sh", "-c", f'cd {tmp_path} && PYTHONPATH={root} JAX_ENABLE_X64=0 exec "$@"', "sh"]
    result = hosts.run("node1", [*there, *RUN, "node1:1,node2:1", str(program)], timeout=120)
    assert result.returncode == 0, result.output
    found = re.findall(r"^epoch (\d+) loss (\S+) right", result.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, _ in found] == list(range(20))
    assert float(found[-1][1]) == pytest.approx(float(last), rel=1e-2)
