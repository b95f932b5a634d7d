"""Host callbacks that raise: the devices finish the step, then its call raises."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxdist import compat
from jaxdist.control import failfast
from jaxdist.ir.interpreter import Interpreter, contains
from jaxdist.runtime.context import get_context


class Callbacks:
    """The host callbacks of a program. XLA stops the device whose callback raises, and the others would wait for it."""

    def __init__(self) -> None:
        self.found = False
        self._raised: list[BaseException] = []

    def guarded(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return the program of a device with callbacks that give zeros where they raise."""
        self.found = contains(closed.jaxpr, compat.CALLBACKS)
        return Interpreter(dict.fromkeys(compat.CALLBACKS, self._guard)).rewrite(closed) if self.found else closed

    def check(self, outs: Any) -> None:
        """Wait for the results of a program with callbacks, and raise what these have raised."""
        if not self.found or get_context().size > 1:  # there, what raises has ended the job
            return
        jax.block_until_ready(outs)
        jax.effects_barrier()
        if self._raised:
            error = self._raised[0]
            self._raised.clear()
            told = "".join(traceback.format_exception(error))
            raise jax.errors.JaxRuntimeError(f"a callback of the step raised an exception:\n{told}") from error

    def _guard(self, _: Interpreter, eqn: Any, *args: Any) -> Any:
        call = functools.partial(self._call, eqn.params["callback"], [v.aval for v in eqn.outvars])
        return compat.bind(eqn, {**eqn.params, "callback": call}, args)

    def _call(self, callback: Callable[..., Any], types: Sequence[Any], *args: Any) -> Sequence[Any]:
        try:
            found = callback(*args)
            outs = [np.asarray(x) for x in found] if types else []
            for x, like in zip(outs, types, strict=True):
                if (x.shape, x.dtype) != (like.shape, like.dtype):
                    raise TypeError(f"a callback returned {x.dtype}{list(x.shape)} for {like.str_short()}")
            return outs
        except BaseException as error:
            context = get_context()
            if context.size > 1:  # the other ranks must not go on with zeros
                failfast.end(context.control, error)
            self._raised.append(error)
            return [np.zeros(like.shape, like.dtype) for like in types]
