"""What a reduction computes in, and what comes out, for each op and dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

OPS = ("sum", "prod", "min", "max", "avg")
_UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True)
class Reduction:
    """A reduction of one dtype."""

    ufunc: np.ufunc  # adds up two contributions (NumPy's minimum and maximum hand NaNs on, MPI's lose them)
    sums_in: np.dtype[Any]  # the dtype it does so in
    out: np.dtype[Any]  # of the result
    divide: bool  # whether the result is divided by the number of contributions
    native: bool  # whether MPI's own operation on this dtype does the same

    def finish(self, total: np.ndarray, n: int, out: np.ndarray) -> None:
        """The result, from the sum of `n` contributions."""
        if self.divide and out.dtype == total.dtype:
            np.divide(total, n, out=out)
        elif self.divide or out is not total:
            np.copyto(out, total / n if self.divide else total, casting="unsafe")


def reduction(op: str, dtype: Any) -> Reduction:
    """How `op` reduces `dtype`."""
    return _reduction(op, np.dtype(dtype), bool(jax.config.read("jax_enable_x64")))


@functools.cache
def _reduction(op: str, dtype: np.dtype[Any], x64: bool) -> Reduction:
    ufunc = _UFUNCS[op]
    mean = op == "avg"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        if op in ("min", "max"):
            raise TypeError(f"op {op!r} of {dtype.name}: complex numbers have no order; reduce jnp.abs(x), say")
        return Reduction(ufunc, dtype, dtype, mean, not mean)
    if jnp.issubdtype(dtype, jnp.floating):
        wide = np.promote_types(dtype, np.float32) if dtype.kind == "f" else np.dtype(np.float32)
        return Reduction(ufunc, wide, dtype, mean, op in ("sum", "prod") and wide == dtype)
    if dtype.kind != "b" and dtype.kind not in "iu":
        raise TypeError(f"op {op!r} of {dtype.name}: no reduction of this dtype; cast to int8 or wider first")
    if mean:
        out = np.dtype(jax.eval_shape(jnp.mean, jax.ShapeDtypeStruct((), dtype)).dtype)
        return Reduction(ufunc, np.dtype(np.float64), out, True, False)
    if dtype.kind == "b":
        ufunc = np.logical_or if op in ("sum", "max") else np.logical_and
        return Reduction(ufunc, dtype, dtype, False, False)
    return Reduction(ufunc, dtype, dtype, False, True)
