"""Three hosts for all tests of this folder, and none of them busy after a test."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import oracle
from namespaces import Hosts, Unavailable
from run_hosts import LARGE, SMALL


@pytest.fixture(scope="session")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    try:
        made = Hosts(3, tmp_path_factory.mktemp("hosts"))
    except Unavailable as why:
        pytest.skip(f"NOT CHECKED: jobs across hosts. {why}")
    yield made
    made.close()


@pytest.fixture
def hosts(_hosts: Hosts) -> Iterator[Hosts]:
    """node1, node2 and node3; what a failed test leaves there is ended."""
    yield _hosts
    _hosts.kill()


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one device computes, in a file."""
    path = tmp_path_factory.mktemp("oracle") / "expected.pickle"
    path.write_bytes(pickle.dumps({name: oracle.expected(name) for name in (SMALL, LARGE)}))
    return str(path)


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """A script without jaxdist: says which rank it is, and fails, sleeps, or ends at a signal as its arguments say."""
    path = tmp_path / "sleeper.py"
    path.write_text(_SLEEPER)
    return str(path)


_SLEEPER = """
import os, signal, socket, sys, time
rank = int(os.environ["RANK"])
def end(number, frame):
    print("rank", rank, "heard", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, end)
print("rank", rank, "on", socket.gethostname(), "in", os.getcwd(), flush=True)
if sys.argv[1:] == [str(rank)]:
    time.sleep(0.5)
    sys.exit(7)
time.sleep(120)
"""
