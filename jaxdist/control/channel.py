"""The out-of-band control channel: who is in which call, who left, who died, who failed."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxdist.control import rendezvous
from jaxdist.control.handshake import Member
from jaxdist.control.hub import Entry, Hub, lost, receive_cast, send_cast
from jaxdist.control.keys import job_key
from jaxdist.control.mailbox import TAG, Mailbox
from jaxdist.control.process import Process


class ControlError(RuntimeError):
    """The ranks are not in the same call, one of them is missing, or one of them left."""


class Control:
    """A star of TCP connections with rank 0 as hub.

    One daemon thread per process blocks on its connections. What it hears (a failure, a death) it acts on even while
    the main thread is stuck inside a collective.
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
        self.process = Process(rank, abort)
        self.notices: dict[str, dict[int, Any]] = {}
        self.waiting: dict[int, Entry] = {}
        self.position: Callable[[], int] = lambda: 0
        self.mail = Mailbox(self.post)
        self._listeners: dict[str, Callable[[int, Any], None]] = {TAG: self.mail.arrived}
        self._whereabouts: Callable[[list[int]], str | None] = lambda late: ""
        self._exchange_lock = threading.Lock()  # one exchange at a time
        self._answers: queue.SimpleQueue[tuple[str, str, Any]] = queue.SimpleQueue()
        self._casts: queue.SimpleQueue[list[bytearray]] = queue.SimpleQueue()
        self._closed = False
        self._hub: Hub | None = None
        self._root: Connection | None = None
        self._send_lock = threading.Lock()
        self.root_host = "127.0.0.1"
        if size == 1:
            self.members = [Member(socket.gethostname(), os.getpid(), "127.0.0.1")]
            return
        key = key or job_key(addresses[0][0], f"port {addresses[0][1]}")
        if rank == 0:
            if server is None:
                server = rendezvous.bind(addresses[0][0], [port for _, port in addresses])
            host = addresses[0][0] if addresses else "0.0.0.0"
            joined = rendezvous.gather(server, size, key, timeout, f"tcp://{host}:{server.getsockname()[1]}")
            self._hub = Hub(self, joined.connections)
            self.process.wait_gone = self._hub.wait_gone
            target = self._hub.watch
        else:
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

    def exchange(self, tag: str, value: Any = None, timeout: float | None = None, what: str = "") -> list[Any]:
        """All-gather of small picklable values, in rank order.

        Returns the value of each rank.
        """
        if self.size == 1:
            return [value]
        self._check_owner()
        self.process.stay_if_ending()
        with self._exchange_lock:
            if self._closed:
                raise ControlError(f"rank {self.rank}: exchange {tag!r} after this rank said goodbye")
            self._send(("enter", tag, value, Entry(self.position(), what or repr(tag))))
            kind, got, payload = self._answer(tag, timeout)
        if kind == "error":
            self.process.stay_if_ending()
            raise ControlError(f"rank {self.rank}: {payload}")
        assert got == tag, (got, tag)
        return payload

    def _answer(self, tag: str, timeout: float | None) -> tuple[str, str, Any]:
        """The hub's, to what was just entered."""
        turns = 0
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=timeout)
            here = self.notices.get(tag, {})
            known = self._whereabouts([r for r in self.others if r not in here])
            if known is not None:
                break
            turns += 1
            if turns.bit_count() == 1:  # 1, 2, 4, 8, ...
                self.say(f"exchange {tag!r} has waited for {turns * (timeout or 0):g} s: others are busy in a step")
        self._send(("timeout", timeout, known and f" {known}."))
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=10.0)
        raise ControlError(
            f"rank {self.rank}: exchange {tag!r} timed out after {timeout:g} s and {self.who(0)} does not answer"
        )

    def listen(self, tag: str, hook: Callable[[int, Any], None]) -> None:
        """Call a hook with what another rank posts, on the watcher thread: it must not block."""
        self._listeners[tag] = hook

    def where_is(
        self, *, this: Callable[[], int] | None = None, others: Callable[[list[int]], str | None] | None = None
    ) -> None:
        """Whom to ask where ranks are."""
        self.position = this or self.position
        self._whereabouts = others or self._whereabouts

    def post(self, tag: str, value: Any, to: int | None = None) -> None:
        """Tell one other rank, or all, something small; does not wait for them."""
        if self.size > 1 and self.process.is_owner():
            self._send(("post", tag, value, to))

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
        timeout: float | None = None,
    ) -> list[memoryview] | list[bytearray]:
        """Send the root's buffers to every rank, in chunks, through rank 0.

        Returns the buffers (on the root: those given).
        """
        flat = [b.cast("B") for b in buffers or ()]
        said = self.exchange("broadcast", (root, [b.nbytes for b in flat]), timeout)
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
                send_cast(self._root, flat)
        return flat

    def alarm(self, message: str, *, code: int = 1, stacks: bool = False, brief: bool = False) -> None:
        """Make every other rank print `message` and end at once; the caller goes on."""
        self.process.alarmed = True
        if self.size > 1 and self.process.is_owner():
            self._send(("alarm", message, code, stacks, brief))

    def fail(self, message: str, *, brief: bool = False) -> None:
        """End the job with a non-zero code, whatever its main threads do.

        Every rank prints `message` and the stack of its main thread; if it is `brief` one rank of each host, no stack.
        """
        self.process.end_because_of(message, 0.5, stacks=not brief)
        self.alarm(message, stacks=not brief, brief=brief)

    def close(self) -> None:
        """Say goodbye: what the others see next is an orderly end, not a death.

        The connections stay until the process ends: rank 0 goes on serving those that still work.
        """
        if self._closed or not self.process.is_owner():
            return
        self._closed = True
        if self.size > 1:
            self._send(("bye", self.position()))

    def all_left(self, seconds: float) -> bool:
        """Whether, within this time, every rank has said goodbye, or the job is known to have failed."""
        return self.size == 1 or self.process.over.wait(seconds)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [r for r in range(self.size) if r != self.rank]

    @property
    def ending(self) -> bool:
        """Whether the job is known to have failed."""
        return self.process.ending

    def say(self, message: str) -> None:
        """Print a message on stderr, each line marked with the rank."""
        self.process.say(message)

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
            if message[0] not in ("bye", "alarm", "post"):  # the watcher sees it too
                raise ControlError(f"rank {self.rank}: lost the connection to {self.who(0)}: {error}") from None

    def _watch(self) -> None:
        assert self._root is not None
        while True:
            try:
                message = self._root.recv()
                if message[0] == "cast":
                    self._casts.put(receive_cast(self._root, message[1]))
                else:
                    self.deliver(message)
            except (EOFError, OSError) as error:
                reason = error
                break
        if self.process.over.is_set():
            self._answers.put(("error", "", f"{self.who(0)} has already left"))
            self.deliver(("post", "gone", 0, None))
        else:
            self.process.end_because_of(lost(self.who(0), reason), 0.0)

    def take(self, cast: list[bytearray]) -> None:
        """What another rank broadcasts has come."""
        self._casts.put(cast)

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Act on what the hub says (watcher thread; on rank 0 also the main thread)."""
        kind = message[0]
        if kind == "notice":
            _, tag, rank, value, entry = message
            self.notices.setdefault(tag, {})[rank] = value
            self.waiting[rank] = entry
            self._call(self._listeners.get(f"enter {tag}"), rank, value)
            self._call(self._listeners.get("enter"), rank, entry)
        elif kind == "bye":
            _, rank, position = message
            self.notices.setdefault("bye", {})[rank] = position
            self._call(self._listeners.get("bye"), rank, position)
        elif kind == "all left":
            self.process.over.set()
        elif kind == "post":
            self._call(self._listeners.get(message[1]), *message[2:])
        elif kind in ("result", "error"):
            for tag in [message[1]] if kind == "result" else [t for t in self.notices if t != "bye"]:
                self.notices.pop(tag, None)
            self.waiting.clear()
            self._answers.put(message)  # type: ignore[arg-type]
        elif kind == "end":
            self.process.end_because_of(*message[1:])

    def _call(self, hook: Callable[..., None] | None, *args: Any) -> None:
        if hook is not None:
            try:
                hook(*args)
            except Exception as error:  # a broken hook must not stop the watcher
                self.say(f"a hook of the control channel failed: {error!r}")

    # --- forks

    def _check_owner(self) -> None:
        if not self.process.is_owner():
            raise ControlError(
                f"a forked child of rank {self.rank} called into jaxdist: only the process that "
                "called jaxdist.init may; in data workers compute on host data alone"
            )

    def _forget(self) -> None:
        for conn in self._connections:
            with contextlib.suppress(OSError):
                conn.close()
