"""One sequence of calls: of steps, eager collectives and what else the ranks do together, the same on every rank.

A training loop repeats itself: a hundred steps, an evaluation, a hundred steps. A rank whose next call is the one that
the calls so far lead to expect tells nobody, and enters it. Any other call is compared with the other ranks' before
anything is sent. So where one rank makes another call than the rest, it is that rank, or the rest, who ask; and
whoever has entered its own call by then learns from the question that the two differ, and ends the job.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable

from jaxdist.control.channel import Control

_NEXT = "the next call"
_TURNS = 1024  # places where one kind of call followed another that are kept
_NAMED = 64  # of the last calls, for messages


class CallSequence:
    """The calls of this rank.

    Args:
      control: of the job.

    Attributes:
      count: calls entered for good: nothing can stop this rank from their collectives.

    Example:
      >>> from jaxdist.control.channel import Control
      >>> calls = CallSequence(Control(0, 1))
      >>> calls.enter("train")
      False
      >>> calls.commit("train")
      >>> calls.enter("train"), calls.enter("evaluate"), calls.count
      (True, False, 2)
    """

    def __init__(self, control: Control):
        self.count = 0
        self._control = control
        self._lock = threading.Lock()  # this rank enters a call, or its watcher judges: never both at once
        self._named: deque[Hashable] = deque(maxlen=_NAMED)
        self._last: Hashable = None
        self._run = 0  # times that the last call was made in a row
        self._turns: dict[tuple[Hashable, int], Hashable] = {}  # what followed so many calls of a kind
        self._before: tuple[tuple[Hashable, int], Hashable] = (None, 0), None  # where the newest call began
        self._announced: dict[int, tuple[int, str]] = {}  # where other ranks are, and the call they make next
        control.where_is(this=lambda: self.count)
        control.listen("enter", lambda rank, entry: self._other_entered(rank, *entry))
        control.listen("bye", self._other_left)
        control.listen(_NEXT, self._other_announced)

    @property
    def tag(self) -> str:
        """Of the exchange in which the next call is compared."""
        return f"call {self.count + 1} of the job"

    def check_all_here(self, what: Hashable) -> None:
        """Nobody has left who should come to the next call.

        Raises:
          RuntimeError: somebody has.
        """
        for rank, count in list(self._control.notices.get("bye", {}).items()):
            if count <= self.count:
                raise RuntimeError(self._left(rank, count, what))

    def _foreseen(self, what: Hashable) -> bool:
        return what == self._turns.get((self._last, self._run), self._last)

    def announce(self, what: Hashable) -> None:
        """This rank is about to make a call for which the ranks wait for each other; `commit` enters it.

        If it is not the one to expect the others are told: some may be in a call of another kind.
        """
        if self._control.size > 1 and not self._foreseen(what):
            self._control.post(_NEXT, (self.count, str(what)))

    def enter(self, what: Hashable) -> bool:
        """Enter a call for good, unless it has to be compared first: then False, and `commit` enters it.

        Args:
          what: the kind of call; `str` of it names it in messages.
        """
        with self._lock:
            if not self._foreseen(what) or self._awaited():
                return False
            self._add(what)
            return True

    def commit(self, what: Hashable) -> None:
        """Enter a call for good that was compared."""
        with self._lock:
            self._add(what)

    def correct(self, what: Hashable) -> None:
        """The call entered last was of this kind."""
        with self._lock:
            (self._last, self._run), follows = self._before
            self._follow(follows)
            self._named.pop()
            self.count -= 1
            self._add(what)

    def expect(self, what: Hashable) -> None:
        """After the call entered last this one is to be expected, unless another has followed before."""
        with self._lock:
            if (self._last, self._run) not in self._turns:
                self._follow(what)

    def _add(self, what: Hashable) -> None:
        turn = self._last, self._run
        self._before = turn, self._turns.get(turn)
        if what == self._last:
            self._follow(None)
            self._run += 1
        else:
            self._follow(what)
            self._last, self._run = what, 1
        self._named.append(what)
        self.count += 1

    def _follow(self, what: Hashable) -> None:
        """Note what comes after the calls so far; None: another of the same."""
        turn = self._last, self._run
        if what is not None:
            if len(self._turns) >= _TURNS:
                self._turns.clear()
            self._turns[turn] = what
        elif turn in self._turns:
            del self._turns[turn]

    def _awaited(self) -> bool:
        """Whether another rank waits where this one is: to compare this call, or in another one."""
        waiting, announced = self._control.waiting, self._announced
        return bool(waiting or announced) and self.count in [
            position for position, _ in (*waiting.values(), *announced.values())
        ]

    # --- the control channel's watcher

    def _other_announced(self, rank: int, announced: tuple[int, str]) -> None:
        with self._lock:
            self._announced[rank] = announced
        self._other_entered(rank, *announced, same=True)

    def _other_entered(self, rank: int, position: int, what: str, same: bool = False) -> None:
        """Another rank asks or tells where it is, and is not past so many calls.

        Args:
          rank: that one.
          position: its calls so far.
          what: it does next.
          same: whether this rank may have been in that call, too.
        """
        with self._lock:
            if self.count <= position:
                return
            at = self.count - position
            mine = str(self._named[-at]) if at <= len(self._named) else "a call long ago"
        if same and mine == what:
            return
        if mine == what:
            what = (
                f"{what} too, but with something new: a state of other types, or kept elsewhere (on the host, on the "
                "mesh), another constant, other settings of JAX, or after an error"
            )
        me = self._control.rank
        self._control.fail(
            f"the ranks make different calls: call {position + 1} of rank {me} is {mine}, and rank {rank} came with "
            f"{what}. Every rank must make the same calls in the same order, with batches of the same shape: look for "
            "a choice that is not the same on all ranks, or a tail of the data that is not"
        )

    def _other_left(self, rank: int, count: int) -> None:
        with self._lock:
            if self.count <= count:
                return
            what = self._named[-1]
        self._control.fail(self._left(rank, count, what))

    def _left(self, rank: int, count: int, what: Hashable) -> str:
        return (
            f"rank {rank} has finished after {count} calls, and rank {self._control.rank} is in call "
            f"{max(self.count, count + 1)}, {what}: each rank must make the same number of calls"
        )
