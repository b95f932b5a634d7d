"""`jaxdist run --hosts` and `--hostfile`: what they mean, and what keeps a job from starting."""

import ipaddress
import os
import sys
from pathlib import Path

import pytest

from jaxdist.launch import network
from jaxdist.launch.hosts import Host, parse_hosts, read_hostfile, total_ranks

TWO = [Host("node1", 2), Host("node2", 3)]


def test_hosts_on_the_command_line():
    assert parse_hosts("node1:2,node2:3") == TWO
    assert parse_hosts("node1, 10.0.0.2 , gpu-3.cluster:8") == [
        *[Host("node1", 1), Host("10.0.0.2", 1), Host("gpu-3.cluster", 8)],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "node1 slots=2\nnode2 slots=3 max_slots=4\n",
        "node1:2\nnode2:3\n",
        "# mine\n\n  node1:2  # the first\n\tnode2   slots=3",
    ],
    ids=["Open MPI", "MPICH", "mixed"],
)
def test_host_files(tmp_path: Path, text: str):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert read_hostfile(path) == TWO
    assert total_ranks(TWO, None) == total_ranks(TWO, 5) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1\n\nnode2 slot=2\n", "line 3: 'slot=2' in 'node2 slot=2' is not understood; expected `node1 slots=2`"),
        ("node1\nnode2:two\n", "line 2: 'node2:two' is not a host"),
        ("node1 slots=2\nnode1:2\n", "line 2: node1 is there twice"),
        ("node1 slots=0\n", "line 1: 'node1 slots=0' has no slots"),
        ("node1:2 slots=2\n", "line 1: 'slots=2' in"),
        ("# nobody\n", "names no host"),
    ],
)
def test_bad_host_files(tmp_path: Path, text: str, message: str):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        read_hostfile(path)


@pytest.mark.parametrize("text", ["", "node1,,node2", "node1:", "node1:-1", "node 1:x", "-oProxyCommand=x"])
def test_bad_hosts(text: str):
    with pytest.raises(ValueError, match=r"--hosts, entry \d: .* expected `node1 slots=2`"):
        parse_hosts(text)


def test_a_network_is_shared_only_if_all_others_are_on_it(monkeypatch: pytest.MonkeyPatch):
    own = [ipaddress.IPv4Interface(n) for n in ("127.0.0.1/8", "172.17.0.1/16", "10.0.0.1/8", "10.1.2.1/24")]
    monkeypatch.setattr(network, "interfaces", lambda: own)
    here, near, far, lost = (Host(name, 1) for name in ("localhost", "10.1.2.7", "192.0.2.1", "no-such-host.invalid"))
    assert network.shared_network([here, near]) == "10.1.2.0/24"
    assert network.shared_network([here, near, Host("10.9.0.1", 1)]) is None
    assert network.shared_network([near, far]) is network.shared_network([near, lost]) is None
    assert network.shared_network([here]) is network.shared_network([]) is None


def test_this_machine_needs_no_ssh(jaxdist, tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text("import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')))")
    done = jaxdist("run", "--hosts", "localhost:2", "--launcher", "env", "--prefix", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0 2 127.0.0.1", "[1] 1 1 2 127.0.0.1"]


def test_no_ssh(jaxdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = jaxdist("run", "--hosts", "node1", "--launcher", "env", sys.executable)
    assert done.returncode == 2
    assert "no ssh on PATH to reach node1" in done.stderr


def test_a_host_that_does_not_answer_as_it_should(jaxdist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho Welcome\necho 'bash: python: No such file' >&2\nexit 127\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = jaxdist("run", "--hosts", "localhost:1,node1:1", "--launcher", "env", sys.executable)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "node1: bash: python: No such file. Expected: `ssh node1 true` works without a password" in said
