"""The rendezvous of a job's ranks: rank 0 listens, the others find it, and each gets the list of members."""

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jaxdist.control.wire import BUFFERED, RANK, ROOT, SECONDS, Link

# Seconds without a sign of a host before it is taken for lost: the job's timeout, within these bounds.
_SILENCE_LEAST, _SILENCE_MOST = 3.0, 30.0


class Member(NamedTuple):
    """One process of the job."""

    host: str  # its name
    pid: int
    ip: str  # the address it is reached at


# A rank's links after the rendezvous (the hub has one per other rank, the others {0: hub}), and the members.
Joined = tuple[dict[int, Link], list[Member]]


def is_loopback(host: str) -> bool:
    """Check whether `host` is written as a loopback address (no look-up: a name may map to 127.0.1.1)."""
    return host in ("localhost", "::1") or host.startswith("127.")


def loopback(host: str) -> str:
    """Replace "localhost" and 127.* with 127.0.0.1, so that ranks listen at and call the same address."""
    return host if not is_loopback(host) or host == "::1" else "127.0.0.1"


def interfaces() -> list[ipaddress.IPv4Interface]:
    """The IPv4 addresses of this host's interfaces, with their networks."""
    import psutil  # here: most jobs have one host

    found = itertools.chain(*psutil.net_if_addrs().values())
    return [ipaddress.IPv4Interface(f"{a.address}/{a.netmask or 32}") for a in found if a.family == socket.AF_INET]


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


async def gather(server: socket.socket, size: int, key: bytes, timeout: float, address: str) -> Joined:
    """Accept the other `size - 1` ranks on rank 0, then send each of them the list of members."""
    door = _Door(size, key, timeout)
    listening = await asyncio.start_server(door.let_in, sock=server, backlog=1024, limit=BUFFERED)
    try:
        async with asyncio.timeout(timeout):
            await door.done
    except (TimeoutError, ValueError) as error:
        why = error
        if not isinstance(error, ValueError):
            text = (
                f"rank 0 waited {timeout:g} s at {address} and {len(door.links) + 1} of {size} ranks came; missing: "
                f"{ranks_in_words([r for r in range(1, size) if r not in door.links])}. Were they started, did they "
                "fail before init (see their output), and can they reach this address?"
            )
            if others := door.strangers:
                text += f" {others} connection{'s' * (others > 1)} came without the secret of this job"
            why = TimeoutError(text)
        for link in door.links.values():  # all who came hear why there will be no job
            link.send(why)
            link.close()
        raise why from None
    finally:
        listening.close()
    everyone = [door.members[r] for r in range(size)]
    for link in door.links.values():
        link.send(everyone)
    return door.links, everyone


class _Door:
    """Lets in whoever proves to be of the job; a stranger costs a task, for a few seconds."""

    def __init__(self, size: int, key: bytes, timeout: float):
        self.links: dict[int, Link] = {}
        self.members = {0: Member(socket.gethostname(), os.getpid(), loopback("localhost"))}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.strangers = 0
        self._size, self._key, self._timeout = size, key, timeout

    async def let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        self.strangers += 1
        with contextlib.suppress(OSError, EOFError):  # TimeoutError is one
            async with asyncio.timeout(SECONDS):
                if await link.proves(self._key, ROOT):
                    self.strangers -= 1
                    self._add(link, *await link.receive())
                    return
        link.close()

    def _add(self, link: Link, rank: int, size: int, member: Member) -> None:
        if self.done.done():  # `links` is the hub's from now on
            link.close()
            return
        if rank in self.links and self.links[rank].ended:  # it did not hear our answer, and comes again
            del self.links[rank], self.members[rank]
        problem = ""
        if size != self._size:
            problem = (
                f"rank {rank} ({member.host}, pid {member.pid}) was started with size {size}, rank 0 with size "
                f"{self._size}: give every rank the same WORLD_SIZE"
            )
        elif rank in self.members or not 0 < rank < size:
            other = self.members.get(rank, self.members[0])
            problem = (
                f"two processes claim rank {rank}: {other.host}, pid {other.pid} and {member.host}, pid {member.pid}. "
                f"Give each its own RANK in 0..{size - 1}"
            )
        if problem:
            self.links[-1] = link  # not a rank's: `gather` tells it why, like the others
            self.done.set_exception(ValueError(problem))
            return
        _watch_silence(link.sock, self._timeout)
        self.links[rank], self.members[rank] = link, member
        if not is_loopback(ours := _plain(link.sock.getsockname()[0])):
            self.members[0] = self.members[0]._replace(ip=ours)
        if len(self.links) == self._size - 1:
            self.done.set_result(None)


async def join(addresses: Sequence[tuple[str, int]], rank: int, size: int, key: bytes, timeout: float) -> Joined:
    """Another rank: reach rank 0 at one of `addresses`, trying again until `timeout`."""
    names = " or ".join(f"tcp://{h}:{p}" for h, p in addresses[:4])
    last, reached, pause = "no attempt was made", False, 0.02
    limit = asyncio.timeout(timeout)

    async def attempt(host: str, port: int) -> tuple[Link, Any] | None:
        """Return a link and rank 0's answer, which comes when all ranks have arrived, or None to try again."""
        nonlocal last, reached
        link = None
        try:
            link = await _knock(loopback(host), port, key)
            _watch_silence(link.sock, timeout)
            link.send((rank, size, Member(socket.gethostname(), os.getpid(), _plain(link.sock.getsockname()[0]))))
            if not reached:  # rank 0 names the missing ranks when its own time is up
                limit.reschedule((limit.when() or 0) + SECONDS)
            reached, last = True, "rank 0 answers, and a different rank did not come"
            return link, await link.receive()
        except (OSError, EOFError) as error:  # TimeoutError is one
            if reached and isinstance(error, ConnectionRefusedError):
                ended = f"rank {rank} reached {names}, then rank 0 ended before all ranks had joined"
                raise ConnectionError(ended) from None
            last = str(error) or "timed out"
            if link is not None:
                link.close()
            return None

    try:
        async with limit:
            turns = itertools.cycle(addresses)
            while not (found := await attempt(*next(turns))):
                await asyncio.sleep(pause / len(addresses))
                pause = min(0.5, pause * 1.5 ** (1 / len(addresses)))
    except TimeoutError:
        raise TimeoutError(
            f"rank {rank} could not join the job at {names} within {timeout:g} s (last: {last}): is rank 0 started and "
            "in jaxdist.init, is the address right, does a firewall close the port?"
        ) from None
    link, answer = found
    if isinstance(answer, Exception):
        raise type(answer)(f"rank {rank} was refused by rank 0: {answer}")
    return {0: link}, answer


async def _knock(host: str, port: int, key: bytes) -> Link:
    """A link to rank 0; raises an OSError if nobody answers in time, or somebody else does."""
    async with asyncio.timeout(SECONDS):
        link = Link(*await asyncio.open_connection(host, port, limit=BUFFERED))
        if link.sock.getsockname() == link.sock.getpeername():
            # TCP self-connect: a free port of the ephemeral range dialled itself
            link.close()
            raise ConnectionRefusedError("nobody listens there")
        with contextlib.suppress(OSError, EOFError):
            if await link.proves(key, RANK):
                return link
    link.close()
    raise ConnectionError(
        f"something answers at {host}:{port}, but it is not rank 0 of this job (another job, program or user, or "
        "another secret: set JAXDIST_SECRET to the same random string on every rank)"
    )


def _watch_silence(sock: socket.socket, timeout: float) -> None:
    """A cut cable sends nothing: without keepalive the two ends of a connection would wait for ever."""
    # The other kernel answers it, so a process that is stopped or busy is not taken for lost.
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
