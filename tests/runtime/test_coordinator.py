"""JAX's coordinator: on a socket that is gone once all are connected, and reached through the control channel."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from harness import jobs
from harness.channels import everywhere, job

from jaxdist.control import rendezvous
from jaxdist.control.channel import Control
from jaxdist.runtime import coordinator


def echo(path: Path) -> None:
    """A server that sends back what comes, and closes when the other end has."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve(sock: socket.socket) -> None:
        with sock:
            while part := sock.recv(1000):
                sock.sendall(part)

    def accept() -> None:
        with server:
            for _ in range(5):  # one asks whether it is there
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def call(path: Path, content: bytes) -> bytes:
    """What the server behind a socket sends back."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(path))
        threading.Thread(target=sock.sendall, args=(content,)).start()
        came = b""
        while len(came) < len(content):
            came += sock.recv(1 << 20)
        return came


def test_who_cannot_see_the_socket_reaches_it_through_the_control_channel():
    controls = job(3)
    controls[2].root_host = "10.0.0.1"  # as if it were on another host
    content = os.urandom(1_000_000)
    paths: dict[int, Path] = {}

    def enter(control: Control) -> list[bytes]:
        with coordinator.reachable(control, 30) as path:
            paths[control.rank] = path
            assert path.parent.stat().st_mode & 0o777 == 0o700
            if control.rank == 0:
                echo(path)
                return []
            # Two connections at the same time, as gRPC may have.
            return everywhere([lambda: call(path, content), lambda: call(path, b"x")])

    got: list[Any] = everywhere([lambda c=c: enter(c) for c in controls])
    assert got == [[], [content, b"x"], [content, b"x"]]
    assert paths[0] == paths[1] != paths[2]
    assert not any(path.parent.exists() for path in paths.values())


@pytest.mark.parametrize("folder", ["long", "odd letters"])
def test_a_folder_that_grpc_takes_no_address_in_is_not_used(folder, tmp_path, monkeypatch):
    where = tmp_path / ("x" * 120 if folder == "long" else "50% of")
    where.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    made = coordinator._own_folder()
    assert made.parent == Path("/tmp")
    made.rmdir()
    assert list(where.iterdir()) == []


_SCRIPT = """
import atexit, time
import jax, numpy as np, jaxdist
ctx = jaxdist.init()
assert ctx.control.root_host != "127.0.0.1" or ctx.is_root
step = jaxdist.data_parallel(lambda w, x: w + x.sum())
print("sum", float(step(np.zeros(()), np.ones(2))))
if ctx.rank == 0:
    post, leaving = ctx.control.post, []
    def late(tag, value, to=None):
        if leaving and tag == "coordinator":
            time.sleep(leaving.pop())  # longer than gRPC waits for those it serves
        post(tag, value, to)
    ctx.control.post = late
    atexit.register(leaving.append, 8)
"""


@pytest.mark.slow
def test_a_job_as_across_hosts_whose_root_ends_after_the_last_answer_of_the_coordinator_has_come():
    own = rendezvous.interface_addresses()
    if not own:
        pytest.skip("no interface beside loopback: not checked here (tests/hosts does)")
    env = {"MASTER_ADDR": own[0], "JAXDIST_SECRET": "s", "JAXDIST_TIMEOUT": "60"}
    for result in jobs.spawn_env(2, ["-c", _SCRIPT], env):
        assert (result.returncode, result.stdout) == (0, "sum 4.0\n"), result.output
