"""JAX's coordinator on a Unix socket in a folder of this user alone, and the way there from other hosts.

The coordinator (gRPC) lets in whoever reaches it: he may end the job, or put what he likes into its key-value store. So
no port is opened for it. Ranks that can't see the socket have one of their own, and what comes there travels over the
control channel, whose ends have proved to be of the job. Once all are connected the sockets are taken away.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

from jaxdist import compat
from jaxdist.control.channel import Control
from jaxdist.control.keys import is_loopback

_TAG = "coordinator"
_BYTES = 1 << 16  # of a stream in one message
_LONGEST = 100  # of a socket's path: Linux takes 107 bytes


@contextlib.contextmanager
def reachable(control: Control, timeout: float) -> Iterator[Path]:
    """Where the coordinator listens (on the root) or can be called; within it all ranks start jax.distributed."""
    folder = _own_folder()
    try:
        path = folder / "socket"
        at_end: Callable[[], None] | None = None
        if control.rank == 0:
            at_end = _serve(control, path, timeout)
        of_root = Path(control.exchange("coordinator", str(path), timeout)[0])
        if control.rank > 0:
            # Containers of one host may share its network and not its disk, hosts their disks and not a network.
            if is_loopback(control.root_host) and os.access(of_root.parent, os.X_OK):
                path = of_root
                await_listener(path, min(timeout, 5.0))
            else:
                at_end = _forward(control, path)
        yield path
        control.exchange("coordinator reached", None, timeout)
        if at_end is not None:
            compat.when_client_has_left(at_end)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="jaxdist-"))  # for this user alone
    if len(str(folder)) < _LONGEST and re.fullmatch(r"[\w/.-]+", str(folder), re.ASCII):
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="jaxdist-", dir="/tmp"))  # gRPC takes a short address, of plain letters


def await_listener(path: Path, seconds: float) -> None:
    """Wait until someone listens there: gRPC tries again after a second or two, and every rank waits for that one.

    After so many seconds the error is left to what is tried next.
    """
    with contextlib.suppress(OSError):
        _called(path, seconds).close()


def _called(path: Path, seconds: float) -> socket.socket:
    end = time.monotonic() + seconds
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.005)
        else:
            return sock


class _Stream:
    """One connection of gRPC, of which this process has one end: the bytes of the other end come and go in messages."""

    def __init__(self, connect: Callable[[], socket.socket], send: Callable[[bytes], None]):
        self.came: SimpleQueue[bytes] = SimpleQueue()
        self.ended = threading.Event()
        self._connect, self._send = connect, send

    def start(self) -> None:
        """Begin to carry."""
        threading.Thread(target=self._write, name="jaxdist-coordinator", daemon=True).start()

    def end(self) -> None:
        """Close both ends."""
        self._send(b"")
        self.came.put(b"")

    def _write(self) -> None:
        try:
            sock = self._connect()
        except OSError:
            self._send(b"")
            self.ended.set()
            return
        threading.Thread(target=self._read, args=(sock,), name="jaxdist-coordinator", daemon=True).start()
        with sock, contextlib.suppress(OSError):
            while part := self.came.get():
                sock.sendall(part)
            sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, close alone does not
        self.ended.set()

    def _read(self, sock: socket.socket) -> None:
        part = b"."
        while part:
            try:
                part = sock.recv(_BYTES)
            except OSError:
                part = b""
            self._send(part)
        self.came.put(b"")


def _serve(control: Control, path: Path, timeout: float) -> Callable[[], None]:
    """The root: what other ranks' streams say goes to the coordinator. Returns what waits until they have ended."""
    streams: dict[tuple[int, int], _Stream] = {}

    def came(rank: int, message: tuple[int, bytes]) -> None:
        number, part = message
        if (rank, number) not in streams:
            streams[rank, number] = _Stream(
                lambda: _called(path, timeout), lambda part: control.post(_TAG, (number, part), rank)
            )
            streams[rank, number].start()
        streams[rank, number].came.put(part)

    def gone(rank: int, _: None) -> None:
        for (of, _number), stream in streams.items():
            if of == rank:
                stream.came.put(b"")  # the coordinator ends at once if nobody is connected

    control.listen(_TAG, came)
    control.listen("gone", gone)

    def wait() -> None:  # the coordinator's last answers are still in this process's hands
        end = time.monotonic() + timeout
        while not all(stream.ended.is_set() for stream in list(streams.values())):
            if control.ending or time.monotonic() > end:
                return
            time.sleep(0.005)

    return wait


def _forward(control: Control, path: Path) -> Callable[[], None]:
    """Another rank: what its client says goes to the root. Returns what ends that."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    streams: dict[int, _Stream] = {}

    def came(rank: int, message: tuple[int, bytes]) -> None:
        number, part = message
        streams[number].came.put(part)

    def gone(rank: int, _: None) -> None:
        for stream in streams.values():
            stream.came.put(b"")  # or a client would wait for ever for a root that has ended

    def accept() -> None:
        for number in itertools.count():
            sock, _ = server.accept()
            send = lambda part, number=number: control.post(_TAG, (number, part), 0)
            streams[number] = _Stream(lambda sock=sock: sock, send)
            streams[number].start()

    control.listen(_TAG, came)
    control.listen("gone", gone)
    threading.Thread(target=accept, name="jaxdist-coordinator", daemon=True).start()

    def end() -> None:  # the client keeps its connection as long as the process, which may wait for the root in MPI
        for stream in list(streams.values()):
            stream.end()

    return end
