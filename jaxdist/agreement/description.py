"""A rank's description of a call, and the first difference between ranks, in the same words on all of them."""

import functools
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_SAME_CALLS = (
    "Nothing was sent. Every rank must make the same calls in the same order: look for a choice that is not the same "
    "on all ranks"
)


@dataclass(frozen=True)
class Description:
    """The parts of a call that must be the same on every rank."""

    call: str  # its name, with its parameters
    entries: tuple[tuple[str, str], ...] = ()  # (name, value) of its arguments, in order
    problem: str = ""  # an error of this rank; raised on every rank

    @functools.cached_property
    def fingerprint(self) -> int:
        """A 64-bit hash: equal for equal descriptions. 0 stands for a problem."""
        if self.problem:
            return 0
        text = repr((self.call, self.entries)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2 | 1

    def __str__(self) -> str:
        return f"{self.call} of {self.values()}" if self.entries else self.call

    def values(self) -> str:
        """The entries, for a message; the name of a single "x" goes without saying."""
        shown = [f"{name}: {value}" if name != "x" else value for name, value in self.entries[:4]]
        more = len(self.entries) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")


def difference(everyone: Sequence[Description], advice: str) -> str:
    """Describe the first difference between the ranks: a problem, a different call, a different value."""
    if problems := {rank: d.problem for rank, d in enumerate(everyone) if d.problem}:
        return first_problem(everyone[min(problems)].call, problems)
    calls = by_value([d.call for d in everyone])
    if len(calls) > 1:
        return f"the ranks make different calls: {listed(calls)}. {_SAME_CALLS}"
    call, tables = everyone[0].call, [dict(d.entries) for d in everyone]
    for name in dict.fromkeys(name for table in tables for name in table):
        values = by_value([table.get(name, "absent") for table in tables])
        if len(values) > 1:
            return f"the ranks call {call} with different arguments: {name} is {listed(values)}. {advice}"
    return f"the ranks are at different calls of {call}, or name its arguments in a different order. {_SAME_CALLS}"


def first_problem(call: str, problems: Mapping[int, str]) -> str:
    """The problem of the first rank that has one, for a person."""
    first, *others = problems
    also = f" (and on rank {list_ranks(others)})" if others else ""
    return f"{call}, on rank {first}{also}: {problems[first]}"


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order of the pairs."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def by_value(values: Sequence[K]) -> dict[K, list[int]]:
    """The ranks that have each value, of the value of each rank."""
    return grouped((value, rank) for rank, value in enumerate(values))


def unlike_the_root(values: Sequence[Any]) -> list[int]:
    """Return the ranks whose value differs from rank 0's."""
    return [rank for rank, value in enumerate(values) if value != values[0]]


def listed(groups: Mapping[Any, Sequence[Any]]) -> str:
    """Values with the ranks that have them, for a message."""
    return "; ".join(f"{value} on rank {list_ranks(ranks)}" for value, ranks in groups.items())


def list_ranks(ranks: Sequence[Any]) -> str:
    """Ranks, or devices, for a message."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
