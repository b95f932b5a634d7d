"""`run_log`: what a training run says while it runs: progress and throughput, and its metrics in a file."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.errors import in_words
from jaxdist.observe.display import Display
from jaxdist.observe.sinking import Sinking
from jaxdist.runtime.context import Context, get_context
from jaxdist.sinks import Sink

FILE = "metrics.jsonl"
_MOST = 1000  # steps held back: a host that runs ahead of its device by more waits
_WINDOW = 5.0  # seconds over which the throughput that is shown is taken
_OWN = ("step", "time", "examples_per_s", "tokens_per_s")


@dataclass(eq=False)
class _Entry:
    step: int
    metrics: dict[str, Any]
    ended: float | None = None  # when its arrays were computed; of `time.monotonic`


def _note_ends(entries: queue.SimpleQueue[_Entry | None]) -> None:
    """When each step ends, which a host that runs ahead of its device learns too late for a throughput."""
    while (entry := entries.get()) is not None:
        x = None
        for x in entry.metrics.values():
            with contextlib.suppress(RuntimeError):  # donated, or its computation failed: `_number` says so
                if isinstance(x, jax.Array):
                    x.block_until_ready()
        entry.ended = time.monotonic()
        del entry, x  # else they would stay until the next step ends


class RunLog:
    """The log of a run; made by `run_log`. On other ranks than the root it does nothing but check its arguments.

    A metric that its device has not computed yet is held back, with those after it, and written by a later call:
    nothing waits for the device before the end of the ``with`` block.
    """

    def __init__(
        self,
        path: Path,
        ctx: Context,
        total: int | None,
        per_step: dict[str, float],
        sinks: Sequence[Sinking] = (),
    ):
        self._path, self._is_root, self._size = path, ctx.is_root, ctx.num_devices
        self._total, self._per_step, self._sinks = total, per_step, sinks
        self._last: int | None = None  # step given
        self._pending: deque[_Entry] = deque()
        self._running: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._noting: threading.Thread | None = None
        self._ended: deque[tuple[float, int]] = deque()  # when a step was seen to have ended, and which
        self._file: TextIO | None = None
        self._show = Display(total)

    def __call__(self, step: int, **metrics: Any) -> None:
        """Log the metrics of a step."""
        step = int(step)
        for name, value in metrics.items():
            if name in _OWN:
                raise ValueError(f"metric {name!r}: the log itself has an entry of this name; choose another")
            if math.prod(np.shape(value)) != 1:
                raise ValueError(f"metric {name!r} of step {step} has shape {np.shape(value)}; expected a scalar")
        if self._last is not None and step < self._last:
            raise ValueError(f"step {step} was logged after step {self._last}: the steps of a log go upwards")
        first, self._last = self._last is None, step
        if not self._is_root:
            return
        if first:
            self._open(step)
        self._pending.append(entry := _Entry(step, metrics))
        self._running.put(entry)
        self._write(wait=False)

    def _open(self, step: int) -> None:
        if drop_from(self._path / FILE, step):
            for sink in self._sinks:
                sink.drop(step)
        self._file = (self._path / FILE).open("a", encoding="utf-8")
        self._show.start(step, next((line["step"] for line, _ in _lines(self._path / FILE)), step))
        # A daemon: what a failed job's device still computes may never come.
        self._noting = threading.Thread(target=_note_ends, args=[self._running], name="jaxdist-log", daemon=True)
        self._noting.start()

    def _write(self, wait: bool) -> None:
        """Writes what has been computed, in order; the rest too if it may wait."""
        written = False
        while self._pending and (wait or len(self._pending) > _MOST or _ready(self._pending[0])):
            entry = self._pending.popleft()
            numbers = {name: _number(entry.step, name, x) for name, x in entry.metrics.items()}
            self._write_one(entry.step, numbers, entry.ended or time.monotonic())
            written = True
        if written and self._file is not None:
            self._file.flush()

    def _write_one(self, step: int, metrics: dict[str, float | int], ended: float) -> None:
        now = time.time() - (time.monotonic() - ended)
        rates, lately = self._throughput(step, ended)
        assert self._file is not None
        line = {"step": step, "time": round(now, 6), **metrics, **rates}
        self._file.write(json.dumps({name: _in_json(x) for name, x in line.items()}) + "\n")
        for sink in self._sinks:
            sink.write(step, now, {**metrics, **rates})
        self._show.update(step, metrics, lately)

    def _throughput(self, step: int, now: float) -> tuple[dict[str, float], dict[str, float]]:
        """Examples and tokens per second since the step before, for the file, and over the last seconds, for the eye.

        Not for the first step, which is compiled first.
        """
        before = self._ended[-1] if self._ended else (now, step)
        if not self._ended or step > before[1]:
            self._ended.append((now, step))
        while len(self._ended) > 2 and now - self._ended[1][0] > _WINDOW:
            self._ended.popleft()
        return self._rates(before, step, now), self._rates(self._ended[0], step, now)

    def _rates(self, since: tuple[float, int], step: int, now: float) -> dict[str, float]:
        seconds, steps = now - since[0], step - since[1]
        if not (steps and seconds):
            return {}
        return {f"{name}_per_s": float(f"{n * steps / seconds:.6g}") for name, n in self._per_step.items()}

    def _close(self, failed: bool) -> None:
        self._running.put(None)
        try:
            self._write(wait=not failed)  # what a failed job's device still computes may never come
            if self._noting and not failed:  # inside JAX at the interpreter's end it would abort the process
                self._noting.join()
        except BaseException:
            failed = True
            raise
        finally:
            if self._file is not None:
                self._file.close()
                self._show.stop()
            for sink in self._sinks:
                sink.close(failed)


@contextmanager
def run_log(
    path: str | os.PathLike[str],
    *,
    total: int | None = None,
    examples_per_step: float | None = None,
    tokens_per_step: float | None = None,
    sinks: Sequence[Sink] = (),
) -> Iterator[RunLog]:
    """Log a training run: progress on the root's standard error, metrics into ``path/metrics.jsonl``.

    Every rank calls it; only the root writes. On a terminal the progress is a bar, else a line about every ten seconds.
    Each line of the file is a JSON object with ``step``, ``time`` (seconds since 1970, when the step ended), the
    metrics, and ``examples_per_s`` and ``tokens_per_s`` since the line before of another step. (The progress shows them
    over the last five seconds.) JSON has no NaN: it is written as the string ``"NaN"``, infinities as ``"Infinity"``
    and ``"-Infinity"``; Python's ``float`` takes these.

    A run that starts again at step k replaces the lines of step k and later ones, so no step is there twice; the file
    as it was is kept beside it as ``metrics.jsonl.bak``.

    Args:
      path: a folder; made if it is not there.
      total: steps of the whole run, for the bar and the time left.
      examples_per_step: of all devices together.
      tokens_per_step: of all devices together.
      sinks: where the metrics go as well: `jaxdist.sinks.TensorBoard`, `jaxdist.sinks.Wandb`, `jaxdist.sinks.MLflow`,
        or any object with the methods of `jaxdist.sinks.Sink`. Each works in a thread of its own. One that fails, or
        is 100000 steps behind, is left out from then on, with a warning; the end of the ``with`` block waits a minute
        for it at most.

    Returns:
      A context manager that gives the log, ``log(step, loss=...)``.

    Raises:
      OSError: the root can't write there (on every rank).
      TypeError: `sinks` is no list of sinks.
      ImportError: what a sink needs is missing on the root (on every rank).
      RuntimeError: a sink can't be opened (on every rank).

    Example:
      >>> import jaxdist, tempfile
      >>> folder, sizes = tempfile.TemporaryDirectory(), {"examples_per_step": 64}
      >>> with folder as run, jaxdist.run_log(run, total=2, **sizes) as log:
      ...     for step in range(2):
      ...         log(step, loss=1.0 / (step + 1))
      ...     [line["loss"] for line in jaxdist.read_metrics(run)]
      [1.0, 0.5]
    """
    ctx, folder = get_context(), Path(path)
    if not isinstance(sinks, Sequence) or not all(isinstance(x, Sink) and not isinstance(x, type) for x in sinks):
        raise TypeError(f"sinks={sinks!r}: expected a list of sinks, such as [jaxdist.sinks.TensorBoard()]")

    def prepare() -> Part[list[Sinking]]:
        return Part(_make_ready(folder, sinks) if ctx.is_root else [])

    errors = (OSError, ImportError, RuntimeError)
    working, _ = on_every_rank(ctx, "run_log", prepare, raises=errors, patient=bool(sinks))
    per_step = {"examples": examples_per_step, "tokens": tokens_per_step}
    given = {name: n for name, n in per_step.items() if n is not None}
    log = RunLog(folder, ctx, total, given, working)
    try:
        yield log
    except BaseException:
        log._close(failed=True)
        raise
    log._close(failed=False)


def _make_ready(folder: Path, sinks: Sequence[Sink]) -> list[Sinking]:
    """The root has to be able to write there; and the sinks, open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / FILE).open("a"):
            pass
    except OSError as error:
        why = f"metrics can't be written there: {error.strerror}"
        raise type(error)(error.errno, why, str(folder)) from error
    opened: list[Sinking] = []
    for sink in sinks:
        try:
            sink.open(folder)
        except Exception as error:
            for one in opened:
                one.close(failed=True)
            if isinstance(error, ImportError):
                raise
            raise RuntimeError(f"{type(sink).__name__} can't be opened: {in_words(error)}") from error
        opened.append(Sinking(sink))
    return opened


def _ready(entry: _Entry) -> bool:
    # is_ready of a deleted array crashes the process (jax 0.10); `_number` says what is wrong with one.
    return all(x.is_deleted() or x.is_ready() for x in entry.metrics.values() if hasattr(x, "is_ready"))


def _number(step: int, name: str, x: Any) -> float | int:
    if isinstance(x, jax.Array):
        try:
            x = x.addressable_data(0)
        except RuntimeError:
            raise RuntimeError(
                f"metric {name!r} of step {step} was donated to a later step before it was computed, so it can't be "
                f"logged: return it from the step as an aux value, or log float({name})"
            ) from None
    value = np.asarray(x).item()
    return value if isinstance(value, int) else float(value)


def _in_json(x: float | int) -> float | int | str:
    if math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


# --- the file


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, float]]:
    """The lines of a run's metrics, as numbers.

    Args:
      path: the folder of the run, or the file in it.

    Returns:
      A dict for each line, in order. A last line that was cut off, of a job that was killed, is left out.

    Raises:
      FileNotFoundError: there are no metrics.
      ValueError: a line is something else; says which.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as run:
      ...     _ = Path(run, "metrics.jsonl").write_text('{"step": 0, "loss": "NaN"}\\n{"step": 1, "lo')
      ...     read_metrics(run)
      [{'step': 0, 'loss': nan}]
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"{path}: there is no {FILE} of jaxdist.run_log")
    return [{name: _back(x) for name, x in line.items()} for line, _ in _lines(file)]


def _back(x: Any) -> Any:
    return float(x) if isinstance(x, str) else x


def _lines(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each whole line of the file, and its text."""
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not text.endswith("\n"):
            return
        try:
            line = json.loads(text)
            int(line["step"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{file}, line {number} is not a line of jaxdist.run_log: {text.strip()[:60]!r}") from None
        yield line, text


def drop_from(file: Path, step: int) -> bool:
    """Removes the lines of this step and later ones, and a last one that was cut off; keeps the file as it was.

    Returns whether there were any.
    """
    if not file.exists():
        return False
    kept = "".join(text for line, text in _lines(file) if line["step"] < step)
    if len(kept.encode()) == file.stat().st_size:
        return False
    rest = file.with_suffix(".tmp")
    rest.write_text(kept, encoding="utf-8")
    backup = Path(f"{file}.bak")
    backup.unlink(missing_ok=True)
    backup.hardlink_to(file)  # so that at any moment the whole log is there
    rest.replace(file)
    return True
