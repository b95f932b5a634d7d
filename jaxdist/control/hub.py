"""Rank 0's part of the control channel: it receives the ranks' messages, and informs the others.

All of it runs on the thread of the event loop; to send waits for nobody.
"""

import errno
import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdist.control import rendezvous
from jaxdist.control.wire import Link

PRINT_SECONDS = 0.3  # for the others to print the reason before the launcher kills them
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Entry(NamedTuple):
    """The place of a rank that waits in an exchange."""

    position: int  # calls of steps and eager collectives that it has entered before
    what: str  # names the exchange


@dataclass
class Exchange:
    """One exchange, by its number: the same on every rank. Ranks that come after it failed get the failure as well."""

    entered: dict[int, tuple[str, Any, Entry]] = field(default_factory=dict)  # by rank: tag, value, place
    failure: str = ""


class Hub:
    """The center of the star."""

    def __init__(self, control: Any, links: dict[int, Link]):
        self.control, self.links = control, links  # rank 0's end of the channel (`Control`), links to the others
        self.exchanges: dict[int, Exchange] = {}  # to which somebody has yet to come
        self.left: set[int] = set()
        self.open = set(links)
        self.all_gone = threading.Event()

    async def hear(self, rank: int) -> None:
        """Handle a rank's messages until its connection ends."""
        try:
            while True:
                self.handle(rank, await self.links[rank].receive())
        except (EOFError, OSError) as error:
            self.open.discard(rank)
            if not self.open:
                self.all_gone.set()
            if not self.control.over.is_set():  # it has to wait for that
                self.end_all(lost(self.control.who(rank), error), spare=rank)

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        if rank == 0:
            self.control.deliver(message)
        elif rank in self.open:
            self.links[rank].send(message)

    def others(self, rank: int) -> list[int]:
        # Rank 0 last: a message may end it, and it has to tell the others first.
        return [r for r in (*self.links, 0) if r != rank]

    def handle(self, rank: int, message: tuple[Any, ...]) -> None:
        match message:
            case "enter", *entered:
                self.enter(rank, *entered)
            case "timeout", number, seconds, known:
                one = self.exchanges.get(number)
                if one is not None and not one.failure:
                    what = f"exchange {one.entered[rank][2].what} timed out on rank {rank} after {seconds:g} s"
                    self.fail(number, f"{what}. {self.where(one)}{known}")
            case "post", tag, value, to:
                for r in self.others(rank) if to is None else self.others(-1) if to == -1 else [to]:
                    self.send(r, ("post", tag, rank, value))
            case "bye", position:
                self.left.add(rank)
                for r in self.others(rank):
                    self.send(r, ("bye", rank, position))
                for number, one in list(self.exchanges.items()):
                    if not one.failure:
                        self.fail(number, self.why_gone(one))
                if len(self.left) == self.control.size:
                    for r in self.others(-1):
                        self.send(r, ("all left",))
            case "alarm", text, code, stacks:
                self.end_all(text, rank, code, 2 * PRINT_SECONDS, stacks)

    def enter(self, rank: int, number: int, tag: str, value: Any, entry: Entry) -> None:
        one = self.exchanges.setdefault(number, Exchange())
        one.entered[rank] = tag, value, entry
        if one.failure:
            self.send(rank, ("error", number, one.failure))
        else:
            for r in self.others(rank):
                self.send(r, ("notice", number, tag, rank, entry))
            if self.left:
                self.fail(number, self.why_gone(one))
            elif len({t for t, *_ in one.entered.values()}) > 1:
                self.fail(
                    number,
                    f"the ranks are in different calls. {self.where(one)} Every rank must make the same jaxdist calls "
                    "in the same order: look for a call under `if rank == ...`, or loops of different length",
                )
            elif len(one.entered) == self.control.size:
                values = [one.entered[r][1] for r in range(self.control.size)]
                for r in self.others(-1):
                    self.send(r, ("result", number, values))
        if len(one.entered.keys() | self.left) == self.control.size:
            self.exchanges.pop(number, None)

    def why_gone(self, one: Exchange) -> str:
        left = ", ".join(self.control.who(r) for r in sorted(self.left))
        return (
            f"{left} has already left. {self.where(one)} Every rank must make the same jaxdist calls: "
            "did it run fewer steps, end early, or is this call under a condition such as `if rank == 0`?"
        )

    def where(self, one: Exchange) -> str:
        """Describe which rank is at which tag, and who is missing, with hosts and pids."""
        places: dict[str, list[int]] = {}
        for rank, (_, _, entry) in sorted(one.entered.items()):
            places.setdefault(entry.what, []).append(rank)
        parts = [f"{rendezvous.ranks_in_words(ranks)} at {what}" for what, ranks in places.items()]
        missing = [self.control.who(r) for r in range(self.control.size) if r not in one.entered and r not in self.left]
        if missing:
            parts.append("not there: " + ", ".join(missing))
        return "; ".join(parts) + "."

    def fail(self, number: int, reason: str) -> None:
        one = self.exchanges[number]
        one.failure = reason
        for rank in sorted(one.entered, reverse=True):  # rank 0 last, as ever
            self.send(rank, ("error", number, reason))

    def end_all(self, message: str, spare: int, code: int = 1, pause: float = 0.0, stacks: bool = False) -> None:
        for r in self.others(spare):
            self.send(r, ("end", message, pause, stacks, code))


def lost(who: str, error: Exception) -> str:
    """The message about a rank whose connection ended so, without a goodbye."""
    if isinstance(error, OSError) and error.errno in _UNREACHABLE:
        return (
            f"{who} can't be reached any more ({error.strerror}): its host is down, or the network between is. Ending "
            "this rank too"
        )
    return (
        f"{who} died without a goodbye: killed by a signal, out of memory, a crash in native code, or its network is "
        "gone (see its own output, and `dmesg` for the OOM killer). Ending this rank too"
    )
