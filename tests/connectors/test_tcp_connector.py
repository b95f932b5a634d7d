"""env:// and tcp://: the rendezvous, its variables, its errors."""

from __future__ import annotations

import sys
import time

import pytest
from harness import jobs

from jaxdist.connectors import tcp
from jaxdist.control import rendezvous

_SCRIPT = """
import sys
from jaxdist.connectors import connect
c = connect(sys.argv[1], timeout=30)
print(c.name, c.rank, c.size, c.local_rank, c.local_size)
c.control.close()
"""


def test_torchruns_variables_count_and_its_own_port_is_left_alone():
    agent = rendezvous.bind("127.0.0.1", [jobs.free_port()])
    port = agent.getsockname()[1]
    job = jobs.Job()
    for rank in range(2):
        job.start(
            [sys.executable, "-c", _SCRIPT, "env://"],
            {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(1 - rank),
             "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
             "TORCHELASTIC_USE_AGENT_STORE": "True"},
        )  # fmt: skip
    for rank, result in enumerate(job.finish(60)):
        assert result.returncode == 0, result.output
        assert result.stdout.split() == ["env", str(rank), "2", str(1 - rank), "2"]
    agent.close()


def test_tcp_address_with_rank_and_size_from_the_environment():
    url = f"tcp://127.0.0.1:{jobs.free_port()}"
    job = jobs.Job()
    for rank in (1, 0):  # the root comes last
        job.start([sys.executable, "-c", _SCRIPT, url], {"RANK": str(rank), "WORLD_SIZE": "2"})
    for result in job.finish(60):
        assert result.returncode == 0, result.output
        assert result.stdout.startswith(url)


def test_an_unreachable_root_times_out_in_the_time_given_and_is_named():
    port = jobs.free_port()
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"tcp://127.0.0.1:{port} within 0.5 s"):
        tcp.from_url(f"tcp://127.0.0.1:{port}", 0.5, rank=1, size=2)
    assert 0.4 < time.monotonic() - start < 20


def test_the_root_names_who_did_not_come():
    with pytest.raises(TimeoutError, match=r"1 of 3 ranks came; missing: ranks 1, 2"):
        tcp.from_url(f"tcp://127.0.0.1:{jobs.free_port()}", 0.5, rank=0, size=3)


def test_a_taken_port_is_an_error_at_once():
    server = rendezvous.bind("127.0.0.1", [0])
    port = server.getsockname()[1]
    with pytest.raises(OSError, match=f"could not listen on port {port}"):
        tcp.from_url(f"tcp://127.0.0.1:{port}", 5, rank=0, size=2)
    server.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"WORLD_SIZE": None}, "missing: WORLD_SIZE"),
        ({"RANK": None}, "missing: RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "missing: MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2"}, "RANK='2'"),
        ({"RANK": "x"}, "RANK='x'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"MASTER_PORT": "99999"}, "99999"),
    ],
)
def test_malformed_environment(changed, words):
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"} | changed
    with pytest.raises(ValueError, match=words):
        tcp.from_env(1.0, env={name: value for name, value in env.items() if value is not None})


@pytest.mark.parametrize(
    ("url", "given", "words"),
    [
        *((url, {"rank": 0, "size": 1}, "expected tcp://host:port")
          for url in ("tcp://", "tcp://host", "tcp://:5", "tcp://h:x", "tcp://h:0")),
        ("tcp://h:5", {}, "missing: RANK, WORLD_SIZE"),
        ("tcp://h:5", {"rank": 0}, "missing: WORLD_SIZE"),
        ("tcp://h:5", {"rank": 2, "size": 2}, "expected 0 <= rank < size"),
    ],
)  # fmt: skip
def test_malformed_address_or_rank_and_size_nowhere_given(url, given, words):
    with pytest.raises(ValueError, match=words):
        tcp.from_url(url, **given, env={})
