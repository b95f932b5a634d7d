"""What a program computes: a digest that is equal in processes that traced the same, and its operations as text.

Neither depends on the order in which independent operations stand, which may follow that of a set of the user's, on the
names of functions, or on addresses. Numbers and arrays that the program holds count by their types alone
(`jaxdist.ir.fingerprint.constants` sees to them).
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist.ir.fingerprint import place, type_text
from jaxdist.ir.interpreter import live, subjaxprs

_COMMUTATIVE = {"add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"}
_NO_MATTER = {"name", "debug_info"}


def dataflow(closed: ClosedJaxpr) -> str:
    """A digest of how the outputs of a program follow from its inputs.

    Args:
      closed: a step as one device runs it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> of = lambda f: dataflow(jax.make_jaxpr(f)(1.0, 2.0))
      >>> of(lambda x, y: x * y + jnp.sin(x)) == of(lambda a, b: jnp.sin(a) + a * b)
      True
      >>> of(lambda x, y: x - y) == of(lambda x, y: y - x)
      False
    """
    return _Digests().of(closed.jaxpr).hex()


def operations(closed: ClosedJaxpr) -> Counter[str]:
    """The operations of a program, those nested in its control flow too: how many of each.

    Args:
      closed: a step as one device runs it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> operations(jax.make_jaxpr(jnp.sin)(jnp.ones(3, "float32")))
      Counter({'sin float32[3]': 1})
    """
    return Counter(_lines(closed.jaxpr, ""))


def _lines(jaxpr: Jaxpr, where: str) -> Iterator[str]:
    for eqn in live(jaxpr):
        types = ", ".join(_type(v) for v in eqn.invars)
        yield f"{where}{eqn.primitive.name.removeprefix('jaxdist_')} {types}{_shown(eqn)}"
        for i, sub in enumerate(subjaxprs(eqn)):
            yield from _lines(sub, where + place(eqn, i))


def _shown(eqn: JaxprEqn) -> str:
    return "".join(f" {k}={text}" for k, v in sorted(eqn.params.items()) if k not in _NO_MATTER and (text := _plain(v)))


def _type(v: Any) -> str:
    return type_text(getattr(v.aval, "dtype", v.aval), getattr(v.aval, "shape", ()))


def _plain(value: Any) -> str:
    """A parameter whose text is the same in every process; else nothing."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    known = (str, bool, int, float, complex, np.dtype, np.generic, enum.Enum)
    return str(value) if isinstance(value, known) else ""


class _Digests:
    """Of jaxprs: of each once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Jaxpr, bytes]] = {}  # the jaxpr stays, so that its id stays its own

    def of(self, jaxpr: Jaxpr) -> bytes:
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._of(jaxpr)
        return self._known[id(jaxpr)][1]

    def _of(self, jaxpr: Jaxpr) -> bytes:
        env: dict[Any, bytes] = {}
        for kind, given in (("input", jaxpr.invars), ("constant", jaxpr.constvars)):
            env.update((v, _digest(f"{kind} {i if kind == 'input' else ''} {_type(v)}")) for i, v in enumerate(given))

        def read(atom: Any) -> bytes:
            return _digest(f"constant  {_type(atom)}") if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            operands = [read(v) for v in eqn.invars]
            if name in _COMMUTATIVE:
                operands.sort()
            made = _digest(name + _shown(eqn), *operands, *(self.of(sub) for sub in subjaxprs(eqn)))
            env.update((v, _digest(f"{i} {_type(v)}", made)) for i, v in enumerate(eqn.outvars))
        return _digest("outputs", *(read(v) for v in jaxpr.outvars))


def _digest(text: str, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join((*parts, text.encode())), digest_size=16).digest()
