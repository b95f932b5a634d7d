"""Whether the ranks start the collectives of a compiled program in one order.

Collectives that do not depend on each other are ordered by the compiler, from what it knows of the program, the
processor and the number of threads. Between CPU processes messages have no names: the first that one rank sends is the
first that the other takes. So before a rank runs a program it asks the first rank of those that run it whether it has
the same order. A rank that compiles what the first one has not (to look at it, or another program) waits no longer than
until the first one waits for it elsewhere, or has compiled something else; the answer may come later.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from jaxdist import compat
from jaxdist.control.channel import Control
from jaxdist.ir.compiled import computations
from jaxdist.runtime.lowered import LoweredProgram

_ASKED, _ANSWERED = "the order of a program", "the order of the first rank"
_POLL_SECONDS = 0.1
_SAY_SECONDS = 10.0  # of waiting, before a line says so
_PATIENCE = 60.0  # more seconds for the first rank to compile
_SHOWN = 160  # characters of a line
# What a compiler may call otherwise, and where it stands in the source: no part of the message.
_NAMES = re.compile(r"%[\w.\-]+|, (?:channel_id|to_apply)=[^,]*|, (?:backend_config|frontend_attributes)=.*$")
_NUMBER = re.compile(r"collective_\d+")  # see `GlooLowering`
_WHERE = re.compile(r", metadata=\{(?:op_name=\"([^\"]*)\")?[^}]*\}")


class _Message(NamedTuple):
    """A collective: what travels, and the name that it has from where it was written."""

    what: str
    name: str

    @property
    def numbers(self) -> list[str]:
        """Of the collectives that it is made of; without, its name."""
        return _NUMBER.findall(self.name) or [self.name]

    def __str__(self) -> str:
        shown = f"{self.name}: {self.what}" if self.name else self.what
        return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


class _Digests(NamedTuple):
    """Of an order: of what travels, of the numbers of the collectives, and of these sorted."""

    what: bytes
    numbers: bytes
    which: bytes

    def fit(self, other: _Digests) -> bool:
        """Whether it is the same order.

        JAX's persistent cache may hold a program from when its collectives had other names: then these tell nothing.
        """
        return self.what == other.what and (self.numbers == other.numbers or self.which != other.which)


class _Question(NamedTuple):
    """Of a rank that has compiled a program: digests of what was compiled, and of the order."""

    program: bytes
    order: _Digests


class _Answer(NamedTuple):
    """Of the first rank: whether it has compiled the program; its order, if it is another one."""

    program: bytes
    known: bool = True
    order: tuple[_Message, ...] = ()


class Orders:
    """Of the programs between CPU processes that this rank has compiled or loaded."""

    def __init__(self, control: Control):
        self._control = control
        self._lock = threading.Lock()
        self._mine: dict[bytes, tuple[_Message, ...]] = {}  # by program
        self._ranks: dict[bytes, frozenset[int]] = {}  # that run a program of which this rank is the first
        self._asked: defaultdict[int, dict[bytes, _Digests]] = defaultdict(dict)  # what each rank has asked for
        self._answered: dict[bytes, threading.Event] = {}
        control.listen(_ASKED, self._asks)
        control.listen(_ANSWERED, self._answers)

    def compiled(self, program: LoweredProgram, executable: Any) -> None:
        """This rank is about to run a program; waits for the first rank of it, if it is one between processes."""
        ranks = frozenset(device.process_index for device in program.devices)
        if len(ranks) == 1 or program.backend.platform != "cpu":
            return
        mine = tuple(one for module in executable.hlo_modules() for one in order_of(module.to_string()))
        if len(mine) < 2:
            return
        key = hashlib.sha256(program.computation()).digest()
        first = min(ranks)
        answers: list[tuple[int, _Answer]] = []
        known = threading.Event()
        with self._lock:
            self._mine[key] = mine
            if first == self._control.rank:
                self._ranks[key] = ranks
                open_ = [(r, k) for r, asked in self._asked.items() for k in asked if k == key or k not in self._mine]
                answers = [(r, answer) for r, k in open_ if (answer := self._answer(r, k))]
            else:
                self._answered[key] = known
        for rank, answer in answers:
            self._control.post(_ANSWERED, answer, to=rank)
        if first != self._control.rank:
            self._control.post(_ASKED, _Question(key, _digests(mine)), to=first)
            self._wait(known, program.name, first)

    def _wait(self, known: threading.Event, name: str, first: int) -> None:
        start = time.monotonic()
        said = False
        while not known.wait(_POLL_SECONDS) and first not in self._control.waiting:
            waited = time.monotonic() - start
            if waited > _SAY_SECONDS and not said:
                said = True
                self._control.say(f"has compiled {name!r} and waits for {self._control.who(first)} to do so")
            if waited > _SAY_SECONDS + _PATIENCE:
                self._control.say(f"goes on with {name!r}, the order of whose messages could not be compared yet")
                return

    def _asks(self, rank: int, question: _Question) -> None:
        with self._lock:
            self._asked[rank][question.program] = question.order
            answer = self._answer(rank, question.program)
        if answer:
            self._control.post(_ANSWERED, answer, to=rank)

    def _answer(self, rank: int, key: bytes) -> _Answer | None:
        """To what another rank has asked; None: later."""
        if key in self._mine:
            mine = self._mine[key]
            return _Answer(key, True, () if self._asked[rank][key].fit(_digests(mine)) else mine)
        elsewhere = any(rank in ranks and other not in self._asked[rank] for other, ranks in self._ranks.items())
        return _Answer(key, False) if elsewhere else None

    def _answers(self, rank: int, answer: _Answer) -> None:
        if not answer.order:
            self._answered[answer.program].set()
            return
        pairs = enumerate(zip_longest(self._mine[answer.program], answer.order, fillvalue=_Message("none", "")), 1)
        n, mine, theirs = next((n, a, b) for n, (a, b) in pairs if (a.what, a.numbers) != (b.what, b.numbers))
        me = self._control.who(self._control.rank)
        self._control.fail(
            f"one program was compiled to messages in another order on {me} than on {self._control.who(rank)}: number "
            f"{n} is {mine} here and {theirs} there. XLA takes the processor and the number of threads "
            "into account: set PJRT_NPROC to one number on every rank, and XLA_FLAGS=--xla_cpu_max_isa=AVX2 (or what "
            "the oldest processor has); or take the communicator 'mpi', whose messages have an order of their own"
        )


def _digests(order: Sequence[_Message]) -> _Digests:
    numbers = [number for one in order for number in one.numbers]
    return _Digests(*(_digest(texts) for texts in ((one.what for one in order), numbers, sorted(numbers))))


def _digest(texts: Iterable[str]) -> bytes:
    return hashlib.sha256("\n".join(texts).encode()).digest()


def order_of(text: str) -> list[_Message]:
    """The collectives of a compiled program in the order in which a device starts them."""
    found, entry = computations(text)

    def walk(name: str) -> Iterator[_Message]:
        for one in found.get(name, ()):
            if one.kind:
                where = _WHERE.search(one.rest)
                plain = _NAMES.sub("", _WHERE.sub("", one.rest))
                yield _Message(f"{one.type} {one.opcode}{plain}", (where and where[1]) or "")
            for other in one.called:
                yield from walk(other)

    return list(walk(entry))


def compare(control: Control) -> None:
    """From now on compare the orders of what is compiled between CPU processes."""
    orders = Orders(control)
    compat.on_compiled(orders.compiled, LoweredProgram)
