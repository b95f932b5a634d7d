"""Operations as text: collectives, types, parameters."""

import enum
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxdist import compat
from jaxdist.ir.interpreter import Within, axes_of, live, subjaxprs

_SILENT = {"axis_index", "axis_size"}  # they name an axis but send nothing


def on_host(x: Any) -> np.ndarray:
    """Return the entries of an array; of keys, their bits."""
    is_keys = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_keys else x)


def checksum(host: np.ndarray) -> int:
    """Return a checksum of the bytes, type and shape of an array."""
    # As bytes: NumPy exports no buffer of bfloat16. A contiguous array is not copied.
    own = np.ascontiguousarray(host).reshape(-1).view(np.uint8).data
    return zlib.crc32(own, zlib.crc32(f"{host.dtype}{host.shape}".encode()))


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """Format an array's type as JAX does: float32[8,3]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def moves(eqn: JaxprEqn) -> bool:
    """Check whether an equation is a collective over the devices."""
    return any(isinstance(axis, str) for axis in axes_of(eqn)) and eqn.primitive.name not in _SILENT


def parameters(eqn: JaxprEqn) -> str:
    """Format parameters whose text is equal in every process, without function names."""
    plain = {name: _plain(value) for name, value in sorted(eqn.params.items()) if name not in ("name", "debug_info")}
    return "".join(f" {name}={value}" for name, value in plain.items() if value)


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    return str(value) if isinstance(value, (str, int, float, complex, np.dtype, np.generic, enum.Enum)) else ""


def place(within: Within) -> str:
    """Describe the position of an equation."""
    words = {"scan": "in a scan of {length}: ", "while": "in a while loop: ", "cond": "in branch {i} of a cond: "}
    return "".join(words.get(e.primitive.name, "").format(i=i, length=e.params.get("length")) for e, i in within)


# --- comparison between ranks

_SHOWN = 160  # characters of an operation


class Operation(NamedTuple):
    """An operation of a program, comparable between ranks."""

    digest: bytes  # of the operation and, by position, of the operations that make its operands
    text: str  # for a person: its position, name, operands and parameters
    line: str = ""  # of the user's code, if known; the call's for a library function

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}..."
        return f"{text}, at {self.line}" if self.line else text


def dataflow(closed: ClosedJaxpr) -> str:
    """Return a digest of all operations of a program."""
    return hashlib.blake2b(b"".join(digest for digest, *_ in _each(closed)), digest_size=16).hexdigest()


def operations(closed: ClosedJaxpr) -> list[Operation]:
    """Return the operations of a program in order; bodies come before their control flow."""
    line = lambda outwards: next(filter(None, map(compat.user_line, outwards)), "")
    return [Operation(digest, text, line(outwards)) for digest, text, outwards in _each(closed)]


def _each(closed: ClosedJaxpr, within: Within = ()) -> Iterator[tuple[bytes, str, Sequence[JaxprEqn]]]:
    """Yield each operation's digest, text, and equations outwards, and finally those for the program's results."""
    jaxpr, where = closed.jaxpr, place(within)
    numbers: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    held = {v: _held(v, x) for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}

    def operand(v: Any) -> str:
        return _held(v, v.val) if isinstance(v, Literal) else held.get(v) or v.aval.str_short()

    def digest(text: str, atoms: Sequence[Any]) -> bytes:
        places = [None if isinstance(v, Literal) else numbers.setdefault(v, len(numbers)) for v in atoms]
        return hashlib.blake2b(
            f"{text} {places} {[v.aval.str_short() for v in atoms]}".encode(), digest_size=16
        ).digest()

    for eqn in live(jaxpr):
        for i, body in enumerate(subjaxprs(eqn)):
            yield from _each(body, (*within, (eqn, i)))
        name = eqn.primitive.name.removeprefix("jaxdist_")
        text = f"{where}{name} {', '.join(map(operand, eqn.invars))}{parameters(eqn)}"
        yield digest(text, (*eqn.invars, *eqn.outvars)), text, (eqn, *(outer for outer, _ in reversed(within)))
    text = f"{where}returns {', '.join(map(operand, jaxpr.outvars))}"
    yield digest(text, jaxpr.outvars), text, ()


def _held(v: Any, value: Any) -> str:
    """Return a constant's text: a number, or the checksum of an array."""
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():  # the program with the constant is being traced
            value = jax.random.key_data(value)
    elif np.ndim(value) == 0:
        return f"{np.asarray(value)}"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        raise ValueError(
            f"the step closes over an array of shape {value.shape} that is split over several processes. Pass it as "
            "an argument"
        )
    return f"{v.aval.str_short()} with the checksum {checksum(np.asarray(value)):08x}"
