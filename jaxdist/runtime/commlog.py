"""`JAXDIST_LOG=comm`: what travels between devices, on the root's standard error."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxdist.ir.wire import Transfer, transfers
from jaxdist.machine import Machine, ring_factor
from jaxdist.mesh import Axis
from jaxdist.text import text_of

WORDS = ("placements", "comm")  # what the environment may ask for
_EAGER = {"allreduce": "all-reduce", "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all"}


def asked(what: str = "comm") -> bool:
    """Whether the environment asks for it."""
    value = os.environ.get("JAXDIST_LOG", "")
    words = {word.strip() for word in value.split(",")} - {""}
    if unknown := words - set(WORDS):
        raise ValueError(f"JAXDIST_LOG={value!r}: there is no {sorted(unknown)[0]!r}; valid: comm, placements")
    return what in words


class StepLog:
    """Says what a decorated step sends: a table when it is compiled, a line a call."""

    def __init__(self, step: str, machine: Machine):
        self._step, self._machine = step, machine
        self._traced: Counter[Transfer] | None = None
        self._known: dict[Any, str] = {}  # by program and types of its arguments
        self._before: float | None = None

    def traced(self, program: ClosedJaxpr, axes: Sequence[Axis]) -> None:
        """A program is about to be compiled for a mesh of these axes."""
        self._traced = transfers(program, axes, self._machine)
        devices = math.prod(axis.size for axis in axes)
        say(f"step {self._step!r} on {devices} devices:\n{table(self._traced)}")

    def called(self, call: int, program: Any, leaves: Sequence[Any]) -> None:
        """A call was dispatched; whether it is computed is not asked."""
        key = (id(program), *((np.shape(x), getattr(x, "dtype", None)) for x in leaves))
        if self._traced is not None:
            self._known[key], self._traced = _total(self._traced), None
        before, self._before = self._before, time.monotonic()
        since = "" if before is None else f", {(self._before - before) * 1e3:.1f} ms after the one before"
        say(f"step {self._step!r}, call {call}: {self._known.get(key, '')}{since}")


def eager(number: int, description: Any, kind: str, nbytes: int, ranks: int) -> None:
    """A collective between processes."""
    sent = f", {nbytes * (ranks - 1)} sent" if kind == "allgather" else ""
    if kind in _EAGER:
        sent = f", {round(nbytes * ring_factor(_EAGER[kind], ranks))} sent"
    say(f"eager collective {number}: {description}: {nbytes} bytes{sent}")


def table(found: Counter[Transfer]) -> str:
    """A step's collectives for a person, with the totals."""
    if not found:
        return "nothing travels"
    from rich.table import Table

    rows = Table(box=None, pad_edge=False)
    rows.add_column("collective")
    for name in ("count", "dtype", "elements", "bytes", "leaves", "devices", "times a step", "sent a step"):
        rows.add_column(name, justify="right")
    several = any(one.axes for one in found)
    for name in ("axes", "where") if several else ("where",):
        rows.add_column(name)
    for one, count in found.items():
        cells = (count, one.dtype, one.elements, one.bytes, one.leaves, one.devices, one.times, count * one.sent)
        rows.add_row(one.kind, *map(str, cells), *([one.axes] if several else []), one.place)
    total = f"total: {_total(found)} by each device a step, if in a ring{_doubts(found)}"
    return f"{text_of(rows, width=160)}\n{total}"


def say(text: str, what: str = "comm") -> None:
    """On standard error, each line marked."""
    print("\n".join(f"[jaxdist {what}] {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _total(found: Counter[Transfer]) -> str:
    number = sum(count * one.times for one, count in found.items())
    return f"{number} collectives, {sum(count * one.sent for one, count in found.items())} bytes sent"


def _doubts(found: Counter[Transfer]) -> str:
    places = " ".join(one.place for one in found)
    loop = "; a while loop counts as one turn" * ("while loop" in places)
    return loop + "; each branch of a cond counts" * ("of a cond" in places)
