"""The proof that two processes are of one job, and what comes to those who can't give it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import jobs
from harness.channels import everywhere

from jaxdist.control import handshake, rendezvous
from jaxdist.control.handshake import Hello, Member, SignedConnection
from jaxdist.control.keys import Key, job_key, peer_user

KEY = Key(b"of this job")
HELLO = Hello(1, 2, Member("node1", 4711, "127.0.0.1"))
NOBODY = 65534


def two_ranks(server: socket.socket, key: Key = KEY, timeout: float = 30) -> list[Any]:
    """A rendezvous of two ranks at `server`."""
    address = ("127.0.0.1", server.getsockname()[1])
    return everywhere([
        lambda: rendezvous.gather(server, 2, key, timeout, "here"),
        lambda: rendezvous.join([address], 1, 2, key, timeout),
    ])  # fmt: skip


def come_in(results: list[Any]) -> None:
    """Check that both ranks are in, and can talk."""
    root, rank = results
    assert [len(joined.members) for joined in results] == [2, 2], results
    root.connections[1].send({"to": 1})
    assert rank.connections[0].recv() == {"to": 1}
    rank.connections[0].send_bytes(b"back")
    assert root.connections[1].recv_bytes() == b"back"


# --- strangers


def test_a_hello_without_the_key_takes_no_place():
    server = rendezvous.bind("127.0.0.1", [0])
    # The sockets first: after the rendezvous nobody listens any more.
    made = [socket.create_connection(server.getsockname()) for _ in range(5)]
    got = everywhere([
        lambda: two_ranks(server), *[lambda s=sock: handshake.enter(s, Key(b"another"), HELLO) for sock in made]
    ])  # fmt: skip
    come_in(got[0])
    assert got[1:] == [None] * 5


def test_many_who_say_nothing_take_no_threads_and_few_descriptors():
    server = rendezvous.bind("127.0.0.1", [0])
    before = threading.active_count()
    arrivals = handshake.Arrivals(server, KEY, 10, time.monotonic() + 60)
    found: list[Any] = []

    def wait() -> None:
        for arrival in arrivals:
            found.append(arrival.hello)
            arrival.sock.close()
            break

    root = threading.Thread(target=wait, daemon=True)
    root.start()
    made = [socket.create_connection(server.getsockname()) for _ in range(100)]
    conn = handshake.enter(socket.create_connection(server.getsockname()), KEY, HELLO)
    root.join(30)
    assert conn is not None
    conn.close()
    assert found == [HELLO]
    assert arrivals.turned_away >= 90
    assert len(arrivals._waiting) <= 10
    assert threading.active_count() == before
    for sock in [server, *made]:
        sock.close()


def test_without_descriptors_the_oldest_gives_way():
    code = """
import resource, time
from jaxdist.control import handshake, rendezvous
from jaxdist.control.keys import Key
server = rendezvous.bind("127.0.0.1", [0])
print(server.getsockname()[1], flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(next(iter(handshake.Arrivals(server, Key(b"of this job"), 1000, time.monotonic() + 60))).hello.rank)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        port = int(root.stdout.readline())
        made = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        conn = None
        end = time.monotonic() + 60
        while conn is None and time.monotonic() < end:
            conn = handshake.enter(socket.create_connection(("127.0.0.1", port)), KEY, HELLO)
        assert root.stdout.read() == "1\n"
    for sock in made:
        sock.close()


def test_who_claims_a_rank_and_says_nothing_more_is_found_out_and_named():
    port = jobs.free_port()
    code = f"from jaxdist.connectors.tcp import from_url; from_url('tcp://127.0.0.1:{port}', 2, rank=0, size=2)"
    job = jobs.Job()
    job.start([sys.executable, "-c", code], {"JAXDIST_SECRET": "s"})
    key = Key(hashlib.sha256(b"s").digest())
    impostor = Hello(1, 2, Member("evilhost", 666, "127.0.0.1"))
    conn = None
    while conn is None and job.processes[0].poll() is None:
        with contextlib.suppress(OSError):
            conn = handshake.enter(socket.create_connection(("127.0.0.1", port)), key, impostor)
    result = job.finish(60)[0]
    assert conn is not None
    conn.close()
    assert result.returncode == 1
    assert "timed out on rank 0 after 2 s. rank 0 at 'local'; not there: rank 1 (evilhost, pid 666)" in result.stderr


# --- other users of this host

_AS_NOBODY = """
import os, socket, sys
sys.path[:0] = {path!r}
from jaxdist.control import handshake, rendezvous
from jaxdist.control.handshake import Hello, Member
from jaxdist.control.keys import Key, job_key
what, port = sys.argv[1], int(sys.argv[2])
key = Key(job_key("127.0.0.1", f"port {{port}}").secret)  # which is no secret
socket.getaddrinfo("127.0.0.1", 1)
os.seteuid({nobody})
if what == "root":
    server = rendezvous.bind("127.0.0.1", [port])
    print("up", flush=True)
    print(rendezvous.gather(server, 2, key, 60, "here").members)
else:
    for _ in range(5):
        conn = handshake.enter(socket.create_connection(("127.0.0.1", port)), key, Hello(1, 2, Member("e", 6, "i")))
        print("in" if conn else "out", flush=True)
"""


def as_nobody(what: str, port: int) -> subprocess.Popen[str]:
    """A process of another user that knows what there is to know."""
    if os.geteuid() != 0:
        pytest.skip("not root: processes of another user were not checked")
    code = _AS_NOBODY.format(path=sys.path, nobody=NOBODY)
    env = {k: v for k, v in os.environ.items() if k != "JAXDIST_SECRET"}
    return subprocess.Popen([sys.executable, "-c", code, what, str(port)], stdout=subprocess.PIPE, text=True, env=env)


def test_another_user_of_the_host_is_not_let_in(monkeypatch):
    monkeypatch.delenv("JAXDIST_SECRET", raising=False)
    server = rendezvous.bind("127.0.0.1", [0])
    port = server.getsockname()[1]
    key = job_key("127.0.0.1", f"port {port}")
    with as_nobody("rank", port) as other:

        def rank() -> Any:
            assert other.communicate(timeout=60)[0].split() == ["out"] * 5
            return rendezvous.join([("127.0.0.1", port)], 1, 2, key, 60)

        come_in(everywhere([lambda: rendezvous.gather(server, 2, key, 90, "here"), rank]))


def test_a_rank_does_not_talk_to_another_users_root(monkeypatch, capfd):
    monkeypatch.delenv("JAXDIST_SECRET", raising=False)
    monkeypatch.setattr(rendezvous, "_TURNED_AWAY_SECONDS", 0.2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with as_nobody("root", port) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        key = job_key("127.0.0.1", f"port {port}")
        with pytest.raises(TimeoutError, match="it is not rank 0 of this job"):
            rendezvous.join([("127.0.0.1", port)], 1, 2, key, 2)
        other.kill()
    assert capfd.readouterr().err.count("[jaxdist rank 1] something answers at") == 1


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_whose_the_other_end_is(family):
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("no IPv6 on this host: not checked there")
    with server, socket.create_connection(server.getsockname()[:2]) as sock:
        accepted = server.accept()[0]
        assert peer_user(accepted) == peer_user(sock) == os.geteuid()
        sock.close()
        assert peer_user(sock) is None
        accepted.close()


# --- messages after it


@pytest.fixture
def between() -> Iterator[tuple[SignedConnection, SignedConnection, socket.socket, socket.socket]]:
    """Two ends, and the sockets of somebody between them."""
    (a, near_a), (b, near_b) = socket.socketpair(), socket.socketpair()
    said = b"in the handshake"
    ends = handshake.signed(a, KEY, said, root=True), handshake.signed(b, KEY, said, root=False)
    yield *ends, near_a, near_b
    for end in (*ends, near_a, near_b):
        end.close()


def test_messages_pass_as_on_any_connection(between):
    one, other, heard, to = between

    def pass_on() -> None:
        while part := heard.recv(1 << 20):
            to.sendall(part)

    relay = threading.Thread(target=pass_on)
    relay.start()
    for value in ({"a": 1}, b"", "x" * 100_000, None):
        one.send(value)
        assert other.recv() == value
    big = np.random.default_rng(0).bytes(3_000_000)
    sender = threading.Thread(target=lambda: one.send_bytes(memoryview(big)))
    sender.start()
    buffer = bytearray(len(big))
    assert other.recv_bytes_into(memoryview(buffer)) == len(big)
    assert bytes(buffer) == big
    sender.join()
    one.send_bytes(b"x" * 50)
    with pytest.raises(OSError, match="bad message length"):
        other.recv_bytes(20)
    one.close()
    relay.join(30)


@pytest.mark.parametrize("what", ["changed", "again", "swapped", "back", "elsewhere", "short", "huge"])
def test_what_somebody_between_two_ranks_adds_is_not_unpickled(between, what):
    one, other, heard, to = between
    one.send("first")
    first = heard.recv(1000)
    one.send("second")
    second = heard.recv(1000)
    forged = {
        "changed": [first[:8] + bytes([first[8] ^ 1]) + first[9:]],
        "again": [first, first],
        "swapped": [second, first],
        "short": [struct.pack("!i", 3) + b"abc"],
        "huge": [struct.pack("!iQ", -1, 1 << 62) + b"abc"],
    }
    if what == "back":  # to the one who sent it
        heard.sendall(first)
        other = one
    if what == "elsewhere":  # another connection of the job has a key of its own
        end, to = socket.socketpair()
        other = handshake.signed(end, KEY, b"in another handshake", root=False)
    for message in forged.get(what, [first]):
        to.sendall(message)
    if what == "again":
        assert other.recv() == "first"
    with pytest.raises(OSError, match=r"did not send|impossible length"):
        other.recv()
    if what == "elsewhere":
        other.close()
        to.close()
