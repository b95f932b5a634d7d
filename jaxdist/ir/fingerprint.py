"""Operations as text: which of them are collectives, types, parameters."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxdist.ir.interpreter import axes_of

# They name the axis and move nothing.
_SILENT = {"axis_index", "axis_size"}


def checksum(host: np.ndarray) -> int:
    """A checksum of the bytes, type and shape of an array."""
    # As bytes: NumPy exports no buffer of bfloat16 and its kin. Of an array in one piece no copy is made.
    own = np.ascontiguousarray(host).reshape(-1).view(np.uint8).data
    return zlib.crc32(own, zlib.crc32(f"{host.dtype}{host.shape}".encode()))


def type_text(dtype: Any, shape: Sequence[int]) -> str:
    """Of an array, as JAX writes it: float32[8,3]."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def aval_text(v: Any) -> str:
    """The type of a variable or literal; of a token its name."""
    return type_text(getattr(v.aval, "dtype", v.aval), getattr(v.aval, "shape", ()))


def moves(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective over the devices."""
    return any(isinstance(axis, str) for axis in axes_of(eqn)) and eqn.primitive.name not in _SILENT


def parameters(eqn: JaxprEqn) -> str:
    """Those whose text is the same in every process, and that are no names of functions."""
    plain = {name: _plain(value) for name, value in sorted(eqn.params.items()) if name not in ("name", "debug_info")}
    return "".join(f" {name}={value}" for name, value in plain.items() if value)


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain, value))})"
    known = (str, bool, int, float, complex, np.dtype, np.generic, enum.Enum)
    return str(value) if isinstance(value, known) else ""


def place(within: Sequence[tuple[JaxprEqn, int]]) -> str:
    """Where an equation is that is inside these, each time in the i-th jaxpr."""
    words = {"scan": "in a scan of {length}: ", "while": "in a while loop: ", "cond": "in branch {i} of a cond: "}
    return "".join(words.get(e.primitive.name, "").format(i=i, length=e.params.get("length")) for e, i in within)
