"""The comparison of a new call between ranks, before anything is sent: the step, its arguments, its program."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from jaxdist.agreement.description import Description, by_value, difference, list_ranks
from jaxdist.ir.fingerprint import Operation, operations
from jaxdist.runtime.context import Context

CHANGED = (  # advice about copies that differ
    "Either ranks pass what different calls returned, or something changed it on some ranks outside of a decorated "
    "step (code under `if rank == ...`, say): do the same on every rank, or do it in the step"
)

_SAME = (
    "Every rank must have the same model, constants, options of the step and settings of JAX, and pass its rows of the "
    "same batch"
)
_ADVICE = (
    "Inside a step nothing may depend on the rank: look for `ctx.rank`, an `if rank == ...`, a loop over a set (which "
    "PYTHONHASHSEED=0 puts into one order), a seed, options or versions that are not the same on all ranks."
)


class Rows(NamedTuple):
    """The rows of each leaf of a call that may be a part of a batch; None for other leaves."""

    here: tuple[int | None, ...]  # that this rank passes
    total: tuple[int | None, ...]  # that all ranks pass, as far as this rank knows


class OtherRows(Exception):
    """The ranks pass other numbers of rows than some of them assumed; raised on every rank."""

    def __init__(self, total: tuple[int | None, ...]):
        super().__init__(total)
        self.total = total  # of each leaf


class Traced(NamedTuple):
    """A program of a step that is about to be compiled."""

    program: ClosedJaxpr  # as one device runs it
    source: ClosedJaxpr  # the traced step
    digest: str  # of its computation and messages


def agree(
    context: Context,
    tag: str,
    about: Description,
    what: str,
    program: Traced | None,
    values: Sequence[Any],
    rows: Rows | None,
    sharers: Sequence[Sequence[int]],
) -> list[Sequence[Any]]:
    """Compare a call with every rank. `sharers` has the ranks that pass the same rows (`DeviceMap.sharers`)."""
    mine = about.fingerprint, program.digest if program else "", rows, values
    everyone = context.control.exchange(tag, mine, context.timeout, what)
    _check_rows([rows for *_, rows, _ in everyone], sharers)
    if len({fingerprint for fingerprint, *_ in everyone}) > 1 or about.problem:
        details = context.control.exchange(f"{tag} details", about, context.timeout, about.call)
        raise ValueError(difference(details, _SAME))
    digests = by_value([digest for _, digest, *_ in everyone])
    if len(digests) > 1:
        assert program is not None
        groups = list(digests.values())
        pair = groups[0][0], groups[1][0]
        told = [operations(program.source), operations(program.program)] if context.rank in pair else []
        details = context.control.exchange(f"{tag} operations", told, context.timeout, about.call)
        both = zip(("operation", "operation of a device's program"), *(details[rank] for rank in pair), strict=True)
        what, found = next((what, found) for what, *lines in both if (found := _first_difference(*lines)))
        none = f"no {what} that the other does not have, too"
        shown = [f"{x or none} on rank {list_ranks(g)}" for g, x in zip(groups[:2], found, strict=True)]
        rest = [rank for group in groups[2:] for rank in group]
        shown += [f"other programs again on rank {list_ranks(rest)}"] if rest else []
        # On the line that `jaxdist run` repeats.
        text = f"The first {what} that differs: {'; '.join(shown)}"
        raise ValueError(f"{about.call}: the ranks have different programs, and none has run. {text}\n{_ADVICE}")
    return [values for *_, values in everyone]


def _check_rows(everyone: Sequence[Rows | None], sharers: Sequence[Sequence[int]]) -> None:
    """Raise `OtherRows` on every rank if some rank assumed other totals than the ranks' rows add up to."""
    found = [rows for rows in everyone if rows is not None]
    if len(found) < len(everyone) or len({tuple(n is None for n in rows.here) for rows in found}) > 1:
        return
    columns = zip(*(found[ranks[0]].here for ranks in sharers), strict=True)
    total = tuple(None if column[0] is None else sum(column) for column in columns)
    if any(rows.total != total for rows in found):
        raise OtherRows(total)


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
