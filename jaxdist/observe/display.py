"""The progress of a run on the root's standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_EVERY = 10.0  # seconds between lines where there is no terminal


class Display:
    """A bar on a terminal, lines elsewhere."""

    def __init__(self, total: int | None):
        self._total = total
        self._console = Console(stderr=True, highlight=False)
        self._bar: Progress | None = None
        self._from_one = False
        self._printed_at = -math.inf
        self._pending = ""

    def start(self, step: int, first: int) -> None:
        self._from_one = first == 1
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[shown]}"), console=self._console, refresh_per_second=4,
            )  # fmt: skip
            self._task = self._bar.add_task("step", total=self._total, completed=self._done(step) - 1, shown="")
            self._bar.start()

    def update(self, step: int, metrics: dict[str, float | int], rates: dict[str, float]) -> None:
        shown = [f"{name}={x:.4g}" for name, x in metrics.items()]
        shown += [f"{rate:,.0f} {name.removesuffix('_per_s')}/s" for name, rate in rates.items()]
        done = self._done(step)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, shown="  ".join(shown))
            return
        of = "" if self._total is None else f"/{self._total}"
        self._pending = "  ".join([f"step {done}{of}", *shown])
        if time.monotonic() - self._printed_at > _EVERY:
            self._print()

    def _done(self, step: int) -> int:
        """How many steps there have been; who logs a step that is the total counts from 1, too."""
        self._from_one = self._from_one or step == self._total
        return step + (not self._from_one)

    def _print(self) -> None:
        self._console.print(self._pending, markup=False, soft_wrap=True)
        self._pending, self._printed_at = "", time.monotonic()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._pending:
            self._print()
