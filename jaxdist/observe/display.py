"""The progress of a run on the root's standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import math
import os
import stat
import sys
import time
from typing import Any

_EVERY = 10.0  # seconds between lines where there is no terminal


class Display:
    """A bar on a terminal, lines elsewhere; with the latest value of each metric."""

    def __init__(self, total: int | None):
        self._total = total
        self._bar: Any = None
        self._from_one = False
        self._latest: dict[str, float | int] = {}
        self._printed_at = -math.inf
        self._pending = ""

    def start(self, step: int, first: int) -> None:
        self._from_one = first == 1
        if (terminal := _terminal()) is None:
            return
        # Here, not on each rank: it takes longer than the rest of run_log.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        own, width = terminal is sys.stderr, os.get_terminal_size(terminal.fileno()).columns
        console = Console(file=terminal, highlight=False, force_terminal=True, width=None if own else width or None)
        # What the script prints goes above the bar; under a launcher it is the launcher that sees to this.
        self._bar = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}", markup=False), console=console, refresh_per_second=4,
            redirect_stdout=own and sys.stdout is not None and sys.stdout.isatty(), redirect_stderr=own,
        )  # fmt: skip
        self._task = self._bar.add_task("step", total=self._total, completed=self._done(step) - 1, shown="")
        self._bar.start()

    def update(self, step: int, metrics: dict[str, float | int], rates: dict[str, float]) -> None:
        self._latest |= metrics
        shown = [f"{name}={x:.4g}" for name, x in self._latest.items()]
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
        print(self._pending, file=sys.stderr, flush=True)
        self._pending, self._printed_at = "", time.monotonic()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            if isinstance(file := self._bar.console.file, _Launchers):
                file.close()
        elif self._pending:
            self._print()


class _Launchers(io.TextIOBase):
    """The terminal of `jaxdist run`, through which this process's own lines come. Nobody waits for who reads there."""

    def __init__(self, path: str):
        self._number = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._number)

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # it is stopped, or gone
            os.write(self._number, text.encode())
        return len(text)


def _terminal() -> Any:
    """Where a bar can be drawn; None: nowhere."""
    if sys.stderr is None or os.environ.get("TERM") == "dumb":
        return None
    if sys.stderr.isatty():
        return sys.stderr
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):  # else the user wants it in a file
            found = _Launchers(os.environ.get("JAXDIST_TERMINAL", ""))
            return found if found.isatty() else None
    except OSError:
        pass
    return None
