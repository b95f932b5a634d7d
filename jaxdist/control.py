"""The out-of-band control channel: who is in which call, who left, who died, who failed."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jaxdist import rendezvous
from jaxdist.rendezvous import Member

_CHUNK = 1 << 24  # bytes of a broadcast that travel in one frame
_LEAVE_SECONDS = 2.0  # that rank 0 gives the others to end by themselves
_PRINT_SECONDS = 0.3  # for the others to print the reason before the launcher kills them
_GRACE = 0.5  # seconds to learn where the other ranks are before a mismatch is reported


class ControlError(RuntimeError):
    """The ranks are not in the same call, one of them is missing, or one of them left."""


class Control:
    """A star of TCP connections with rank 0 as hub.

    One daemon thread per process blocks on its connections. What it hears (a failure, a death)
    it acts on even while the main thread is stuck inside a collective.

    Args:
      rank: this process.
      size: how many there are.
      addresses: (host, port) candidates of rank 0 (ignored on rank 0 if `server` is given).
      server: rank 0 only: the listening socket (see `rendezvous.bind`).
      key: secret of the job; default: from JAXDIST_SECRET, else from the port.
      timeout: seconds for everyone to come.
      abort: how this process ends itself when the job fails (a connector's `abort`).

    Attributes:
      members: host, pid and address of each rank.
      root_host: address at which this rank reached rank 0.
      notices: {tag: {rank: value}} of exchanges that others have entered and that have not
        ended; `notices["bye"]` keeps the farewells.
      on_notice: hook (tag, rank, value), called on the watcher thread: it must not block.
      farewell: hook whose result travels with the goodbye.

    Raises:
      TimeoutError: a rank did not come in time, or rank 0 was not reached.

    Example:
      >>> from jaxdist.control import Control
      >>> Control(0, 1).exchange("sizes", 3)
      [3]
    """

    def __init__(
        self,
        rank: int,
        size: int,
        addresses: Sequence[tuple[str, int]] = (),
        *,
        server: socket.socket | None = None,
        key: bytes | None = None,
        timeout: float = 300.0,
        abort: Callable[[int, str], None] | None = None,
    ):
        self.rank, self.size = rank, size
        self.abort = abort
        self.notices: dict[str, dict[int, Any]] = {}
        self.on_notice: Callable[[str, int, Any], None] | None = None
        self.farewell: Callable[[], Any] | None = None
        self._exchange_lock = threading.Lock()  # one exchange at a time
        self._answers: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self._casts: queue.SimpleQueue[list[bytearray]] = queue.SimpleQueue()
        self._closed = False
        self._alarmed = False  # this rank told the others to end
        self._held = False  # the main thread is about to end this process itself
        self._reason = threading.Event()  # the others told this rank to end
        self._hub: _Hub | None = None
        self._root: Connection | None = None
        self._send_lock = threading.Lock()
        self._pid = os.getpid()
        self.root_host = "127.0.0.1"
        if size == 1:
            self.members = [Member(socket.gethostname(), os.getpid(), "127.0.0.1")]
            return
        if rank == 0:
            if server is None:
                server = rendezvous.bind(addresses[0][0], [port for _, port in addresses])
            port = server.getsockname()[1]
            host = addresses[0][0] if addresses else "0.0.0.0"
            joined = rendezvous.gather(
                server, size, key or rendezvous.job_key(f"port {port}"), timeout,
                f"tcp://{host}:{port}",
            )  # fmt: skip
            self._hub = _Hub(self, joined.connections)
            target = self._hub.watch
        else:
            key = key or rendezvous.job_key(f"port {addresses[0][1]}")
            joined = rendezvous.join(addresses, rank, size, key, timeout)
            self._root = joined.connections[0]
            target = self._watch
        self.members = joined.members
        self.root_host = joined.root_host
        self._connections = list(joined.connections.values())
        # A forked data worker that kept the sockets open would hide the death of its parent.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=target, name="jaxdist-control", daemon=True).start()

    # --- calls of the owner

    def exchange(self, tag: str, value: Any = None, timeout: float | None = None) -> list[Any]:
        """All-gather of small picklable values, in rank order.

        Args:
          tag: names the call; every rank must be in an exchange of the same tag.
          value: mine.
          timeout: seconds to wait for the others; None: as long as they live.

        Returns:
          The value of each rank.

        Raises:
          ControlError: on every rank, if ranks are at different tags, if some did not come in
            time, or if one has already left.

        Example:
          >>> Control(0, 1).exchange("step", {"loss": 1.0})
          [{'loss': 1.0}]
        """
        if self.size == 1:
            return [value]
        self._check_owner()
        with self._exchange_lock:
            if self._closed:
                raise ControlError(f"rank {self.rank}: exchange {tag!r} after this rank said goodbye")
            self._send(("enter", tag, value))
            try:
                kind, got, payload = self._answers.get(timeout=timeout)
            except queue.Empty:
                # Rank 0 tells everyone, so that nobody waits for a rank that gave up.
                self._send(("timeout", tag, timeout))
                try:
                    kind, got, payload = self._answers.get(timeout=10.0)
                except queue.Empty:
                    raise ControlError(
                        f"rank {self.rank}: exchange {tag!r} timed out after {timeout:g} s and "
                        f"{self.who(0)} does not answer"
                    ) from None
        if kind == "error":
            raise ControlError(f"rank {self.rank}: {payload}")
        assert got == tag, (got, tag)
        return payload

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every rank is here; raises as `exchange` does."""
        self.exchange("barrier", None, timeout)

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The root's picklable object on every rank (see `broadcast_buffers` for size)."""
        if self.size == 1:
            return obj
        if self.rank != root:
            skeleton, *buffers = self.broadcast_buffers(None, root)
            return pickle.loads(skeleton, buffers=buffers)
        pickles: list[pickle.PickleBuffer] = []
        skeleton = pickle.dumps(obj, protocol=5, buffer_callback=pickles.append)
        self.broadcast_buffers([memoryview(skeleton), *(p.raw() for p in pickles)], root)
        return obj

    def broadcast_buffers(
        self,
        buffers: Sequence[memoryview] | None,
        root: int = 0,
        carrier: Callable[[memoryview | bytearray, int], None] | None = None,
    ) -> list[memoryview] | list[bytearray]:
        """Send the root's buffers to every rank, in chunks, through rank 0.

        Args:
          buffers: contiguous bytes, on the root; elsewhere ignored.
          root: the rank that sends.
          carrier: moves one buffer from the root to all by a faster way (MPI_Bcast).

        Returns:
          The buffers (on the root: those given).

        Raises:
          ControlError: as `exchange`; also if ranks name different roots.
        """
        flat = [b.cast("B") for b in buffers or ()]
        said = self.exchange("broadcast", (root, [b.nbytes for b in flat]))
        roots = [r for r, _ in said]
        if any(r != root for r in roots):
            raise ControlError(
                f"rank {self.rank}: broadcast with different roots: "
                + ", ".join(f"rank {i} says root={r}" for i, r in enumerate(roots))
            )
        if not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank}: broadcast root={root} is not a rank; valid: 0..{self.size - 1}")
        if carrier is not None:
            moved = flat if self.rank == root else [bytearray(n) for n in said[root][1]]
            for buffer in moved:
                carrier(buffer, root)
            return moved
        if self.rank != root:
            return self._casts.get()
        if self._hub:
            self._hub.cast(flat)
        else:
            assert self._root is not None
            with self._send_lock:
                _send_cast(self._root, flat)
        return flat

    def alarm(self, message: str) -> None:
        """Make every other rank print `message` and end at once with a non-zero code.

        The caller goes on, to raise its own error.
        """
        self._alarmed = True
        if self.size > 1 and self._is_owner():
            self._send(("alarm", message))

    def close(self, farewell: Any = None) -> None:
        """Say goodbye: what the others see next is an orderly end, not a death.

        The connections stay until the process ends: rank 0 goes on serving those that still work.

        Args:
          farewell: a value for the others' `notices["bye"]`; default: what the hook
            `self.farewell` returns.
        """
        if self._closed or not self._is_owner():
            return
        if farewell is None and self.farewell is not None:
            farewell = self.farewell()
        self._closed = True
        if self.size > 1:
            self._send(("bye", farewell))

    def who(self, rank: int) -> str:
        """A rank with the host and the process behind it, for messages."""
        return f"rank {rank} ({self.members[rank].host}, pid {self.members[rank].pid})"

    # --- the wire

    def _send(self, message: tuple[Any, ...]) -> None:
        if self._hub:
            self._hub.handle(0, message)
            return
        assert self._root is not None
        try:
            with self._send_lock:
                self._root.send(message)
        except OSError as error:
            if message[0] not in ("bye", "alarm"):
                raise ControlError(f"rank {self.rank}: lost the connection to {self.who(0)}: {error}") from None

    def _watch(self) -> None:
        assert self._root is not None
        while True:
            try:
                message = self._root.recv()
                if message[0] == "cast":
                    self._casts.put(_receive_cast(self._root, message[1]))
                else:
                    self.deliver(message)
            except (EOFError, OSError):
                break
        if 0 in self.notices.get("bye", {}):
            self._answers.put(("error", "", f"{self.who(0)} has already left"))
        else:
            self.end_because_of(_died(self.who(0)), 0.0)

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Act on what the hub says (watcher thread; on rank 0 also the main thread)."""
        kind = message[0]
        if kind == "notice":
            _, tag, rank, value = message
            self.notices.setdefault(tag, {})[rank] = value
            if self.on_notice is not None:
                try:
                    self.on_notice(tag, rank, value)
                except Exception as error:  # a broken hook must not stop the watcher
                    self._print(f"on_notice failed: {error!r}")
        elif kind == "result":
            self.notices.pop(message[1], None)
            self._answers.put(message)  # type: ignore[arg-type]
        elif kind == "error":
            for tag in [t for t in self.notices if t != "bye"]:
                self.notices.pop(tag, None)
            self._answers.put(message)  # type: ignore[arg-type]
        elif kind == "end":
            self.end_because_of(message[1], message[2])

    def end_because_of(self, message: str, pause: float) -> None:
        """Print why, and end this process soon; unless its main thread already sees to that.

        Args:
          message: why.
          pause: seconds to leave to the rank that failed: launchers report the code of the rank
            that ends first.
        """
        if self.ending or not self._is_owner():
            return
        self._print(message)
        self._reason.set()
        if self._held:
            return

        # Not on rank 0's watcher itself: it goes on to see the others leave.
        def end() -> None:
            time.sleep(pause)
            self.depart(1)

        threading.Thread(target=end, daemon=True).start()

    @property
    def ending(self) -> bool:
        """Whether the job is known to have failed."""
        return self._alarmed or self._reason.is_set()

    def hold(self) -> None:
        """Leave the end of this process to the caller, who has something to print first."""
        self._held = True

    def told_to_end(self, seconds: float) -> bool:
        """Whether, within this time, the others say that the job failed."""
        return self._reason.wait(seconds)

    def depart(self, code: int, *, abort: bool = False) -> None:
        """End this process, rank 0 last: it hosts JAX's coordinator, whose loss makes JAX abort
        the others before they can say why.

        Args:
          code: exit code.
          abort: through the connector, which may end processes that can't end themselves.
        """
        if self._hub is not None:
            abort = not self._hub.wait_gone(_LEAVE_SECONDS) or abort
        elif abort:
            time.sleep(_PRINT_SECONDS)
        leave(code, "", self.abort if abort else None)

    def _print(self, message: str) -> None:
        # Not through sys.stderr: the main thread may hold its lock, stuck on a full pipe.
        os.write(2, f"[jaxdist rank {self.rank}] {message}\n".encode())

    # --- forks

    def _is_owner(self) -> bool:
        return os.getpid() == self._pid

    def _check_owner(self) -> None:
        if not self._is_owner():
            raise ControlError(
                f"a forked child of rank {self.rank} called into jaxdist: only the process that "
                "called jaxdist.init may; in data workers compute on host data alone"
            )

    def _forget(self) -> None:
        for conn in self._connections:
            with contextlib.suppress(OSError):
                conn.close()


class _Hub:
    """Rank 0's part: takes what each rank says, and tells the others."""

    def __init__(self, control: Control, connections: dict[int, Connection]):
        self.control = control
        self.connections = connections
        self.lock = threading.RLock()
        self.send_locks = {rank: threading.Lock() for rank in connections}
        self.entered: dict[int, tuple[str, Any]] = {}
        self.failure: str | None = None  # of the running exchange: late ranks are told as well
        self.told: set[int] = set()
        self.left: set[int] = set()
        self.timer: threading.Timer | None = None
        self.open = set(connections)
        self.gone = threading.Condition()

    def watch(self) -> None:
        ranks = {conn: rank for rank, conn in self.connections.items()}
        while ranks:
            for conn in wait(list(ranks)):
                assert isinstance(conn, Connection)
                rank = ranks[conn]
                try:
                    message = conn.recv()
                    if message[0] == "cast":
                        self.forward(rank, conn, message[1])
                    else:
                        self.handle(rank, message)
                except (EOFError, OSError):
                    del ranks[conn]
                    with self.gone:
                        self.open.discard(rank)
                        self.gone.notify_all()
                    if rank not in self.left and not self.control.ending:
                        self.end_all(_died(self.control.who(rank)), spare=rank)

    def wait_gone(self, seconds: float) -> bool:
        """Whether, within this time, every other rank has closed its connection."""
        with self.gone:
            return self.gone.wait_for(lambda: not self.open, seconds)

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        if rank == 0:
            self.control.deliver(message)
            return
        # An OSError says that it died: the watcher sees that too.
        with contextlib.suppress(OSError), self.send_locks[rank]:
            self.connections[rank].send(message)

    def others(self, rank: int) -> list[int]:
        # Rank 0 last: a message may end it, and it has to tell the others first.
        return [r for r in (*self.connections, 0) if r != rank]

    def handle(self, rank: int, message: tuple[Any, ...]) -> None:
        kind = message[0]
        with self.lock:
            if kind == "enter":
                self.enter(rank, message[1], message[2])
            elif kind == "timeout":
                if rank in self.entered and self.failure is None:
                    self.fail(f"exchange {message[1]!r} timed out on rank {rank} after "
                              f"{message[2]:g} s. {self.where()}")  # fmt: skip
            elif kind == "bye":
                self.left.add(rank)
                for r in self.others(rank):
                    self.send(r, ("notice", "bye", rank, message[1]))
                if self.entered:
                    self.fail(self.why_gone())
            elif kind == "alarm":
                self.end_all(message[1], spare=rank, pause=2 * _PRINT_SECONDS)

    def enter(self, rank: int, tag: str, value: Any) -> None:
        if self.failure is None:
            self.entered[rank] = (tag, value)
            for r in self.others(rank):
                self.send(r, ("notice", tag, rank, value))
            if self.left:
                self.fail(self.why_gone())
            elif len({t for t, _ in self.entered.values()}) > 1:
                if len(self.entered) == self.control.size:
                    self.mismatch()
                elif self.timer is None:
                    self.timer = threading.Timer(_GRACE, self.mismatch)
                    self.timer.daemon = True
                    self.timer.start()
            elif len(self.entered) == self.control.size:
                values = [self.entered[r][1] for r in range(self.control.size)]
                self.reset()
                for r in self.others(-1):
                    self.send(r, ("result", tag, values))
        else:
            self.tell(rank)

    def mismatch(self) -> None:
        with self.lock:
            tags = {t for t, _ in self.entered.values()}
            if self.failure is None and len(tags) > 1:
                self.fail(
                    f"the ranks are in different calls. {self.where()} Every rank must make the "
                    "same jaxdist calls in the same order: look for a call under `if rank == ...`, "
                    "or loops of different length"
                )

    def why_gone(self) -> str:
        left = ", ".join(self.control.who(r) for r in sorted(self.left))
        return (
            f"{left} has already left. {self.where()} Every rank must make the same jaxdist calls: "
            "did it run fewer steps or end early?"
        )

    def where(self) -> str:
        """Which rank is at which tag, and who is missing, with hosts and pids."""
        places: dict[str, list[int]] = {}
        for rank, (tag, _) in sorted(self.entered.items()):
            places.setdefault(tag, []).append(rank)
        parts = [f"{rendezvous._ranks(ranks)} at {tag!r}" for tag, ranks in places.items()]
        missing = [
            self.control.who(r) for r in range(self.control.size) if r not in self.entered and r not in self.left
        ]
        if missing:
            parts.append("not there: " + ", ".join(missing))
        return "; ".join(parts) + "."

    def fail(self, reason: str) -> None:
        self.failure = reason
        for rank in sorted(self.entered, reverse=True):
            self.tell(rank)

    def tell(self, rank: int) -> None:
        assert self.failure is not None
        self.told.add(rank)
        reason = self.failure
        if len(self.told | self.left) == self.control.size:
            self.reset()  # everyone knows: the next exchange starts afresh
        self.send(rank, ("error", "", reason))

    def reset(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer, self.failure = None, None
        self.entered, self.told = {}, set()

    def end_all(self, message: str, spare: int, pause: float = 0.0) -> None:
        for r in self.others(spare):
            self.send(r, ("end", message, pause))

    # --- broadcast

    def cast(self, buffers: Sequence[memoryview]) -> None:
        for rank, conn in self.connections.items():
            with contextlib.suppress(OSError), self.send_locks[rank]:
                _send_cast(conn, buffers)

    def forward(self, source: int, conn: Connection, sizes: list[int]) -> None:
        """Pass a broadcast of rank `source` on, chunk by chunk, and keep it for rank 0."""
        targets = [r for r in self.connections if r != source and r not in self.left]
        for r in targets:
            self.send_locks[r].acquire()
        try:
            for r in targets:
                _quietly(self.connections[r].send, ("cast", sizes))

            def pass_on(chunk: memoryview) -> None:
                for r in targets:
                    _quietly(self.connections[r].send_bytes, chunk)

            self.control._casts.put(_receive_cast(conn, sizes, pass_on))
        finally:
            for r in targets:
                self.send_locks[r].release()


def leave(code: int, message: str = "", abort: Callable[[int, str], None] | None = None) -> None:
    """End this process now, from any thread, whatever the main thread is doing.

    Args:
      code: exit code.
      message: for `abort`.
      abort: tried first (MPI_Abort takes the rest of the job along); may return or hang.
    """

    def gently() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or a full pipe
                stream.flush()
        if abort is not None:
            abort(code, message)

    helper = threading.Thread(target=gently, daemon=True)
    helper.start()
    helper.join(3.0)  # a flush can block on a pipe that nobody reads
    os._exit(code)


def _died(who: str) -> str:
    return (
        f"{who} died without a goodbye: killed by a signal, out of memory, a crash in native code, "
        "or its network is gone (see its own output, and `dmesg` for the OOM killer). Ending this "
        "rank too"
    )


def _send_cast(conn: Connection, buffers: Sequence[memoryview]) -> None:
    conn.send(("cast", [b.nbytes for b in buffers]))
    for buffer in buffers:
        for start in range(0, buffer.nbytes, _CHUNK):
            conn.send_bytes(buffer[start : start + _CHUNK])


def _receive_cast(
    conn: Connection, sizes: list[int], pass_on: Callable[[memoryview], None] | None = None
) -> list[bytearray]:
    buffers = [bytearray(n) for n in sizes]
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), _CHUNK):
            chunk = view[start : start + _CHUNK]
            conn.recv_bytes_into(chunk)
            if pass_on is not None:
                pass_on(chunk)
    return buffers


def _quietly(send: Callable[[Any], None], message: Any) -> None:
    with contextlib.suppress(OSError):  # that rank died: the watcher sees it too
        send(message)
