"""A step that is decorated in a class body, as a method of one of the objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Method(Generic[P, R]):
    """A step as a method of one object, which is its first argument."""

    def __init__(self, step: Callable[..., R], instance: Any):
        self.step, self.instance = step, instance
        functools.update_wrapper(self, step)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.step(self.instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self.step, name), self.instance)
