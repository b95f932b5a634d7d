"""The command line of `jaxdist run`: what is refused with exit code 2, hints, and hosts."""

import sys
from pathlib import Path

import pytest
from harness.commands import refused
from harness.errors import missing
from harness.started import Jaxdist

REFUSED = [
    (["nosuch.py"], ["nosuch.py"]),
    (["no-such-command"], ["no-such-command"]),
    (["-m"], ["SCRIPT"]),
    (["-n", "0", "echo"], ["-n"]),
    (["--launcher", "env", "--hosts", "a:1", "echo"], ["mpirun"]),
    (["-n", "3", "--hosts", "a:1,b:1", "echo"], ["-n 3", "2 slots"]),
    (["--hosts", "a:1,a:1", "echo"], ["'a:1'", "twice"]),
    (["--hosts", "a", "--hostfile", __file__, "echo"], ["--hosts", "--hostfile"]),
    (["--hosts", "", "echo"], ["no host"]),
    *((["--hosts", hosts, "echo"], ["is not a host"])
      for hosts in ("node1:", "node1:-1", "node 1:x", "-oProxyCommand=x")),
    (["-n", "3", "--lanes", "2", "echo"], ["3 ranks", "--lanes 2"]),
    (["-n", "3", "--lanes", "4", "echo"], ["3 ranks", "--lanes 4", "evenly"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "tokens"), REFUSED, ids=lambda words: " ".join(words)[:40])
def test_what_is_refused(words: list[str], tokens: list[str]) -> None:
    refused(tokens, "run", *words)


@pytest.mark.parametrize(
    "text",
    ["localhost:3\n", "# mine\n\n\tlocalhost   slots=2 max_slots=4  # the first"],
    ids=["MPICH", "Open MPI"],
)
def test_ranks_by_a_host_file(jaxdist: Jaxdist, tmp_path: Path, text: str) -> None:
    """This machine needs no ssh."""
    (tmp_path / "hosts").write_text(text)
    show = "echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR"
    done = jaxdist("run", "-n", 2, "--hostfile", "hosts", "--launcher", "env", "--prefix", "sh", "-c", show)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 0 2 127.0.0.1", "[1] 1 1 2 127.0.0.1"]


@pytest.mark.mpi
def test_a_host_that_does_not_answer_as_it_should(jaxdist: Jaxdist, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path)}
    none = jaxdist("run", "--hosts", "node1", sys.executable, env=env)
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho Welcome\necho 'bash: python: No such file' >&2\nexit 127\n")
    ssh.chmod(0o755)
    other = jaxdist("run", "--hosts", "localhost:1,node1:1", sys.executable, env=env)
    for done, tokens in ((none, ("ssh", "node1")), (other, ("node1: bash: python: No such file",))):
        assert done.returncode == 2
        assert missing(tokens, " ".join(done.stderr.split())) == []
