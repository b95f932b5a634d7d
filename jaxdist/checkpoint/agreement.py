"""Whether all ranks could do their part, by mail: from a thread beside the training, or as long as it takes."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from typing import Any

from jaxdist.agreement.description import first_problem
from jaxdist.checkpoint.plain import as_called
from jaxdist.errors import CheckpointError, message_of
from jaxdist.runtime.context import Context

_ANNOTATION = re.compile(r" ?\[\w[\w ]*='(?:[^'\\]|\\.)*'\]")  # tensorstore's: [tensorstore_spec='{"driver": ...}']
_SLICE = 5.0  # seconds of waiting, after which a rank looks whether the job still lives


def together(
    ctx: Context, what: str, name: str, work: Callable[[], Any], conclude: Callable[[list[Any]], None], failed: str
) -> None:
    """Do something on each rank, then something on the root, and learn on every rank whether it was all done.

    Also from a thread beside the training. A rank that takes long is waited for while it lives: its end is noticed on
    the control channel, and ends this one.
    """
    mine, cause = _attempt(work)
    if ctx.is_root:
        verdict = first_problem(failed, {0: "interrupted"})
        try:
            said = [mine, *(_await(ctx, name, what, r) for r in range(1, ctx.size))]
            problems = {rank: problem for rank, (problem, _) in enumerate(said) if problem}
            if not problems:
                (problem, _), cause = _attempt(lambda: conclude([value for _, value in said]))
                problems = {0: problem} if problem else {}
            verdict = first_problem(failed, problems) if problems else ""
        finally:
            ctx.control.mail.put(name, verdict)
    else:
        ctx.control.mail.put(name, mine, to=0)
        verdict = _await(ctx, name, what, 0)
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C
    if verdict:
        raise CheckpointError(verdict) from cause


def _attempt(work: Callable[[], Any]) -> tuple[tuple[str, Any], BaseException | None]:
    try:
        return ("", work()), None
    except BaseException as error:  # the others hear of Ctrl-C too: they would wait for this rank
        return (f"{type(error).__name__}: {brief(error)} (host {socket.gethostname()})", None), error


def _await(ctx: Context, name: str, what: str, rank: int) -> Any:
    """What a rank says; not in an exchange, in which the training may be waiting meanwhile."""
    start, told = time.monotonic(), ctx.timeout
    while True:
        try:
            return ctx.control.mail.take(name, rank, min(_SLICE, ctx.timeout))
        except TimeoutError:
            if ctx.control.ending:
                raise CheckpointError(f"rank {ctx.rank}: {what} was left, for the job ends") from None
        waited = time.monotonic() - start
        if waited >= told:
            ctx.control.say(f"{what} has waited for {waited:.0f} s for {ctx.control.who(rank)}, which is still writing")
            told *= 2


def brief(error: BaseException) -> str:
    """What a library said, without the middle where it is long: tensorstore says the cause last, and then at times
    the whole specification of an array, which is left out."""
    text = as_called(" ".join(message_of(error).split()))
    text = text if len(text) < 1_000 else _ANNOTATION.sub("", text)
    return text if len(text) < 1_000 else f"{text[:400]} … {text[-600:]}"
