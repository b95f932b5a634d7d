"""What a program says on the wire: its collectives in order."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist import compat
from jaxdist.ir.interpreter import axes_of, live, subjaxprs
from jaxdist.ir.primitives import group_reduce_p
from jaxdist.mesh import AXIS

# They name the axis and move nothing.
_SILENT = {"axis_index", "axis_size"}


def fingerprint(closed_jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """The collectives of a program, those nested in its control flow too, in the order in which it names them.

    Programs that can run together have equal ones. Dead code does not count.

    Args:
      closed_jaxpr: a step as one device runs it.

    Returns:
      One line for each: where it is, its name, the types of what it moves, and its parameters.

    Example:
      >>> import jax
      >>> from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
      >>> mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
      >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh,
      ...                       in_specs=P("data"), out_specs=P())
      >>> fingerprint(jax.make_jaxpr(total)(jax.numpy.ones(4, "float32")))
      ('psum_invariant float32[2] axes=(data)',)
    """
    return tuple(lines(closed_jaxpr.jaxpr, moves))


def constants(closed_jaxpr: ClosedJaxpr) -> str:
    """A checksum of the numbers and arrays that a program holds: what the step closes over, and literals.

    Args:
      closed_jaxpr: a step as it was traced.
    """
    found = 0
    for value in _values(closed_jaxpr):
        raw = value
        if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():  # the program that holds it is being traced
                raw = jax.random.key_data(value)
        if isinstance(raw, jax.Array) and not raw.is_fully_addressable:
            raise ValueError(
                f"the step closes over an array of shape {raw.shape} that is spread over several processes: pass it as "
                "an argument"
            )
        found = checksum(np.asarray(raw), found)
    return f"{found:08x}"


def checksum(host: np.ndarray, before: int = 0) -> int:
    """Of the bytes, type and shape of an array, after that of others."""
    return zlib.crc32(host.tobytes(), zlib.crc32(f"{host.dtype}{host.shape}".encode(), before))


def _values(closed_jaxpr: ClosedJaxpr) -> Iterator[Any]:
    yield from closed_jaxpr.consts
    for eqn in closed_jaxpr.jaxpr.eqns:
        yield from (v.val for v in eqn.invars if isinstance(v, Literal))
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, (ClosedJaxpr, Jaxpr)):
                    yield from _values(compat.closed(item))


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """Of an array, as JAX writes it: float32[8,3]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def lines(jaxpr: Jaxpr, which: Callable[[JaxprEqn], bool], where: str = "") -> Iterator[str]:
    """A line for each operation, those nested in control flow too: where it is, its name, operands and parameters.

    Args:
      jaxpr: dead code in it does not count.
      which: of them.
      where: the jaxpr is.
    """
    for eqn in live(jaxpr):
        if which(eqn):
            types = ", ".join(map(aval_text, eqn.invars))
            yield f"{where}{eqn.primitive.name.removeprefix('jaxdist_')} {types}{parameters(eqn)}"
        for i, sub in enumerate(subjaxprs(eqn)):
            yield from lines(sub, which, where + place(eqn, i))


def aval_text(v: Any) -> str:
    """The type of a variable or literal; of a token its name."""
    return type_text(getattr(v.aval, "dtype", v.aval), getattr(v.aval, "shape", ()))


def moves(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective over the devices."""
    if eqn.primitive is group_reduce_p:  # it does not name the axis
        return True
    return AXIS in axes_of(eqn) and eqn.primitive.name not in _SILENT


def parameters(eqn: JaxprEqn) -> str:
    """Those whose text is the same in every process, and that are no names of functions."""
    plain = {name: _plain(value) for name, value in sorted(eqn.params.items()) if name not in ("name", "debug_info")}
    return "".join(f" {name}={value}" for name, value in plain.items() if value)


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    known = (str, bool, int, float, complex, np.dtype, np.generic, enum.Enum)
    return str(value) if isinstance(value, known) else ""


def place(eqn: JaxprEqn, i: int) -> str:
    """How the collectives in the i-th jaxpr of an equation are called."""
    match eqn.primitive.name:
        case "scan":
            return f"in a scan of {eqn.params['length']}: "
        case "while":
            return "in a while loop: "
        case "cond":
            return f"in branch {i} of a cond: "
    return ""
