"""Where the ranks of a job meet: rank 0 listens, the others find it, and each learns who is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from jaxdist import streams
from jaxdist.control import handshake
from jaxdist.control.handshake import Hello, Member
from jaxdist.control.keys import is_loopback

# Seconds without a sign of a host before it is taken for lost; in between the job's timeout.
_SILENCE_LEAST, _SILENCE_MOST = 3.0, 30.0
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h
_SPARE = 64  # connections that may be in the handshake beside those of the ranks
_TURNED_AWAY_SECONDS = 10.0  # after which a rank says that it is
_WELCOME, _LATE, _REFUSED = b"W", b"T", b"R"  # what rank 0 says in the end
_WORDS = 4096  # bytes of a reason


class Joined(NamedTuple):
    """What a rank holds after the rendezvous."""

    connections: dict[int, Connection]  # the hub: one per other rank; others: {0: hub}
    members: list[Member]
    root_host: str  # the address at which this rank reaches rank 0


def loopback(host: str) -> str:
    """The one loopback address that `host` stands for, if it is one: listened at and called alike."""
    return host if not is_loopback(host) or host == "::1" else "127.0.0.1"


def interfaces() -> list[ipaddress.IPv4Interface]:
    """The IPv4 addresses of this host's interfaces, with their networks."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:  # ioctl: works in a network namespace and without a resolver
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(probe, ask, struct.pack("256s", name.encode()[:15]))[20:24])
                    for ask in (_SIOCGIFADDR, _SIOCGIFNETMASK)
                )
            except OSError:
                continue  # an interface without an IPv4 address
            found.append(ipaddress.IPv4Interface(f"{address}/{mask}"))
    return found


def interface_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, loopback left out."""
    return [str(one.ip) for one in interfaces() if not one.ip.is_loopback]


def bind(host: str, ports: Iterable[int]) -> socket.socket:
    """A listening socket on the first free one of `ports` (0: any)."""
    tried = list(ports)
    for port in tried:
        try:
            return _listen(loopback(host), port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"rank 0 could not listen on port {', '.join(map(str, tried))}: taken by another process "
        "(or not allowed). Choose another port (MASTER_PORT), or end the job that holds it",
    )


def _listen(host: str, port: int) -> socket.socket:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:  # not written as an address, or (behind a router that translates) not one of ours
            if error.errno not in (None, errno.EADDRNOTAVAIL):
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=1024)


def gather(server: socket.socket, size: int, key: bytes, timeout: float, address: str) -> Joined:
    """Rank 0: take in the other `size - 1` ranks, then tell each of them who is there.

    Returns one connection per other rank, and the members in rank order.
    """
    arrivals = handshake.Arrivals(server, key, size + _SPARE, time.monotonic() + timeout)
    connections: dict[int, Connection] = {}
    members: dict[int, Member] = {}
    root_ip = loopback("localhost")

    def refuse(kind: bytes, reason: str) -> None:
        for conn in connections.values():
            with contextlib.suppress(OSError):
                conn.send_bytes(kind + reason.encode()[:_WORDS])
                conn.close()

    with contextlib.closing(server):
        for arrival in arrivals if size > 1 else ():
            rank, _, member = arrival.hello
            problem = _problem(arrival.hello, size, members)
            ours = _plain(arrival.sock.getsockname()[0])
            _watch_silence(arrival.sock, timeout)
            conn = Connection(arrival.sock.detach())
            if problem:
                connections[-1] = conn
                refuse(_REFUSED, problem)
                raise ValueError(problem)
            connections[rank], members[rank] = conn, member
            if not is_loopback(ours):
                root_ip = ours
            if len(connections) == size - 1:
                break
    if len(connections) < size - 1:
        missing = [r for r in range(1, size) if r not in connections]
        others = arrivals.turned_away
        reason = (
            f"rank 0 waited {timeout:g} s at {address} and {len(connections) + 1} of "
            f"{size} ranks came; missing: {ranks_in_words(missing)}. Were they started, did they "
            "fail before init (see their output), and can they reach this address?"
        )
        if others:
            reason += f" {others} connection{'s' * (others > 1)} came without the secret of this job"
        refuse(_LATE, reason)
        raise TimeoutError(reason)
    members[0] = Member(socket.gethostname(), os.getpid(), root_ip)
    everyone = [members[r] for r in range(size)]
    for conn in connections.values():
        with contextlib.suppress(OSError):  # it died meanwhile: the watcher sees the lost connection
            conn.send_bytes(_WELCOME + b"".join(member.pack() for member in everyone))
    return Joined(connections, everyone, "127.0.0.1")


def _problem(hello: Hello, size: int, members: dict[int, Member]) -> str:
    rank, their_size, member = hello
    if their_size != size:
        return (
            f"rank {rank} ({member.host}, pid {member.pid}) was started with size "
            f"{their_size}, rank 0 with size {size}: give every rank the same WORLD_SIZE"
        )
    if rank in members or not 0 < rank < size:
        other = members.get(rank, Member(socket.gethostname(), os.getpid(), ""))
        return (
            f"two processes claim rank {rank}: {other.host}, pid {other.pid} and "
            f"{member.host}, pid {member.pid}. Give each its own RANK in 0..{size - 1}"
        )
    return ""


def join(addresses: Sequence[tuple[str, int]], rank: int, size: int, key: bytes, timeout: float) -> Joined:
    """Another rank: reach rank 0 at one of `addresses`, trying again until `timeout`.

    Returns the connection to rank 0, and the members in rank order.
    """
    deadline = time.monotonic() + timeout
    say_after = time.monotonic() + _TURNED_AWAY_SECONDS
    names = " or ".join(f"tcp://{h}:{p}" for h, p in addresses[:4])
    last = "no attempt was made"
    pause = 0.02
    while True:
        for name, port in addresses:
            host = loopback(name)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"rank {rank} could not reach {names} within {timeout:g} s (last: {last}): is "
                    "rank 0 started and in jaxdist.init, is the address right, does a firewall "
                    "close the port?"
                )
            try:
                sock = socket.create_connection((host, port), timeout=min(left, handshake.SECONDS))
                if sock.getsockname() == sock.getpeername():
                    # TCP self-connect: a free port of the ephemeral range dialled itself
                    sock.close()
                    raise ConnectionRefusedError("nobody listens there")
            except OSError as error:
                last = str(error)
                continue
            ip = _plain(sock.getsockname()[0])
            _watch_silence(sock, timeout)
            conn = handshake.enter(sock, key, Hello(rank, size, Member(socket.gethostname(), os.getpid(), ip)))
            if conn is not None:
                return _answer(conn, rank, size, host, deadline, names)
            last = (
                f"something answers at {name}:{port}, but it is not rank 0 of this job (another job, program or user, "
                "or another secret: set JAXDIST_SECRET to the same random string on every rank)"
            )
            if time.monotonic() > say_after:
                say_after = math.inf  # once
                streams.write(f"[jaxdist rank {rank}] {last}; trying on for {left:.0f} s\n")
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(0.5, pause * 1.5)


def _answer(conn: Connection, rank: int, size: int, host: str, deadline: float, names: str) -> Joined:
    """What rank 0 says when all are there, or its time is up."""
    try:
        # Rank 0 names the missing ranks when its own time is up: leave it room to say so.
        if not conn.poll(max(0.0, deadline - time.monotonic()) + handshake.SECONDS):
            raise TimeoutError(
                f"rank {rank} reached {names}, but the job was not complete in time: some other rank did not come"
            )
        answer = conn.recv_bytes(1 + max(_WORDS, size * len(Member("", 0, "").pack())))
    except (EOFError, ConnectionError):
        raise ConnectionError(f"rank {rank} reached {names}, then rank 0 ended before all ranks were there") from None
    kind, said = answer[:1], answer[1:]
    if kind == _WELCOME:
        return Joined({0: conn}, Member.unpack_all(said), host)
    error = TimeoutError if kind == _LATE else ValueError
    raise error(f"rank {rank} was refused by rank 0: {said.decode(errors='replace')}")


def _watch_silence(sock: socket.socket, timeout: float) -> None:
    """A cut cable sends nothing: without keepalive the two ends of a connection would wait for ever.

    The other kernel answers it, so a process that is stopped or busy is not taken for lost.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = max(_SILENCE_LEAST, min(_SILENCE_MOST, timeout))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", int(seconds / 3)),
        ("TCP_KEEPINTVL", max(1, int(seconds / 6))),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(1000 * seconds)),  # goes for data on their way too, and rules over the count
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _plain(ip: str) -> str:
    return ip.removeprefix("::ffff:")  # an IPv4 peer of a dual-stack socket


def ranks_in_words(ranks: Sequence[int]) -> str:
    """For a message."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
