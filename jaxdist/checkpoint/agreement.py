"""Whether all ranks could do their part."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from jaxdist import compat
from jaxdist.context import Context
from jaxdist.errors import CheckpointError


class Agreement:
    """Do something on each rank, and learn on every rank whether all could; also from a thread beside the training."""

    def __init__(self, ctx: Context, name: str):
        self.ctx, self.name, self.count = ctx, name, 0

    def __call__(self, work: Callable[[], None], failed: str, undo: Path) -> None:
        error = ""
        try:
            work()
        except Exception as e:
            error = f"rank {self.ctx.rank} ({socket.gethostname()}): {type(e).__name__}: {brief(e)}"
        errors = [e for e in self._all(error) if e]
        if errors:
            if self.ctx.is_root:
                shutil.rmtree(undo, ignore_errors=True)
            raise CheckpointError(f"{failed}: {'; '.join(errors[:4])}")

    def _all(self, mine: str) -> list[str]:
        # Not by the control channel, in which the training may be waiting meanwhile.
        if self.ctx.size == 1:
            return [mine]
        store = compat.key_value_store()
        key = f"jaxdist/save/{self.name}/{self.count}"
        self.count += 1
        store.key_value_set(f"{key}/{self.ctx.rank}", mine or "-")
        said = []
        for rank in range(self.ctx.size):
            try:
                said.append(store.blocking_key_value_get(f"{key}/{rank}", int(self.ctx.timeout * 1000)))
            except Exception as e:
                raise CheckpointError(
                    f"rank {self.ctx.rank}: rank {rank} has not written its part {self.ctx.timeout:g} s after this one"
                ) from e
        return ["" if s == "-" else s for s in said]


def await_pending(ctx: Context) -> None:
    """Wait for the checkpoint that is written in the background, if any, and raise what went wrong with it."""
    if ctx.saving is not None:
        pending, ctx.saving = ctx.saving, None
        pending.wait()


def brief(error: BaseException) -> str:
    """The first lines of what a library said."""
    text = " ".join(str(error).split())
    return text if len(text) < 500 else f"{text[:500]}…"


def raise_first(ctx: Context, problems: list[Exception | None]) -> None:
    """The same error on every rank: that of the first rank which has one."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise type(problem)(f"rank {rank}: {problem}" if ctx.size > 1 else str(problem))
