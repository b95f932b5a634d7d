"""Sockets for the control channel: bind, find the root, prove to be of the same job, join."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

HANDSHAKE_SECONDS = 5.0
_NONCE = 32
_SILENCE, _SILENCE_LEAST = (
    30.0,
    3.0,
)  # seconds without a sign of a host before it is taken for lost; or the job's timeout


class Member(NamedTuple):
    """One process of the job: its host name, process id and the address it is reached at."""

    host: str
    pid: int
    ip: str


class Joined(NamedTuple):
    """What a rank holds after the rendezvous."""

    connections: dict[int, Connection]  # the hub: one per other rank; others: {0: hub}
    members: list[Member]
    root_host: str  # the address at which this rank reaches rank 0


def job_key(default: str) -> bytes:
    """The secret of the job: JAXDIST_SECRET, else one derived from `default` (the address).

    The derived one keeps two jobs apart, it does not keep an attacker out: on a network that
    others share, set JAXDIST_SECRET to the same random string on every rank.
    """
    secret = os.environ.get("JAXDIST_SECRET") or f"jaxdist {default}"
    return hashlib.sha256(secret.encode()).digest()


def is_loopback(host: str) -> bool:
    """Whether `host` is written as a loopback address (no look-up: a name may map to 127.0.1.1)."""
    return host in ("localhost", "::1") or host.startswith("127.")


def interface_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, loopback left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:  # SIOCGIFADDR: works in a network namespace and without a resolver
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found.append(socket.inet_ntoa(answer[20:24]))
    return [ip for ip in found if not is_loopback(ip)]


def bind(host: str, ports: Iterable[int]) -> socket.socket:
    """A listening socket on the first free one of `ports` (0: any).

    Args:
      host: the name others use. Only a loopback one narrows what is bound: the root may know
        its own name by another address than its peers do.
      ports: the candidates.

    Returns:
      The listening socket.

    Raises:
      OSError: no candidate is free; names them.
    """
    tried = list(ports)
    for port in tried:
        try:
            if is_loopback(host) and host != "::1":
                return socket.create_server(("127.0.0.1", port), backlog=1024)
            if socket.has_dualstack_ipv6():
                return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
            return socket.create_server(("0.0.0.0", port), backlog=1024)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"rank 0 could not listen on port {', '.join(map(str, tried))}: taken by another process "
        "(or not allowed). Choose another port (MASTER_PORT), or end the job that holds it",
    )


def gather(server: socket.socket, size: int, key: bytes, timeout: float, address: str) -> Joined:
    """Rank 0: take in the other `size - 1` ranks, then tell each of them who is there.

    Args:
      server: the listening socket; closed on return.
      size: number of ranks.
      key: the secret of the job.
      timeout: seconds.
      address: how messages name the meeting place.

    Returns:
      One connection per other rank, and the members in rank order.

    Raises:
      TimeoutError: names the ranks that did not come.
      ValueError: two processes claim one rank, or they disagree about the size.
    """
    deadline = time.monotonic() + timeout
    arrivals: queue.Queue[tuple[Connection, int, int, Member, str]] = queue.Queue()

    def greet(sock: socket.socket) -> None:
        # A thread each: a port scanner that says nothing must not keep the job waiting.
        try:
            ours = _plain(sock.getsockname()[0])
            conn = _connection(sock, timeout)
            if _challenge(conn, key):
                rank, their_size, member = conn.recv()
                arrivals.put((conn, rank, their_size, member, ours))
        except (OSError, EOFError):
            pass

    def accept() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return  # closed: everyone is in, or time is up
            threading.Thread(target=greet, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, name="jaxdist-accept", daemon=True).start()
    connections: dict[int, Connection] = {}
    members: dict[int, Member] = {}
    root_ip = "127.0.0.1"

    def refuse(reason: str, extra: Sequence[Connection] = ()) -> None:
        for conn in [*connections.values(), *extra]:
            with contextlib.suppress(OSError):
                conn.send(("refused", reason))
                conn.close()

    try:
        while len(connections) < size - 1:
            try:
                conn, rank, their_size, member, ours = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = [r for r in range(1, size) if r not in connections]
                reason = (
                    f"rank 0 waited {timeout:g} s at {address} and {len(connections) + 1} of "
                    f"{size} ranks came; missing: {_ranks(missing)}. Were they started, did they "
                    "fail before init (see their output), and can they reach this address?"
                )
                refuse(reason)
                raise TimeoutError(reason) from None
            if their_size != size:
                reason = (
                    f"rank {rank} ({member.host}, pid {member.pid}) was started with size "
                    f"{their_size}, rank 0 with size {size}: give every rank the same WORLD_SIZE"
                )
            elif rank in members or not 0 < rank < size:
                other = members.get(rank, Member(socket.gethostname(), os.getpid(), ""))
                reason = (
                    f"two processes claim rank {rank}: {other.host}, pid {other.pid} and "
                    f"{member.host}, pid {member.pid}. Give each its own RANK in 0..{size - 1}"
                )
            else:
                connections[rank], members[rank] = conn, member
                if not is_loopback(ours):
                    root_ip = ours
                continue
            refuse(reason, [conn])
            raise ValueError(reason)
    finally:
        # shutdown wakes the accepting thread, close alone does not
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
    members[0] = Member(socket.gethostname(), os.getpid(), root_ip)
    everyone = [members[r] for r in range(size)]
    for conn in connections.values():
        with contextlib.suppress(OSError):  # it died meanwhile: the watcher sees the lost connection
            conn.send(("welcome", everyone))
    return Joined(connections, everyone, "127.0.0.1")


def join(addresses: Sequence[tuple[str, int]], rank: int, size: int, key: bytes, timeout: float) -> Joined:
    """Another rank: reach rank 0 at one of `addresses`, trying again until `timeout`.

    Args:
      addresses: (host, port) candidates.
      rank: mine.
      size: number of ranks.
      key: the secret of the job.
      timeout: seconds.

    Returns:
      The connection to rank 0, and the members in rank order.

    Raises:
      TimeoutError: rank 0 was not reached, or not all ranks came; names the address.
      ValueError: rank 0 refused (a rank claimed twice, another size).
    """
    deadline = time.monotonic() + timeout
    names = " or ".join(f"tcp://{h}:{p}" for h, p in addresses[:4])
    last = "no attempt was made"
    pause = 0.02
    while True:
        for host, port in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"rank {rank} could not reach {names} within {timeout:g} s (last: {last}): is "
                    "rank 0 started and in jaxdist.init, is the address right, does a firewall "
                    "close the port?"
                )
            try:
                sock = socket.create_connection((host, port), timeout=min(left, HANDSHAKE_SECONDS))
                if sock.getsockname() == sock.getpeername():
                    # TCP self-connect: a free port of the ephemeral range dialled itself
                    sock.close()
                    raise ConnectionRefusedError("nobody listens there")
            except OSError as error:
                last = str(error)
                continue
            ip = _plain(sock.getsockname()[0])
            conn = _connection(sock, timeout)
            try:
                proved = _answer(conn, key)
            except (OSError, EOFError):
                proved = False
            if not proved:
                conn.close()
                last = (
                    f"something answers at {host}:{port}, but it is not rank 0 of this job "
                    "(another job or program, or another JAXDIST_SECRET)"
                )
                continue
            return _hello(conn, rank, size, ip, host, deadline, names)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(0.5, pause * 1.5)


def _hello(conn: Connection, rank: int, size: int, ip: str, host: str, deadline: float, names: str) -> Joined:
    conn.send((rank, size, Member(socket.gethostname(), os.getpid(), ip)))
    try:
        # Rank 0 names the missing ranks when its own time is up: leave it room to say so.
        if not conn.poll(max(0.0, deadline - time.monotonic()) + HANDSHAKE_SECONDS):
            raise TimeoutError(
                f"rank {rank} reached {names}, but the job was not complete in time: some other rank did not come"
            )
        answer = conn.recv()
    except (EOFError, ConnectionError):
        raise ConnectionError(f"rank {rank} reached {names}, then rank 0 ended before all ranks were there") from None
    if answer[0] == "refused":
        kind = TimeoutError if "waited" in answer[1] else ValueError
        raise kind(f"rank {rank} was refused by rank 0: {answer[1]}")
    return Joined({0: conn}, answer[1], host)


def _connection(sock: socket.socket, timeout: float) -> Connection:
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A cut cable sends nothing: without keepalive its two ends would wait for ever. The other kernel answers it, so a
    # process that is stopped or busy is not taken for lost.
    seconds = max(_SILENCE_LEAST, min(_SILENCE, timeout))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", int(seconds / 3)),
        ("TCP_KEEPINTVL", max(1, int(seconds / 6))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(1000 * seconds)),  # goes for data on their way too, and rules over the count
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(sock.detach())


def _receive(conn: Connection) -> bytes:
    if not conn.poll(HANDSHAKE_SECONDS):
        raise EOFError
    return conn.recv_bytes(1024)


# multiprocessing's own challenge is HMAC-MD5 on Python 3.11, which FIPS hosts refuse. Nothing is
# unpickled before both sides have proved that they know the key.
def _proof(key: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.new(key, side + nonce, "sha256").digest()


def _challenge(conn: Connection, key: bytes) -> bool:
    nonce = secrets.token_bytes(_NONCE)
    conn.send_bytes(b"jaxdist1" + nonce)
    answer = _receive(conn)
    proof, theirs = answer[:32], answer[32:]
    if len(theirs) != _NONCE or not hmac.compare_digest(proof, _proof(key, b"rank", nonce)):
        conn.close()
        return False
    conn.send_bytes(_proof(key, b"root", theirs))
    return True


def _answer(conn: Connection, key: bytes) -> bool:
    hello = _receive(conn)
    if len(hello) != 8 + _NONCE or hello[:8] != b"jaxdist1":
        return False
    nonce = secrets.token_bytes(_NONCE)
    conn.send_bytes(_proof(key, b"rank", hello[8:]) + nonce)
    return hmac.compare_digest(_receive(conn), _proof(key, b"root", nonce))


def _plain(ip: str) -> str:
    return ip.removeprefix("::ffff:")  # an IPv4 peer of a dual-stack socket


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
