"""The out-of-band control channel: who is in which call, who left, who died, who failed."""

import asyncio
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from jaxdist.control import rendezvous
from jaxdist.control.hub import Entry, Hub, lost
from jaxdist.control.process import Process
from jaxdist.control.rendezvous import Member
from jaxdist.control.wire import job_key
from jaxdist.errors import ControlError

T = TypeVar("T")

_MAIL, _STOP = "mail", "stop"
_CHUNK = 1 << 24  # bytes of a broadcast that are sent at a time
_LEAST_PATIENCE, _MOST_PATIENCE = 3.0, 10.0  # seconds; between them the timeout
_REMIND_SECONDS = 30.0  # until a rank that waits without a limit says so
_REFUSED_SECONDS = 0.05  # for those who came to hear why there will be no job
_HAND_OVER_SECONDS = 1.0  # for the last words of a process to be on their way


class Control(Process):
    """A star of TCP connections with rank 0 as hub.

    One daemon thread per process runs an event loop, and alone touches the connections. It reacts to failures
    and deaths even while the main thread is stuck inside a collective.
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
    ):
        super().__init__(rank)
        self.size = size
        # Time for a thread of a peer to answer: Python's lock may be held, the host may be swapping.
        self.patience = min(_MOST_PATIENCE, max(_LEAST_PATIENCE, timeout))
        self.stopped: dict[int, str] = {}  # who is in a debugger, and where, as it came: the first has the terminal
        self._timeout, self.held_until = timeout, 0.0  # when a rank that was in a debugger may be late
        self.left: dict[int, int] = {}  # who has said goodbye, and its position
        # By rank that waits in an exchange before this one: the exchange's number and tag, and the rank's position.
        self.waiting: dict[int, tuple[int, str, Entry]] = {}
        # Whom to ask where this rank is, and where others are: the ledger, and the watchdog.
        self.position: Callable[[], int] = lambda: 0
        self.whereabouts: Callable[[list[int]], str | None] = lambda late: ""
        self.used = False  # by `send`, `recv` or `verify`
        self.exit_said: tuple[Any, tuple[int, int]] = None, (0, 0)  # the last code for `sys.exit`, and `calls` then
        self._mail: dict[tuple[str, int], queue.SimpleQueue[Any]] = {}
        self.members = [Member(socket.gethostname(), os.getpid(), "127.0.0.1")]
        self._listeners: dict[str, Callable[[int, Any], None]] = {
            _MAIL: lambda rank, mail: self._box(mail[0], rank).put(mail[1]),
            _STOP: self._stop,
        }
        self._exchange_lock = threading.RLock()  # one exchange at a time, also of a thread and its signal handlers
        self._exchanges = False
        self._number = 0  # of the last one
        self._answers: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._lost = ""  # why there can be no exchange any more
        self._hub: Hub | None = None
        if size > 1:
            self._join(addresses, server, key, timeout)

    def _join(
        self, addresses: Sequence[tuple[str, int]], server: socket.socket | None, key: bytes | None, timeout: float
    ) -> None:
        key = key or job_key(addresses[0][0], f"port {addresses[0][1]}")
        if self.rank == 0:
            server = server or rendezvous.bind(addresses[0][0], [port for _, port in addresses])
            address = f"tcp://{addresses[0][0]}:{server.getsockname()[1]}"
            meeting = rendezvous.gather(server, self.size, key, timeout, address)
        else:
            meeting = rendezvous.join(addresses, self.rank, self.size, key, timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxdist-control", daemon=True)
        self._thread.start()
        try:
            self._links, self.members = self._run(meeting)
        except BaseException:
            self._run(asyncio.sleep(_REFUSED_SECONDS))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            raise
        if self.rank == 0:
            self._hub = Hub(self, self._links)
            self.wait_gone = self._hub.all_gone.wait
        # A forked data worker that kept the sockets open would hide the death of its parent.
        os.register_at_fork(after_in_child=self._forget)
        hear = self._hub.hear if self._hub else self._hear
        self._tasks = [asyncio.run_coroutine_threadsafe(self._guarded(hear(r)), self._loop) for r in self._links]

    # --- calls of the owner

    def exchange(self, tag: str, value: Any = None, timeout: float | None = None, what: str = "") -> list[Any]:
        """All-gather of small picklable values: the value of each rank, in rank order."""
        if self.size == 1:
            return [value]
        if not self.is_owner():
            raise ControlError(
                f"a forked child of rank {self.rank} called into jaxdist: only the process that called jaxdist.init "
                "may; in data workers compute on host data alone"
            )
        self.stay_if_ending()
        with self._exchange_lock:
            if self._lost:
                raise ControlError(f"rank {self.rank}: {self._lost}")
            if self._exchanges:
                raise RuntimeError(
                    f"rank {self.rank}: {tag} in a signal handler, during a call of jaxdist: let the handler set a "
                    "flag, and check it after the call on every rank"
                )
            self._exchanges = True
            try:
                self._number += 1
                self._send(("enter", self._number, tag, value, Entry(self.position(), what or repr(tag))))
                kind, _, payload = self._answer(tag, timeout)
            finally:
                self._exchanges = False
        if kind == "error":
            self.stay_if_ending()
            raise ControlError(f"rank {self.rank}: {payload}")
        return payload

    def _answer(self, tag: str, timeout: float | None) -> tuple[str, int, Any]:
        """Return the hub's answer to the exchange that was just entered."""
        turns, pause = 0, timeout or _REMIND_SECONDS
        while True:
            with contextlib.suppress(queue.Empty):
                return self._next(pause)
            known = self.whereabouts([r for r in self.others if r not in self.waiting])
            if known is not None and timeout and time.monotonic() > self.held_until:
                break
            turns += 1
            if turns.bit_count() == 1:  # 1, 2, 4, 8, ...
                self.say(f"{tag} has waited for {turns * pause:g} s: {known or 'others are busy in a step'}")
        self._send(("timeout", self._number, timeout, known and f" {known}."))
        with contextlib.suppress(queue.Empty):
            return self._next(self.patience)
        raise ControlError(
            f"rank {self.rank}: exchange {tag!r} timed out after {timeout:g} s and {self.who(0)} does not answer"
        )

    def _next(self, timeout: float | None) -> tuple[str, int, Any]:
        while (answer := self._answers.get(timeout=timeout))[1] != self._number:
            pass  # of an exchange that this rank has given up
        return answer

    def listen(self, tag: str, hook: Callable[[int, Any], None]) -> None:
        """Call a hook with each value that a rank posts, on the channel's thread: it must not block."""
        self._listeners[tag] = hook

    def post(self, tag: str, value: Any, to: int | None = None) -> None:
        """Tell one other rank, or all, something small; does not wait for them."""
        if self.size > 1 and self.is_owner():
            self._send(("post", tag, value, to))

    def stop(self, at: str) -> None:
        """Stop in a debugger at this line, once no other rank is in one; or ("") leave it."""
        if self.size > 1 and self.is_owner():
            self.post(_STOP, at, to=-1)  # to itself, too: all ranks hear of stops in one order
            while self.stopped.get(self.rank, "") != at or (at and next(iter(self.stopped)) != self.rank):
                time.sleep(0.01)

    def put(self, name: str, value: Any, to: int | None = None) -> None:
        """Leave something small and picklable for a rank, or for all others; does not wait for them."""
        if to == self.rank:
            self._box(name, self.rank).put(value)
        else:
            self.post(_MAIL, (name, value), to)

    def take(self, name: str, rank: int, seconds: float | None) -> Any:
        """Take the value that a rank left under this name. Raises queue.Empty if it does not arrive in time."""
        found = self._box(name, rank).get(timeout=seconds)
        self._mail.pop((name, rank))
        return found

    def _box(self, name: str, rank: int) -> queue.SimpleQueue[Any]:
        return self._mail.setdefault((name, rank), queue.SimpleQueue())

    def broadcast(self, obj: Any, root: int = 0) -> Any:
        """The root's small picklable object on every rank."""
        return self.exchange("broadcast", obj if self.rank == root else None)[root]

    def broadcast_bytes(self, data: bytes | memoryview, root: int, timeout: float | None = None) -> bytearray:
        """The root's bytes on every rank, through rank 0, a part of them at a time; b"" is given on the others."""
        said = self.exchange("broadcast", (root, len(data)), timeout)
        if {r for r, _ in said} != {root}:
            raise ControlError(
                f"rank {self.rank}: broadcast with different roots: "
                + ", ".join(f"rank {i} says root={r}" for i, (r, _) in enumerate(said))
            )
        moved = bytearray()
        for start in range(0, said[root][1], _CHUNK):
            part = bytes(data[start : start + _CHUNK])
            moved += self.exchange("part of a broadcast", part, timeout)[root]
        return moved

    def alarm(self, message: str, *, code: int = 1, stacks: bool = False) -> None:
        """Make every other rank print `message` and end at once; the caller continues."""
        self.alarmed = True
        if self.size > 1 and self.is_owner():
            self._send(("alarm", message, code, stacks), last=True)

    def fail(self, message: str) -> None:
        """End the job, even if main threads are stuck; every rank prints `message` and where its main thread is."""
        self.end_because_of(message, 0.5, stacks=True)
        self.alarm(message, stacks=True)

    def close(self) -> None:
        """Say goodbye: the others see no death. The connections stay, for rank 0 serves those that still work."""
        if self._lost or not self.is_owner():
            return
        self._lost = "it has said goodbye, and no other call can follow"
        if self.size > 1:
            self._send(("bye", self.position()), last=True)

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [r for r in range(self.size) if r != self.rank]

    @property
    def calls(self) -> tuple[int, int]:
        """Return the number of exchanges of this rank, and of calls in its ledger."""
        return self._number, self.position()

    def who(self, rank: int) -> str:
        """A rank with the host and the process behind it, for messages."""
        return f"rank {rank} ({self.members[rank].host}, pid {self.members[rank].pid})"

    # --- between the other threads and the loop's

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _send(self, message: tuple[Any, ...], *, last: bool = False) -> None:
        """Tell the hub, from any thread; wait until it is out if it is the `last` that this process may have to say."""
        if threading.current_thread() is self._thread:
            self._tell_hub(message)
            return
        sent = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._tell_hub(message), sent.set()))
        if last:
            sent.wait(_HAND_OVER_SECONDS)

    # --- the thread of the loop

    def _tell_hub(self, message: tuple[Any, ...]) -> None:
        if self._hub:
            self._hub.handle(0, message)
        else:
            self._links[0].send(message)

    async def _guarded(self, hearing: Coroutine[Any, Any, None]) -> None:
        try:
            await hearing
        except Exception as error:  # a channel that is silent from now on must not keep the job waiting
            self.end_because_of(f"the control channel failed: {error!r}", 0.0)

    async def _hear(self, rank: int) -> None:
        try:
            while True:
                self.deliver(await self._links[rank].receive())
        except (EOFError, OSError) as error:
            if not self.over.is_set():
                self.end_because_of(lost(self.who(rank), error), 0.0)
                return
        self._lost = f"{self.who(rank)} has already left"
        self._answers.put(("error", self._number, self._lost))

    def deliver(self, message: tuple[Any, ...]) -> None:
        """Act on a message from the hub."""
        match message:
            case "notice", number, tag, rank, entry:
                self.waiting[rank] = number, tag, entry
                self._tell("enter", rank, entry)
            case "bye", rank, position:
                self.left[rank] = position
                self._tell("bye", rank, position)
            case ("all left",):
                self.over.set()
            case "post", tag, rank, value:
                self._tell(tag, rank, value)
            case ("result" | "error") as kind, number, answer:
                for rank in [r for r, (entered, *_) in self.waiting.items() if entered <= number]:
                    del self.waiting[rank]
                self._answers.put((kind, number, answer))
            case "end", *how:
                self.end_because_of(*how)

    def _stop(self, rank: int, at: str) -> None:
        self.stopped = {r: line for r, line in {**self.stopped, rank: at}.items() if line}
        self.held_until = float("inf") if self.stopped else time.monotonic() + self._timeout

    def _tell(self, tag: str, rank: int, value: Any) -> None:
        if hook := self._listeners.get(tag):
            hook(rank, value)

    def _forget(self) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):
                os.close(link.sock.fileno())
