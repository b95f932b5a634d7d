"""`send` and `recv`, through the control channel, without other ranks."""

import queue
import time
from collections import Counter
from typing import Any

import jax
import numpy as np

from jaxdist import compat
from jaxdist.agreement.description import Description
from jaxdist.collectives.arguments import bad, describe, flat, integer
from jaxdist.errors import ControlError
from jaxdist.runtime.context import Context

_LOOK = 0.5  # seconds between checks of a receiver whether the sender has left
Message = tuple[Description, list[np.ndarray]]


class Messages:
    """The messages between the processes of one context."""

    def __init__(self, ctx: Context):
        self._ctx = ctx
        self._counts: Counter[tuple[str, int]] = Counter()  # of messages so far, by direction and the other rank

    def send(self, tree: Any, dst: int) -> None:
        """Send without waiting for the receiver."""
        to = self._rank("send", "dst", dst)
        _, names, arrays = flat("send", tree)
        message: Message = describe("send", names, arrays), [np.array(x) for x in arrays]
        self._ctx.control.put(self._name("send", to), message, to)

    @compat.under_no_mesh
    def recv(self, like: Any, src: int) -> Any:
        """Return the next message from the source, which must have these types."""
        rank, source = self._ctx.rank, self._rank("recv", "src", src)
        array = lambda x: np.broadcast_to(np.empty((), x.dtype), x.shape) if isinstance(x, jax.ShapeDtypeStruct) else x
        structure, names, likes = flat("recv", like, array)
        mine = describe("recv", names, likes)
        theirs, arrays = self._get(source, mine.values())
        if [kind for _, kind in theirs.entries] != [kind for _, kind in mine.entries]:  # names may differ
            raise ValueError(
                f"rank {rank}: recv(like, src={source}) expects {mine.values()}, and rank {source} sent "
                f"{theirs.values()}: pass a `like` of the same shapes and dtypes in the same order"
            )
        return jax.tree.unflatten(structure, jax.device_put(arrays))

    def _get(self, source: int, what: str) -> Message:
        ctx, is_own, end = self._ctx, source == self._ctx.rank, time.monotonic() + self._ctx.timeout
        name = self._name("recv", source)
        self._counts["recv", source] -= 1  # until the message is here: a signal may end the wait
        while True:
            left = source in ctx.control.left  # known before the look that finds nothing
            try:
                message = ctx.control.take(name, source, 0.0 if is_own else _LOOK)
                self._counts["recv", source] += 1
                return message
            except queue.Empty:
                if not is_own and not left and time.monotonic() < max(end, ctx.control.held_until):
                    continue
            if is_own:
                raise ValueError(f"rank {source}: recv from itself, but nothing was sent: call send first")
            why = "has left, and sent nothing" if left else f"sent nothing within {ctx.timeout:g} s"
            raise ControlError(
                f"rank {ctx.rank}: recv of {what} from rank {source}: {ctx.control.who(source)} {why}. Each recv needs "
                "a send on the other rank"
            )

    def _name(self, kind: str, other: int) -> str:
        self._counts[kind, other] += 1
        self._ctx.control.used = True
        return f"message {self._counts[kind, other]}"

    def _rank(self, kind: str, name: str, value: Any) -> int:
        rank, size = integer(kind, name, value), self._ctx.size
        if not 0 <= rank < size:
            raise bad(kind, f"{name}={rank} is not a rank; valid: 0..{size - 1}")
        return rank
