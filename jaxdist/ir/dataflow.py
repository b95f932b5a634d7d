"""What a program computes and sends: a digest that is equal in processes that traced the same, and its operations.

Neither depends on the order in which independent operations stand, which may follow that of a set of the user's, on the
names of functions, or on addresses. Collectives count in their order, which is that of the messages, with what they
send; numbers and arrays that the program holds count by their checksums.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxdist import compat
from jaxdist.ir.fingerprint import aval_text, checksum, moves, parameters, place
from jaxdist.ir.interpreter import live, subjaxprs, walk
from jaxdist.ir.primitives import MICROBATCHES, marked_by, shard_p

_SHOWN = 160  # characters of an operation
_COMMUTATIVE = {"add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne"}


class Operation(NamedTuple):
    """An operation of a program, for this rank or another."""

    digest: bytes  # of what it computes from the inputs of the jaxpr that it is in
    text: str  # for a person: where it is, its name, operands and parameters
    line: str = ""  # of the user's code; "": none. In a function of a library (`jax.numpy.roll`) it is that of the call
    sent: bool = False  # whether it is a collective

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"{text}, at {self.line}" if self.line else text


def dataflow(closed: ClosedJaxpr) -> str:
    """A digest of how the outputs of a program, and what it sends, follow from its inputs."""
    return _Digests().of(closed).total.hex()


def operations(closed: ClosedJaxpr) -> list[Operation]:
    """The operations of a program in order, those in its control flow before the one that they are in."""
    digests, found = _Digests(), list[Operation]()
    for one in walk(closed):
        operands = ", ".join(_operand(v, one.program) for v in one.eqn.invars)
        name = one.eqn.primitive.name.removeprefix("jaxdist_")
        text = f"{place(one.within)}{name} {operands}{parameters(one.eqn)}"
        found.append(Operation(digests.of(one.program).made[id(one.eqn)], text, one.line, moves(one.eqn)))
    return found


def options(closed: ClosedJaxpr) -> list[Operation]:
    """The options of jaxdist's own functions that a step calls, each once, with the line of the first such call."""
    found: dict[str, str] = {}
    for one in sorted(walk(closed), key=lambda one: len(one.within)):
        if one.eqn.primitive is shard_p:
            found.setdefault(marked_by(one.eqn.params), one.line)
        for scope in re.findall(rf"{MICROBATCHES}(\d+)", compat.name_stack(one.eqn)):
            found.setdefault(f"jaxdist.value_and_grad(microbatches={scope})", one.line)
    return [Operation(text.encode(), text, found[text]) for text in sorted(found)]


class _Digest(NamedTuple):
    """The digests of a jaxpr, in all and of each operation; and whether something in it is sent."""

    total: bytes
    made: dict[int, bytes]  # by the id of an operation
    sends: bool


class _Digests:
    """Of jaxprs: of each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[ClosedJaxpr, _Digest]] = {}  # kept, so that an id stays its own
        self._values: dict[int, tuple[Any, bytes]] = {}

    def of(self, closed: ClosedJaxpr) -> _Digest:
        key = (id(closed.jaxpr), *map(id, closed.consts))
        if key not in self._known:
            self._known[key] = closed, self._of(closed)
        return self._known[key][1]

    def _of(self, closed: ClosedJaxpr) -> _Digest:
        jaxpr = closed.jaxpr
        env: dict[Any, bytes] = {v: _digest(f"input {i} {aval_text(v)}") for i, v in enumerate(jaxpr.invars)}
        env.update((v, self._value(x)) for v, x in zip(jaxpr.constvars, closed.consts, strict=True))

        def read(atom: Any) -> bytes:
            return self._value(atom.val) if isinstance(atom, Literal) else env[atom]

        made: dict[int, bytes] = {}
        sent: list[bytes] = []
        for eqn in live(jaxpr):
            name = eqn.primitive.name
            operands = [read(v) for v in eqn.invars]
            if name in _COMMUTATIVE:
                operands.sort()
            bodies = [self.of(body) for body in subjaxprs(eqn)]
            digest = _digest(name + parameters(eqn), *operands, *(body.total for body in bodies))
            env.update((v, _digest(f"{i} {aval_text(v)}", digest)) for i, v in enumerate(eqn.outvars))
            made[id(eqn)] = digest
            if moves(eqn) or any(body.sends for body in bodies):
                sent.append(digest)
        total = _digest("outputs", *(read(v) for v in jaxpr.outvars), _digest("sent", *sent))
        return _Digest(total, made, bool(sent))

    def _value(self, value: Any) -> bytes:
        if id(value) not in self._values:
            self._values[id(value)] = value, _digest(f"constant {held(value):08x}")
        return self._values[id(value)][1]


def held(value: Any) -> int:
    """A checksum of a number or an array that a program holds."""
    raw = value
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # the program that holds it is being traced
            raw = jax.random.key_data(value)
    if isinstance(raw, jax.Array) and not raw.is_fully_addressable:
        raise ValueError(
            f"the step closes over an array of shape {raw.shape} that is spread over several processes: pass it as "
            "an argument"
        )
    return checksum(np.asarray(raw))


def _operand(v: Any, program: ClosedJaxpr) -> str:
    if isinstance(v, Literal):
        value = v.val
    elif v in program.jaxpr.constvars:
        value = program.consts[program.jaxpr.constvars.index(v)]
    else:
        return aval_text(v)
    if np.ndim(value) == 0 and not jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        return f"{np.asarray(value)}"
    return f"{aval_text(v)} with the checksum {held(value):08x}"


def _digest(text: str, *parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join((*parts, text.encode())), digest_size=16).digest()
