"""How two processes prove to be of one job: messages of fixed lengths, and nothing unpickled before the proof."""

from __future__ import annotations

import errno
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

SECONDS = 5.0  # for each message of the handshake
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# The root begins: _MAGIC and a nonce. A rank answers with who it is, a nonce and its proof over all of these. The root
# answers with its own proof. (multiprocessing's own challenge is HMAC-MD5 on Python 3.11, which FIPS hosts refuse.)
_MAGIC = b"jaxdist2"
_NONCE = _PROOF = 32
_CHALLENGE = len(_MAGIC) + _NONCE
_MEMBER = struct.Struct("!Q64s64s")
_HELLO = struct.Struct(f"!II{_MEMBER.size}s")
_ANSWER = _HELLO.size + _NONCE + _PROOF


class Member(NamedTuple):
    """One process of the job: its host name, process id and the address it is reached at."""

    host: str
    pid: int
    ip: str

    def pack(self) -> bytes:
        """In a fixed number of bytes (Linux's longest host name has 64)."""
        return _MEMBER.pack(self.pid, self.host.encode()[:64], self.ip.encode()[:64])

    @classmethod
    def unpack_all(cls, content: bytes) -> list[Member]:
        """Those that were packed one after the other."""
        text = lambda field: field.rstrip(b"\0").decode(errors="replace")
        return [cls(text(host), pid, text(ip)) for pid, host, ip in _MEMBER.iter_unpack(content)]


class Hello(NamedTuple):
    """What a rank says of itself."""

    rank: int
    size: int
    member: Member


def _proof(key: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, role + transcript, "sha256")


class Arrival(NamedTuple):
    """A rank that has proved to be of the job."""

    sock: socket.socket  # connected to it
    hello: Hello  # who it is


class Arrivals:
    """The root's side: iterates over the ranks that come to `server`, until `deadline`."""

    def __init__(self, server: socket.socket, key: bytes, limit: int, deadline: float):
        self.server, self.key, self.limit, self.deadline = server, key, limit, deadline
        self.turned_away = 0
        self._waiting: dict[socket.socket, tuple[float, bytearray]] = {}  # oldest first: deadline, what has come

    def __iter__(self) -> Iterator[Arrival]:
        self.server.setblocking(False)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self.server, selectors.EVENT_READ)
            try:
                while (now := time.monotonic()) < self.deadline:
                    until = min([self.deadline, *(end for end, _ in list(self._waiting.values())[:1])])
                    for event, _ in self._selector.select(max(0.0, until - now)):
                        sock = event.fileobj
                        assert isinstance(sock, socket.socket)
                        if sock is self.server:
                            self._accept()
                        elif sock in self._waiting and (arrival := self._read(sock)) is not None:
                            yield arrival
                    for sock, (end, _) in list(self._waiting.items()):
                        if end < time.monotonic():
                            self._drop(sock)
            finally:
                for sock in list(self._waiting):
                    self._drop(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self.server.accept()
        except OSError as error:
            if error.errno in _FULL:  # of descriptors, say: those who wait longest have had their time
                if self._waiting:
                    self._drop(next(iter(self._waiting)))
                else:
                    time.sleep(0.05)
            return
        if len(self._waiting) >= self.limit:
            self._drop(next(iter(self._waiting)))
        challenge = _MAGIC + secrets.token_bytes(_NONCE)
        self._waiting[sock] = time.monotonic() + SECONDS, bytearray(challenge)
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            sock.setblocking(False)
            if sock.send(challenge) != _CHALLENGE:
                self._drop(sock)
        except OSError:
            self._drop(sock)

    def _read(self, sock: socket.socket) -> Arrival | None:
        _, received = self._waiting[sock]
        whole = _CHALLENGE + _ANSWER
        try:
            part = sock.recv(whole - len(received))
        except BlockingIOError:
            return None
        except OSError:
            part = b""
        received += part
        if not part:
            self._drop(sock)
        if len(received) < whole:
            return None
        transcript, proof = bytes(received[:-_PROOF]), received[-_PROOF:]
        if not hmac.compare_digest(proof, _proof(self.key, b"rank", transcript)):
            self._drop(sock)
            return None
        self._release(sock)
        try:
            sock.setblocking(True)
            sock.sendall(_proof(self.key, b"root", transcript))  # into an empty buffer
        except OSError:
            sock.close()
            return None
        rank, size, member = _HELLO.unpack_from(transcript, _CHALLENGE)
        return Arrival(sock, Hello(rank, size, Member.unpack_all(member)[0]))

    def _release(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._waiting[sock]

    def _drop(self, sock: socket.socket) -> None:
        self._release(sock)
        sock.close()
        self.turned_away += 1


def enter(sock: socket.socket, key: bytes, hello: Hello) -> Connection | None:
    """A rank's side."""
    try:
        challenge = _receive(sock, _CHALLENGE)
        if challenge.startswith(_MAGIC):
            answer = _HELLO.pack(hello.rank, hello.size, hello.member.pack()) + secrets.token_bytes(_NONCE)
            transcript = challenge + answer
            sock.sendall(answer + _proof(key, b"rank", transcript))
            if hmac.compare_digest(_receive(sock, _PROOF), _proof(key, b"root", transcript)):
                sock.settimeout(None)
                return Connection(sock.detach())
    except (OSError, EOFError):
        pass
    sock.close()
    return None


def _receive(sock: socket.socket, count: int) -> bytes:
    deadline = time.monotonic() + SECONDS
    content = b""
    while len(content) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(count - len(content))
        if not part:
            raise EOFError
        content += part
    return content
