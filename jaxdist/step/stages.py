"""What a step's `trace` and `lower` return: JAX's stages, but what they compile takes the step's own arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxdist.step.program import Program


class AheadCall(NamedTuple):
    """The call that a program is made for ahead of time."""

    program: Program  # for its arguments
    complete: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    types_of: Callable[[tuple[Any, ...], dict[str, Any]], Any]  # structure and types of a call's arguments
    types: Any  # those of this call
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]  # runs the step


class _Stage:
    def __init__(self, stage: Any, of: AheadCall):
        self._stage, self._of = stage, of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def __repr__(self) -> str:
        return repr(self._stage)


class Traced(_Stage):
    """A step that is traced, like `jax.stages.Traced`."""

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The lowered step, like `jax.stages.Traced.lower`."""
        return Lowered(self._stage.lower(*args, **kwargs), self._of)


class Lowered(_Stage):
    """A step that is lowered, like `jax.stages.Lowered`."""

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """The compiled step. A later call of the step with such arguments runs it."""
        compiled: jax.stages.Compiled = self._stage.compile(*args, **kwargs)
        self._of.program.use(compiled)
        return Compiled(compiled, self._of)


class Compiled(_Stage):
    """A step that is compiled, like `jax.stages.Compiled`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The step, for arguments of the types that it was compiled for; without the static ones, as JAX's."""
        args, kwargs = self._of.complete(args, kwargs)
        given = self._of.types_of(args, kwargs)
        if given != self._of.types:
            raise TypeError(f"compiled for arguments {self._of.types}, called with {given}: call the step itself")
        return self._of.call(args, kwargs)
