"""`run_log`: metrics of a training run in a file, and progress on the root's standard error."""

import json
import logging
import math
import operator
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, SupportsIndex, TextIO

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.errors import in_words
from jaxdist.runtime.context import get_context

FILE = "metrics.jsonl"
Sink = Callable[[int, dict[str, float]], object]

_AHEAD = 1000  # limit on unwritten steps: a host that is further ahead of its device waits
_EVERY = 10.0  # seconds between lines of progress
_OWN = ("step", "time", "examples_per_s", "tokens_per_s")

_log = logging.getLogger("jaxdist")


@dataclass(eq=False)
class _Entry:
    step: int
    metrics: dict[str, Any]
    ended: float = 0.0  # time at which its arrays were found ready, by `time.monotonic`


class RunLog:
    """The log of a run, from `run_log`. Ranks other than the root only check arguments."""

    def __init__(self, file: Path, is_root: bool, total: int | None, per_step: dict[str, float], sinks: Sequence[Sink]):
        self._path, self._is_root, self._total, self._per_step = file, is_root, total, per_step
        self._sinks = list(sinks)
        self._file: TextIO | None = None
        self._closed = False
        self._last = -sys.maxsize  # latest step
        self._written: _Entry | None = None
        self._shown: _Entry | None = None
        self._latest: dict[str, float] = {}  # the latest value of each metric
        self._pending: deque[_Entry] = deque()

    def __call__(self, step: SupportsIndex, **metrics: Any) -> None:
        """Log the metrics of a step."""
        if self._closed:
            raise ValueError(f"the log {self._path} is closed: log within the `with` block of run_log")
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"step {step!r} of the log: expected an integer") from None
        for name, value in metrics.items():
            if name in _OWN:
                raise ValueError(f"metric {name!r}: this name is reserved for the log. Use a different name")
            if isinstance(value, jax.core.Tracer):
                raise TypeError(f"metric {name!r} of step {step} is traced: return it from the step, and log it there")
            if not _is_number(value):
                raise TypeError(f"metric {name!r} of step {step} is {value!r:.60}; expected a number")
            if math.prod(np.shape(value)) != 1:
                raise ValueError(f"metric {name!r} of step {step} has shape {np.shape(value)}; expected a scalar")
        if step < self._last:
            raise ValueError(f"step {step} was logged after step {self._last}: steps must not go back")
        self._last = step
        if not self._is_root:
            return
        if self._file is None:
            _drop_from(self._path, step)
            self._file = self._path.open("a")
        self._pending.append(_Entry(step, metrics))
        self._write(self._file, wait=False)

    def _write(self, file: TextIO, wait: bool) -> None:
        """Write finished entries in order; if `wait`, wait for the rest and write it too."""
        while self._pending and (wait or len(self._pending) > _AHEAD or _ready(self._pending[0])):
            entry = self._pending.popleft()
            metrics = {name: _number(entry.step, name, x) for name, x in entry.metrics.items()}
            entry.ended = time.monotonic()
            rates = self._rates(self._written, entry)
            if self._written is None or entry.step > self._written.step:  # else an evaluation after the step
                self._written = entry
            ended = time.time() - time.monotonic() + entry.ended
            line = {"step": entry.step, "time": round(ended, 6), **metrics, **rates}
            # JSON has neither NaN nor infinity: write "NaN" or "Infinity" strings.
            text = json.dumps({name: x if math.isfinite(x) else json.dumps(x) for name, x in line.items()})
            file.write(f"{text}\n")
            file.flush()  # from here on a kill cannot remove it
            for sink in list(self._sinks):
                try:
                    sink(entry.step, {**metrics, **rates})
                except Exception as error:
                    self._sinks.remove(sink)
                    why = f"{getattr(sink, '__name__', sink)} failed at step {entry.step}: {in_words(error)}"
                    _log.warning("run_log: sink %s. It is dropped; %s has all metrics", why, FILE)
            self._latest |= metrics
            if self._shown is None or entry.ended - self._shown.ended >= _EVERY:
                self._show()

    def _rates(self, since: _Entry | None, now: _Entry) -> dict[str, float]:
        """Return examples and tokens per second; nothing for the first step, which compiles."""
        if since is None or now.step == since.step or now.ended <= since.ended:
            return {}
        steps, seconds = now.step - since.step, now.ended - since.ended
        return {name: float(f"{n * steps / seconds:.6g}") for name, n in self._per_step.items()}

    def _show(self) -> None:
        """Print a line of progress, with the throughput since the previous line."""
        now, before = self._written, self._shown
        if now is None or now == before:
            return
        words = [f"step {now.step}" if self._total is None else f"step {now.step}/{self._total}"]
        numbers = self._latest | self._rates(before, now)
        words += [f"{name}={x:,.0f}" if x >= 1000 else f"{name}={x:.4g}" for name, x in numbers.items()]
        if self._total is not None and before is not None:
            left = (self._total - now.step) * (now.ended - before.ended) / (now.step - before.step)
            words.append(f"{timedelta(seconds=max(0, round(left)))} left")
        print("  ".join(words), file=sys.stderr, flush=True)
        self._shown = now

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        """Write the remaining entries; after an error, only finished ones."""
        self._closed = True
        if self._file is None:
            return
        try:
            self._write(self._file, wait=error is None)
        finally:
            self._file.close()
            self._show()


def run_log(
    path: str | os.PathLike[str],
    *,
    total: int | None = None,
    examples_per_step: float | None = None,
    tokens_per_step: float | None = None,
    sinks: Sequence[Sink] = (),
) -> RunLog:
    """Log metrics to ``path/metrics.jsonl``, and progress to the root's standard error. Every rank calls it.

    A line is a JSON object with ``step``, ``time`` (when the log saw the step's end, in seconds since 1970), the
    metrics, and ``examples_per_s`` and ``tokens_per_s``; NaN and infinities are strings. A run that restarts at step k
    replaces the lines from k on; the previous file is ``metrics.jsonl.bak``.

    Args:
      path: the folder. It is created if necessary.
      total: the number of steps of the run, to estimate the remaining time.
      examples_per_step: the number of examples per step, on all devices.
      tokens_per_step: the number of tokens per step, on all devices.
      sinks: functions ``f(step, metrics)`` that the root also calls. If one raises, it is dropped with a warning.

    Returns:
      The log, for a ``with`` block. ``log(step, loss=...)`` does not wait for the device; the end of the block does.

    Raises:
      OSError: (on every rank) the root cannot write the file.
      TypeError: `sinks` is not a list of functions, or `total` no integer.

    Example:
      >>> import jaxdist, tempfile
      >>> with jaxdist.run_log(tempfile.mkdtemp(), sinks=[print]) as log:
      ...     log(0, loss=0.5)
      0 {'loss': 0.5}
    """
    ctx, file = get_context(), Path(path) / FILE
    if not isinstance(sinks, Sequence) or not all(map(callable, sinks)):
        raise TypeError(f"sinks={sinks!r}: expected a list of functions of (step, metrics)")
    if total is not None and not isinstance(total, SupportsIndex):
        raise TypeError(f"total={total!r}: expected the number of steps, or None")

    def prepare() -> Part[None]:
        if ctx.is_root:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a").close()
        return Part(None)

    on_every_rank(ctx, "run_log", prepare, raises=(OSError,))
    sizes = {"examples_per_s": examples_per_step, "tokens_per_s": tokens_per_step}
    return RunLog(file, ctx.is_root, total, {name: n for name, n in sizes.items() if n is not None}, sinks)


def _ready(entry: _Entry) -> bool:
    # is_ready of a deleted array crashes the process (jax 0.10); `_number` raises an error for it.
    return all(x.is_deleted() or x.is_ready() for x in entry.metrics.values() if hasattr(x, "is_ready"))


def _is_number(x: Any) -> bool:
    """Check the type of a metric, without waiting for its value; an array may have several numbers."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys
        return False
    dtype = getattr(x, "dtype", None) if hasattr(x, "__array__") else np.asarray(x).dtype
    kind = getattr(dtype, "kind", "f")  # of other libraries' arrays: `_number` sees
    if kind != "O":
        return kind not in "USMmc"
    try:  # Fraction, Decimal, an integer of any size
        float(x)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _number(step: int, name: str, x: Any) -> float:
    if isinstance(x, jax.Array) and x.is_deleted():
        why = "was donated to a later step: return it from the step as an aux value"
        raise RuntimeError(f"metric {name!r} of step {step} {why}, or log float({name})")
    value = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x).item()
    return value if isinstance(value, int) else float(value)


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line of the file; return None if a crash has damaged it."""
    try:
        entry = json.loads(line.decode())
    except ValueError:  # partial JSON or UTF-8, or zeros of unwritten blocks
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("step"), int) else None


def _drop_from(file: Path, step: int) -> None:
    """Remove lines from this step on, and damaged ones; keep the previous file as a backup."""
    before = file.read_bytes()
    entries = [(line, entry_of(line)) for line in before.split(b"\n") if line]
    if damaged := sum(entry is None for _, entry in entries):
        _log.warning("run_log: %d damaged line(s) of %s dropped; they are in %s.bak", damaged, file, FILE)
    after = b"".join(line + b"\n" for line, entry in entries if entry is not None and entry["step"] < step)
    if after != before:
        shutil.copyfile(file, f"{file}.bak")
        rest = file.with_suffix(".tmp")
        rest.write_bytes(after)
        rest.replace(file)  # so that a complete log exists at any moment
