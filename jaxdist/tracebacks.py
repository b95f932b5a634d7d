"""Tracebacks without the frames of our code and of JAX's, so that what went wrong in a step shows the user's lines."""

import functools
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax

A = ParamSpec("A")
R = TypeVar("R")

_HIDDEN = tuple(f"{Path(module).resolve().parent}/" for module in (jax.__file__, __file__))


def api_boundary(function: Callable[A, R]) -> Callable[A, R]:
    """A function that errors leave without those frames; ``JAX_TRACEBACK_FILTERING=off`` keeps them."""

    @functools.wraps(function)
    def call(*args: A.args, **kwargs: A.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            config: Any = jax.config
            if config.jax_traceback_filtering != "off":
                error.__traceback__ = _shortened(error.__traceback__)
            raise

    return call


def _shortened(full: types.TracebackType | None) -> types.TracebackType | None:
    short = None
    for frame, line in reversed(list(traceback.walk_tb(full))):
        if not frame.f_code.co_filename.startswith(_HIDDEN):
            short = types.TracebackType(short, frame, frame.f_lasti, line)
    return short
