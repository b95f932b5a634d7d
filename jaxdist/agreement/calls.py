"""The comparison of a new call between ranks, before anything is sent: the step, its arguments, its program."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxdist.agreement.description import Description, by_value, difference, list_ranks
from jaxdist.ir.fingerprint import Operation, dataflow, operations
from jaxdist.runtime.context import Context

CHANGED = (
    "Either ranks pass what different calls returned, or something changed it on some ranks outside of a decorated "
    "step (code under `if rank == ...`, say): do the same on every rank, or do it in the step"
)
"""Advice about copies that differ."""

_ADVICE = (
    "Inside a step nothing may depend on the rank: look for `ctx.rank`, an `if rank == ...`, a loop over a set (which "
    "PYTHONHASHSEED=0 puts into one order), a seed, options or versions that are not the same on all ranks."
)


@dataclass(frozen=True)
class Traced:
    """A program of a step that is about to be compiled."""

    program: ClosedJaxpr  # as one device runs it
    source: ClosedJaxpr  # the traced step

    @functools.cached_property
    def digest(self) -> str:
        """A digest of its computation and messages."""
        return dataflow(self.program)

    def parts(self) -> dict[str, list[Operation]]:
        """The operations to compare when two programs differ, in this order, by the name of one in messages."""
        return {
            "operation": operations(self.source),
            "operation of a device's program": operations(self.program),
        }


def agree(
    context: Context, tag: str, about: Description, what: str, program: Traced | None, values: Sequence[Any] = ()
) -> list[Sequence[Any]]:
    """Compare a call with every rank."""
    mine = about.fingerprint, program.digest if program else "", values
    everyone = context.control.exchange(tag, mine, context.timeout, what)
    if len({fingerprint for fingerprint, *_ in everyone}) > 1 or about.problem:
        details = context.control.exchange(f"{tag} details", about, context.timeout, about.call)
        raise ValueError(difference(details, _advice))
    digests = by_value([digest for _, digest, _ in everyone])
    if len(digests) > 1:
        raise ValueError(_programs(context, tag, about.call, program, list(digests.values())))
    return [values for *_, values in everyone]


def _programs(context: Context, tag: str, call: str, program: Traced | None, groups: Sequence[Sequence[int]]) -> str:
    """Describe how programs differ between groups of ranks."""
    assert program is not None
    first, other = groups[0][0], groups[1][0]
    told = program.parts() if context.rank in (first, other) else {}
    details = context.control.exchange(f"{tag} operations", told, context.timeout, call)
    pairs = ((what, _first_difference(lines, details[other][what])) for what, lines in details[first].items())
    what, found = next((pair for pair in pairs if pair[1]), ("", None))
    return f"{call}: the ranks have different programs, and none has run. {_explained(found, groups, what)}\n{_ADVICE}"


def _advice(name: str) -> str:
    if name.startswith("constant "):
        return "Anything but arrays must be the same on every rank"
    if name.startswith("option "):
        return "Decorate the step with the same options of jaxdist.data_parallel on every rank"
    if name.startswith("setting "):
        return "Settings of JAX must be the same on every rank"
    return "Build the same model on every rank, and pass batches of the same shape (drop or pad the tail of the data)"


def _first_difference(
    one: Sequence[Operation], other: Sequence[Operation]
) -> tuple[Operation | None, Operation | None] | None:
    """The first operation of each of two programs that the other does not have, or has elsewhere."""
    known = [{line.digest for line in lines} for lines in (one, other)]
    mine = next((line for line in one if line.digest not in known[1]), None)
    theirs = next((line for line in other if line.digest not in known[0]), None)
    if mine or theirs:
        return mine, theirs
    return next(((a, b) for a, b in zip_longest(one, other) if a is None or b is None or a.digest != b.digest), None)


def _explained(
    found: tuple[Operation | None, Operation | None] | None, groups: Sequence[Sequence[int]], what: str
) -> str:
    """A difference, for a person."""
    if found is None:
        text = "The operations match, but the returned values differ"
        return f"{text}: one program on rank {'; a different one on rank '.join(map(list_ranks, groups))}."
    rest = [rank for group in groups[2:] for rank in group]
    more = f"\n  rank {list_ranks(rest)}: other programs again" if rest else ""
    none = f"no {what} that the other does not have, too"
    lines = [f"\n  rank {list_ranks(g)}: {x or none}" for g, x in zip(groups[:2], found, strict=True)]
    return f"The first {what} that differs:{''.join(lines)}{more}"
