"""What a program computes: a digest that is equal in processes that traced the same, and its operations as text.

Neither depends on the order in which independent operations stand, which may follow that of a set of the user's, on the
names of functions, or on addresses. Numbers and arrays that the program holds count by their types alone
(`jaxdist.ir.fingerprint.constants` sees to them).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxdist.ir.fingerprint import aval_text, lines, parameters
from jaxdist.ir.interpreter import subjaxprs

_COMMUTATIVE = {"add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"}


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
    return Counter(lines(closed.jaxpr, lambda _: True))


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
            for i, v in enumerate(given):
                env[v] = _digest(f"{kind} {i if kind == 'input' else ''} {aval_text(v)}")

        def read(atom: Any) -> bytes:
            return _digest(f"constant  {aval_text(atom)}") if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            operands = [read(v) for v in eqn.invars]
            if name in _COMMUTATIVE:
                operands.sort()
            made = _digest(name + parameters(eqn), *operands, *(self.of(sub) for sub in subjaxprs(eqn)))
            env.update((v, _digest(f"{i} {aval_text(v)}", made)) for i, v in enumerate(eqn.outvars))
        return _digest("outputs", *(read(v) for v in jaxpr.outvars))


def _digest(text: str, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join((*parts, text.encode())), digest_size=16).digest()
