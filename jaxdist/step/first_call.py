"""The first call of a step; with `JAXDIST_LOG=start` the root says how long it compiles, on standard error.

`jaxdist run` asks for it where the variable is not set. Of a job's first step there are two lines; of another one there
is a line if it kept the user waiting.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import monitoring

R = TypeVar("R")
_COMPILED = "/jax/core/compile/backend_compile_duration"
_WAITED = 1.0  # seconds from which a later step's compilation is worth a line
_count = itertools.count()


def told(step: str, call: Callable[[], R]) -> R:
    """Make the first call of a step, wait for its result, and say how long both took."""
    name, is_first = step.rpartition("<locals>.")[2], next(_count) == 0
    if is_first:
        _say(f"compiling {name} ...")
    begin = compiled = time.monotonic()

    def on_event(event: str, *_: Any, **__: Any) -> None:
        nonlocal compiled
        if event == _COMPILED:
            compiled = time.monotonic()

    monitoring.register_event_duration_secs_listener(on_event)
    try:
        result = call()
    finally:
        monitoring.unregister_event_duration_listener(on_event)
    with contextlib.suppress(Exception):  # whoever reads the result hears of it
        jax.block_until_ready(result)
    end = time.monotonic()
    if is_first or compiled - begin >= _WAITED:
        _say(f"{name}: compiled in {compiled - begin:.1f} s, first call in {end - compiled:.2g} s")
    return result


def without_collecting(call: Callable[[], R]) -> R:
    """Make a call without looking for garbage in cycles: to trace makes many objects that stay.

    It saves a tenth of the time of a first call; what has become garbage is collected after.
    """
    if not gc.isenabled():
        return call()
    gc.disable()
    try:
        return call()
    finally:
        gc.enable()


def _say(text: str) -> None:
    print(f"jaxdist: {text}", file=sys.stderr, flush=True)
