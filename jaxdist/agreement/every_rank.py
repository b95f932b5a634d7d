"""`on_every_rank`: each rank does its part of a call; if one can't, or they do not fit, all raise the same error."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from jaxdist.agreement.description import Description, difference, first_problem
from jaxdist.errors import in_words, message_of
from jaxdist.runtime.context import Context

R = TypeVar("R")


class Part(NamedTuple, Generic[R]):
    """A rank's part of a call."""

    result: R  # stays on this rank
    entries: tuple[tuple[str, str], ...] = ()  # must be the same on every rank; see `Description`
    told: Any = None  # goes to every rank


def on_every_rank(
    context: Context,
    call: str,
    part: Callable[[], Part[R]],
    *,
    raises: tuple[type[Exception], ...] = (ValueError,),
    advice: str = "It must be the same on every rank",
    patient: bool = False,
    exchange: Callable[[Any], list[Any]] | None = None,
) -> tuple[R, list[Any]]:
    """Do this rank's part of a call, and continue if all ranks could do theirs, with the same arguments."""
    if context.size == 1:
        alone = part()
        return alone.result, [alone.told]
    mine, mistake = _attempt(part)
    # The index of the error to raise on all ranks, and its message.
    known = [raises.index(kind) for kind in type(mistake).__mro__ if kind in raises]
    kind = known[0] if known else 0
    problem = "" if mistake is None else (message_of(mistake) or "failed") if known else in_words(mistake)
    own = Description(call, mine.entries if mine else (), problem), kind, mine.told if mine else None
    said = exchange(own) if exchange else context.control.exchange(call, own, None if patient else context.timeout)
    everyone = [description for description, _, _ in said]
    if kinds := {rank: kind for rank, (description, kind, _) in enumerate(said) if description.problem}:
        first = min(kinds.values())
        problems = {rank: everyone[rank].problem for rank, kind in kinds.items() if kind == first}
        error = raises[first](first_problem(call, problems))
        setattr(error, "elsewhere", mistake is None)  # noqa: B010  # the job ends because of the failing rank's error
        raise error from mistake
    if any(description != own[0] for description in everyone):
        raise raises[0](difference(everyone, advice))
    assert mine is not None
    return mine.result, [told for _, _, told in said]


def _attempt(part: Callable[[], Part[R]]) -> tuple[Part[R] | None, Exception | None]:
    # A function of its own: the error holds its frame, and with one that holds the error would be freed late.
    try:
        return part(), None
    except Exception as error:
        return None, error
