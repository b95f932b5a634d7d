"""Where a job listens: on one host at the loopback address alone, by every launcher."""

from __future__ import annotations

import json
import socket
import sys

import jobs
import listening
import pytest

from jaxdist.control import rendezvous

_SCRIPT = """
import json, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from listening import listening
if "OMPI_COMM_WORLD_RANK" in os.environ:
    from jaxdist.connectors.mpi import load
    load()
before = listening()  # Open MPI's own, on all interfaces
seen, done = set(), threading.Event()
def watch():
    while not done.wait(0.002):
        seen.update(listening())
threading.Thread(target=watch).start()
if os.environ.get("RANK", "0") != "0":
    time.sleep(0.5)  # the root listens meanwhile
import jaxdist, jax, numpy as np
try:
    ctx = jaxdist.init(communicator="xla")
    step = jaxdist.data_parallel(lambda w, x: w + x.sum())
    jax.block_until_ready(step(np.zeros(()), np.ones(2)))
finally:
    done.set()
print("SEEN", json.dumps(sorted(seen - before)), flush=True)
"""


@pytest.mark.parametrize("how", ["env", "run", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_on_one_host_nothing_listens_on_all_interfaces(how):
    args = ["-c", _SCRIPT, str(listening.Path(listening.__file__).parent)]
    if how == "env":
        job = jobs.start_env(2, args)
    elif how == "mpirun":
        job = jobs.start_mpirun(2, args)
    else:
        job = jobs.Job()
        job.start([sys.executable, "-m", "jaxdist", "run", "-n", "2", "--launcher", "env", sys.executable, *args])
    results = job.finish()
    assert all(r.returncode == 0 for r in results), [r.output for r in results]
    lines = [line for r in results for line in r.stdout.splitlines() if line.startswith("SEEN ")]
    assert len(lines) == 2
    for line in lines:
        seen = json.loads(line.removeprefix("SEEN "))
        assert seen, "not even gloo was seen"
        assert {address for address, _ in seen} == {"127.0.0.1"}, seen


@pytest.mark.parametrize(
    ("host", "address"),
    [("localhost", "127.0.0.1"), ("127.0.1.1", "127.0.0.1"), ("::1", "::1"), ("own", "own"), ("node1", "all")],
)
def test_where_rank_0_listens(host, address):
    own = next(iter(rendezvous.interface_addresses()), None)
    if host == "own":
        if own is None:
            pytest.skip("no interface beside loopback: not checked")
        host = address = own
    try:
        server = rendezvous.bind(host, [0])
    except OSError:
        assert host == "::1"
        pytest.skip("no IPv6 on this host: not checked")
    with server:
        assert server.getsockname()[0] in (["::", "0.0.0.0"] if address == "all" else [address])
        for candidate in {address, "127.0.0.1"} if address == "all" else {address}:
            if candidate != "all":
                socket.create_connection((candidate, server.getsockname()[1])).close()
