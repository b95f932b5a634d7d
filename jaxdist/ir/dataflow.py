"""What a program computes and sends: a digest that is equal in processes that traced the same, and its operations.

Neither depends on the names of functions, or on addresses. Numbers and arrays that the program holds count by their
checksums.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxdist import compat
from jaxdist.ir.fingerprint import aval_text, checksum, parameters, place
from jaxdist.ir.interpreter import Found, live, subjaxprs, walk
from jaxdist.ir.primitives import MICROBATCHES, marked_by, shard_p

_SHOWN = 160  # characters of an operation


class Operation(NamedTuple):
    """An operation of a program, for this rank or another."""

    digest: bytes  # of it and of the operations that make its operands, by their places
    text: str  # for a person: where it is, its name, operands and parameters
    line: str = ""  # of the user's code; "": none. In a function of a library (`jax.numpy.roll`) it is that of the call

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"{text}, at {self.line}" if self.line else text


def dataflow(closed: ClosedJaxpr) -> str:
    """A digest of all operations of a program."""
    return hashlib.blake2b(b"".join(digest for digest, *_ in _each(closed)), digest_size=16).hexdigest()


def operations(closed: ClosedJaxpr) -> list[Operation]:
    """The operations of a program in order, those in its control flow before the one that they are in."""
    return [Operation(digest, text, one.line if one else "") for digest, text, one in _each(closed)]


def _each(
    closed: ClosedJaxpr, within: tuple[tuple[JaxprEqn, int], ...] = ()
) -> Iterator[tuple[bytes, str, Found | None]]:
    """Of each operation the digest and the text, and of what a program returns."""
    jaxpr, where = closed.jaxpr, place(within)
    numbers: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    held = {v: _held(v, x) for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}

    def operand(v: Any) -> str:
        return _held(v, v.val) if isinstance(v, Literal) else held.get(v) or aval_text(v)

    def digest(text: str, atoms: Sequence[Any]) -> bytes:
        places = [None if isinstance(v, Literal) else numbers.setdefault(v, len(numbers)) for v in atoms]
        return hashlib.blake2b(f"{text} {places} {[*map(aval_text, atoms)]}".encode(), digest_size=16).digest()

    for eqn in live(jaxpr):
        for i, body in enumerate(subjaxprs(eqn)):
            yield from _each(body, (*within, (eqn, i)))
        name = eqn.primitive.name.removeprefix("jaxdist_")
        text = f"{where}{name} {', '.join(map(operand, eqn.invars))}{parameters(eqn)}"
        yield digest(text, (*eqn.invars, *eqn.outvars)), text, Found(eqn, closed, within)
    text = f"{where}returns {', '.join(map(operand, jaxpr.outvars))}"
    yield digest(text, jaxpr.outvars), text, None


def options(closed: ClosedJaxpr) -> list[Operation]:
    """The options of jaxdist's own functions that a step calls, each once, with the line of the first such call."""
    found: dict[str, str] = {}
    for one in sorted(walk(closed), key=lambda one: len(one.within)):
        if one.eqn.primitive is shard_p:
            found.setdefault(marked_by(one.eqn.params), one.line)
        for scope in re.findall(rf"{MICROBATCHES}(\d+)", compat.name_stack(one.eqn)):
            found.setdefault(f"jaxdist.value_and_grad(microbatches={scope})", one.line)
    return [Operation(text.encode(), text, found[text]) for text in sorted(found)]


def _held(v: Any, value: Any) -> str:
    """A number, or the checksum of an array, that a program holds."""
    if np.ndim(value) == 0 and not jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        return f"{np.asarray(value)}"
    raw = value
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # the program that holds it is being traced
            raw = jax.random.key_data(value)
    if isinstance(raw, jax.Array) and not raw.is_fully_addressable:
        raise ValueError(
            f"the step closes over an array of shape {raw.shape} that is spread over several processes: pass it as "
            "an argument"
        )
    return f"{aval_text(v)} with the checksum {checksum(np.asarray(raw)):08x}"
