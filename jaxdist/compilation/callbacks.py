"""Host callbacks that raise: the devices finish the step, then its call raises."""

import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxdist import compat
from jaxdist.control import failfast
from jaxdist.ir.interpreter import Interpreter, contains
from jaxdist.runtime.context import get_context


class OutType(Protocol):
    """The type of a value that a callback returns."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def str_short(self) -> str: ...


class Callbacks:
    """The host callbacks of a program. XLA stops the device whose callback raises, and the others would wait for it."""

    def __init__(self) -> None:
        self.exist = False
        self._raised: list[BaseException] = []

    def guarded(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Return the program of a device with callbacks that give zeros where they raise."""
        self.exist = contains(closed.jaxpr, compat.CALLBACKS)
        return Interpreter(dict.fromkeys(compat.CALLBACKS, self._guard)).rewrite(closed) if self.exist else closed

    def check(self, outs: Sequence[jax.Array]) -> None:
        """Wait for the results of a program with callbacks, and raise what these have raised."""
        if not self.exist or get_context().size > 1:  # there, what raises has ended the job
            return
        jax.block_until_ready(outs)
        # A callback for its effect alone has no result to wait for.
        jax.effects_barrier()
        if self._raised:
            error = self._raised[0]
            self._raised.clear()
            text = "".join(traceback.format_exception(error))
            raise jax.errors.JaxRuntimeError(f"a callback of the step raised an exception:\n{text}") from error

    def _guard(self, _: Interpreter, eqn: JaxprEqn, *args: jax.Array) -> Sequence[jax.Array]:
        types: Any = [v.aval for v in eqn.outvars]  # of arrays, which JAX's type for these does not say
        call = functools.partial(self._call, eqn.params["callback"], types)
        return compat.bind(eqn, {**eqn.params, "callback": call}, args)

    def _call(self, callback: Callable[..., Any], types: Sequence[OutType], *args: jax.Array) -> Sequence[np.ndarray]:
        try:
            result = callback(*args)
            outs = [np.asarray(x) for x in result] if types else []
            for x, expected in zip(outs, types, strict=True):
                if (x.shape, x.dtype) != (expected.shape, expected.dtype):
                    raise TypeError(f"a callback returned {x.dtype}{list(x.shape)} for {expected.str_short()}")
            return outs
        except BaseException as error:
            context = get_context()
            if context.size > 1:  # the other ranks must not continue with zeros
                failfast.end(context.control, error)
            self._raised.append(error)
            return [np.zeros(expected.shape, expected.dtype) for expected in types]
