"""Evaluate a program with numbers of a finite field in the place of its floats; integers, booleans and keys stay."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxdist import compat
from jaxdist.errors import JaxdistError
from jaxdist.ir.interpreter import called
from jaxdist.ir.operations import is_elementwise
from jaxdist.placements.model.named_kernels import TWINS, traced_twin
from jaxdist.placements.model.values import aval_of
from jaxdist.proof import field
from jaxdist.proof.field import Number, Pair

Rule = Callable[["Evaluator", JaxprEqn, Sequence[Any]], Sequence[Any]]
# By the name of a primitive (`jaxdist.proof.rules`): of those that take or return floats, and of those that need a rule
# even if they don't.
RULES: dict[str, Rule] = {}
OF_ANY: dict[str, Rule] = {}


class UncheckedError(JaxdistError):
    """An operation that is not evaluated in the field."""

    def __init__(self, operation: str, line: str):
        self.operation, self.line = operation, line

    def __str__(self) -> str:
        return f"{self.operation} at {self.line or 'an unknown line'}"


def is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact)


def is_complex(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.complexfloating)


class Evaluator:
    """Evaluates jaxprs.

    Args:
      strict: a cast to fewer bits is a function of its own; by default it changes nothing.
      divides: constraints of shardings are kept, for a program that XLA divides.
      order: the order of numbers, see `field.drawn_order`.
    """

    def __init__(self, strict: bool = False, divides: bool = False, order: Any = (1, 1)):
        self.strict, self.divides, self.order = strict, divides, order

    def run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of a program at `args`."""
        return [*map(in_field, self._run(closed, args))]

    def _run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.constvars, map(self.constant, closed.consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        # A literal may have more digits than its type.
        literal = lambda atom: self.constant(np.asarray(atom.val, atom.aval.dtype))
        read = lambda atom: literal(atom) if isinstance(atom, Literal) else env[atom]
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, jaxpr.outvars)]

    @staticmethod
    def constant(value: Any) -> Any:
        """Return a constant of a program. A scalar stays a float, until it meets what depends on arguments."""
        if is_float(jax.typeof(value)):
            return np.asarray(value) if np.ndim(value) == 0 else in_field(np.asarray(value))
        is_key = jnp.issubdtype(jax.typeof(value).dtype, jax.dtypes.extended)
        return value if is_key else np.asarray(value)

    def equation(self, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
        """Return the results of an operation."""
        name, has_floats = eqn.primitive.name, any(is_float(aval_of(v)) for v in (*eqn.invars, *eqn.outvars))
        if (body := called(eqn)) is not None:
            try:
                outs = self._run(body, self._constrained(eqn, "in_shardings", xs))
                return self._constrained(eqn, "out_shardings", outs)
            except UncheckedError as problem:
                problem.line = problem.line or compat.user_line(eqn)
                raise
        if name not in OF_ANY and _is_known(eqn, xs):
            with jax.ensure_compile_time_eval():  # an index or an exponent may be made of it
                return [*map(np.asarray, compat.bind(eqn, eqn.params, xs))]
        xs = [*map(in_field, xs)]
        if name in OF_ANY or (has_floats and name in RULES):
            outs = RULES[name](self, eqn, xs)
            return [_rounded(eqn, x) for x in outs] if self.strict and name in _ROUNDED else outs
        if not has_floats:
            return self.bind(eqn, xs)
        if (like := TWINS.get(f"{name} {compat.kernel_name(eqn)}".strip()) or TWINS.get(name)) is not None:
            return self.run(traced_twin(like, eqn), xs)
        if is_elementwise(eqn.primitive) and len(eqn.outvars) == 1:
            return [hashed_as(aval_of(eqn.outvars[0]), f"{name}{settings_of(eqn)}", xs)]
        raise unchecked(eqn)

    def _constrained(self, eqn: JaxprEqn, which: str, xs: Sequence[Any]) -> Sequence[Any]:
        """Keep the shardings that a call asks for."""
        shardings = eqn.params.get(which) if self.divides else None
        if shardings is None:
            return xs
        constrained = lambda x, to: jax.tree.map(lambda part: lax.with_sharding_constraint(part, to), x)
        pairs = zip(xs, shardings, strict=True)
        return [constrained(x, to) if isinstance(to, jax.sharding.Sharding) else x for x, to in pairs]

    def bind(self, eqn: JaxprEqn, xs: Sequence[Any], **changed: Any) -> Sequence[Any]:
        """Bind an operation unchanged, to numbers of the field instead of floats."""
        none = {k: None for k in ("sharding", "out_sharding", "wire") if k in eqn.params}
        # What XLA divides gets no help: slices beyond an end are where it is wrong.
        return compat.bind(eqn, {**eqn.params, **none, **changed}, xs, in_bounds=not self.divides)


def in_field(x: Any) -> Any:
    """Return a number of the field; a constant may be a float yet."""
    return jax.tree.map(jnp.asarray, field.embedded(x)) if isinstance(x, np.ndarray) and is_float(x) else x


def _is_known(eqn: JaxprEqn, xs: Sequence[Any]) -> bool:
    """Check whether an operation is one of scalars that the program itself says, the same on every device."""
    is_scalar = all(aval_of(v).shape == () for v in (*eqn.invars, *eqn.outvars))
    return is_scalar and is_elementwise(eqn.primitive) and all(isinstance(x, np.ndarray) for x in xs) and bool(xs)


def unchecked(eqn: JaxprEqn, of: str = "") -> UncheckedError:
    return UncheckedError(f"{eqn.primitive.name}{of}", compat.user_line(eqn))


def settings_of(eqn: JaxprEqn) -> list[str]:
    return [f"{k}={v}" for k, v in sorted(eqn.params.items()) if isinstance(v, (int, float, str))]


def hashed_as(aval: Any, name: str, xs: Sequence[Number]) -> Any:
    """Return a hash of operands as a value of a type."""
    if is_complex(aval):
        return Pair(field.hashed(name, *xs), field.hashed(f"{name} i", *xs))
    out = field.hashed(name, *xs)
    return out if is_float(aval) else out % 2 == 0 if aval.dtype == bool else out.astype(aval.dtype)


def by_part(f: Callable[..., Any], *xs: Any) -> Any:
    """Apply a function to the real and imaginary parts, if numbers have these."""
    if not any(isinstance(x, Pair) for x in xs):
        return f(*xs)
    real, imag = (f(*(getattr(x, part) if isinstance(x, Pair) else x for x in xs)) for part in Pair._fields)
    return [*map(Pair, real, imag)] if isinstance(real, (list, tuple)) else Pair(real, imag)


def narrowed(name: str, x: Number) -> Number:
    return by_part(lambda x: jnp.where(x == 0, 0, field.hashed(name, x)), x)


def _rounded(eqn: JaxprEqn, x: Number) -> Number:
    """Return a sum as its type holds it: it is made in 32 bits or more."""
    dtype = aval_of(eqn.outvars[0]).dtype
    return narrowed(str(dtype), x) if dtype.itemsize < 4 else x


_ROUNDED = {"dot_general", "conv_general_dilated", "ragged_dot_general", "reduce_sum", "cumsum", "scatter-add",
            "scatter_add", "reduce_window_sum"}  # fmt: skip
