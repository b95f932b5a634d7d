"""Jobs on several hosts, which are namespaces of this machine: who each rank is, the one promise, and the end."""

import os
import pickle
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harness import jobs, oracle
from namespaces import Hosts, Unavailable

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parent / "scripts" / "hosts.py")
RUN = [sys.executable, "-m", "jaxdist", "run"]
SMALL, LARGE = "clip_adamw", "few_examples"  # cases of `oracle`
TWO_EACH = ["0 node1 0 2", "1 node1 1 2", "2 node2 0 2", "3 node2 1 2"]
SECRET = {"JAXDIST_SECRET": "of these two"}
# Open MPI uses all cards unless told, and docker0 leads nowhere. A cluster says nothing of more ranks than cores.
NETWORK = ["--mca", "btl_tcp_if_include", "10.77.0.0/24"]
CLUSTER = {"PRTE_MCA_rmaps_default_mapping_policy": None, "OMPI_MCA_rmaps_base_oversubscribe": None}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    try:
        made = Hosts(3, tmp_path_factory.mktemp("hosts"))
    except Unavailable as why:
        pytest.skip(f"NOT CHECKED: jobs across hosts. {why}")
    yield made
    made.close()


@pytest.fixture
def hosts(three: Hosts) -> Iterator[Hosts]:
    """node1, node2 and node3; what a failed test leaves there is ended."""
    yield three
    three.kill()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes, in a file."""
    path = tmp_path_factory.mktemp("oracle") / "expected.pickle"
    path.write_bytes(pickle.dumps({name: oracle.expected(name) for name in (SMALL, LARGE)}))
    return str(path)


def check(output: str, where: Sequence[str], communicator: str) -> None:
    """Each rank is where it should be, and computed what one device would."""
    found = sorted(re.findall(r"REPORT (\d \w+ \d \d) (\w+) (\w+)", output))
    assert found == sorted((one, communicator, "True") for one in where), output


@pytest.mark.mpi
@pytest.mark.parametrize("communicator", ["xla", "mpi"])
def test_open_mpi(hosts: Hosts, expected: str, communicator: str, tmp_path: Path) -> None:
    """With the hosts on the command line and in a file; in shards over all ranks and within hosts."""
    (file := tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    where = ["-H", "node1:2,node2:2"] if communicator == "xla" else ["--hostfile", str(file)]
    cases = [f"{LARGE}:3", f"{SMALL}:2:host"] + [f"{LARGE}:3:host"] * (communicator == "xla")
    mpirun = [jobs.mpirun_path(), "-np", "4", *NETWORK, *where, sys.executable, SCRIPT, communicator, "auto", expected]
    check(hosts.run("node1", [*mpirun, *cases], CLUSTER).output, TWO_EACH, communicator)


@pytest.mark.mpi
def test_jaxdist_run_on_three_hosts(hosts: Hosts, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# rank 0 is not where the job is started\nnode2:2\n\nnode1 slots=1  # Open MPI's form\nnode3\n")
    run = [*RUN, "--hostfile", str(file), "--prefix", SCRIPT, "auto", "auto", expected]
    result = hosts.run("node1", [*run, f"{SMALL}:0"])
    assert "\n[0] REPORT" in "\n" + result.stdout, result.output
    check(result.output, ["0 node2 0 2", "1 node2 1 2", "2 node1 0 1", "3 node3 0 1"], "mpi")
    assert result.output.count(str(Path.cwd())) == 4


@pytest.mark.parametrize("how", ["env", "tcp"])
def test_by_hand(hosts: Hosts, expected: str, how: str, tmp_path: Path) -> None:
    """With the secret of a home that the hosts share, or one that is given; the root on either host."""
    job, connector = jobs.Job(), "env://" if how == "env" else "tcp://10.77.0.2:29500"
    for i, host in enumerate(["node1", "node2"] if how == "env" else ["node2", "node1"]):
        env = {"RANK": str(i), "WORLD_SIZE": "2", "HOME": str(tmp_path)}
        env |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"} if how == "env" else SECRET
        hosts.start(job, host, [sys.executable, SCRIPT, "auto", connector, expected, f"{SMALL}:0"], env)
    result = job.end()
    assert result.returncode == 0, result.output
    nodes = ["0 node1 0 1", "1 node2 0 1"] if how == "env" else ["0 node2 0 1", "1 node1 0 1"]
    check(result.output, nodes, "xla")
    if how == "env":
        assert (tmp_path / ".jaxdist" / "secret").stat().st_mode & 0o777 == 0o600


# --- how they end


def training_on(hosts: Hosts, *fails: str) -> jobs.Job:
    """A job of two ranks on node2 and one on node1, once all three train."""
    job = jobs.Job()
    run = [*RUN, "--hosts", "node2:2,node1:1", SCRIPT, "auto", "auto", *fails]
    hosts.start(job, "node1", run)
    job.wait_for(lambda text: all(text.count(f"rank {i} trains") >= 1 for i in range(3)))
    return job


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["exit", "kill"])
def test_a_rank_that_ends_on_one_host_ends_all(hosts: Hosts, what: str) -> None:
    job = training_on(hosts, *(["1"] if what == "exit" else []))
    if what == "kill":
        ranks = [p for p in hosts.processes("node2") if re.match(r"\d+ \S+ \S*hosts\.py auto auto", p)]
        os.kill(int(ranks[-1].split()[0]), signal.SIGKILL)
    result = job.end(60)
    assert result.returncode == 7 if what == "exit" else result.returncode != 0, result.output
    assert "rank 1" in result.output if what == "exit" else "node2" in result.output, result.output
    hosts.check_idle()


@pytest.mark.mpi
def test_a_launcher_that_is_killed_ends_the_ranks(hosts: Hosts) -> None:
    job = training_on(hosts)
    found = [p for p in hosts.processes("node1") if " jaxdist run " in p]
    os.kill(int(found[0].split()[0]), signal.SIGKILL)
    assert job.end(60).returncode != 0
    hosts.check_idle()


def test_a_link_that_goes_down_in_mid_training(hosts: Hosts) -> None:
    """Each side says whom it can't reach."""
    job = jobs.Job()
    for i, host in enumerate(["node1", "node2"]):
        env = {"RANK": str(i), "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500", **SECRET}
        hosts.start(job, host, [sys.executable, SCRIPT, "xla", "auto"], env | {"JAXDIST_TIMEOUT": "3"})
    job.wait_for(lambda text: all(text.count(f"rank {i} trains") >= 2 for i in (0, 1)))
    hosts.link("node2", "down")
    results = job.finish(60)
    for rank, result in enumerate(results):
        assert result.returncode != 0
        assert f"rank {1 - rank} (node{2 - rank}" in result.output, result.output
    hosts.check_idle()


@pytest.mark.mpi
def test_hosts_that_are_not_there_are_named(hosts: Hosts) -> None:
    hosts.link("node3", "down")
    command = [*RUN, "--hosts", "node1:1,node2:1,node3:1,node4:1", "true"]
    result = hosts.run("node1", command, timeout=60)
    assert result.returncode == 2
    said = " ".join(result.stderr.split())
    assert all(f"{name}: ssh: " in said for name in ("node3", "node4"))
    assert "node2: ssh" not in said
