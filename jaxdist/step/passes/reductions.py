"""The *mean* pass: give each reduction that differentiation made its meaning, and do it where it moves least.

JAX puts the reduction of a gradient where the replicated value was cast to varying, which may be after a broadcast:
the gradient of the scalar in ``jnp.where(mask, x, scalar)`` would travel as a whole batch. The reduction of a sum is
the sum of the reductions, so it waits here: past sums over dimensions, reshapes and the addition of other waiting
reductions (a tied weight), until something else needs the value. One that nothing needs is never made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import (
    add_jaxvals_p,
    add_p,
    convert_element_type_p,
    copy_p,
    div_p,
    mul_p,
    neg_p,
    reduce_sum_p,
    reshape_p,
    scan_p,
    squeeze_p,
    sub_p,
    transpose_p,
)

from jaxdist import compat
from jaxdist.step.interpreter import INLINED, Interpreter
from jaxdist.step.primitives import AXIS, Op, all_reduce, all_reduce_p, expand_p, per_part_p

_UNARY = {reduce_sum_p, reshape_p, squeeze_p, transpose_p, neg_p, copy_p}
_SUMS = {add_p, sub_p, add_jaxvals_p}


@dataclass(eq=False)
class _Partial:
    """A replicated value of which each device still holds its own part; reduced when it is first needed."""

    part: Any
    op: Op
    shapes: list[tuple[int, ...]]
    _whole: list[Any] = field(default_factory=list)

    def whole(self) -> Any:
        if not self._whole:
            self.shapes.append(self.part.shape)
            self._whole.append(all_reduce(self.part, (AXIS,), self.op))
        return self._whole[0]


@dataclass(eq=False)
class _Cast:
    """A replicated value used as a varying one; its mean over the devices is itself."""

    value: Any
    axes: tuple[str, ...]
    _whole: list[Any] = field(default_factory=list)

    def whole(self) -> Any:
        if not self._whole:
            self._whole.append(compat.pvary_p.bind(self.value, axes=self.axes))
        return self._whole[0]


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, (_Partial, _Cast)) else value


def _is_replicated(value: Any) -> bool:
    return compat.checking_types() and (
        isinstance(value, (bool, int, float, complex))
        or (not isinstance(value, _Cast) and AXIS not in compat.varying_axes(jax.typeof(value)))
    )


def _cast(value: Any, aval: Any) -> Any:
    return lax.pcast(jnp.asarray(value, aval.dtype), AXIS, to="varying")


class Reductions(Interpreter):
    """Evaluates a traced step with its gradient reductions placed and given their meaning.

    Args:
      op: what a gradient is over the devices: the ``"mean"`` of theirs (the loss is a mean over the
        batch) or the ``"sum"`` (the loss is a sum).

    Attributes:
      shapes: of each value reduced so far.
      loops: lengths of the scans that hold a reduction.
    """

    def __init__(self, op: Op):
        super().__init__({all_reduce_p: self._reduce, expand_p: self._expand, per_part_p: self._per_part})
        self.rules[compat.pvary_p] = lambda _, eqn, x: _Cast(_whole(x), eqn.params["axes"])
        self.op: Op = op
        self.shapes: list[tuple[int, ...]] = []
        self.loops: list[int] = []

    def use(self, value: Any, uses: int) -> Any:
        # Waiting past one use of two would reduce twice.
        return value.whole() if isinstance(value, _Partial) and uses > 1 else value

    def finish(self, value: Any) -> Any:
        return _whole(value)

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive in self.rules or (self.touches(eqn) and eqn.primitive.name in INLINED):
            return super().eval_eqn(eqn, *args)
        if (linear := self._linear(eqn, args)) is not None:
            return [linear]
        return super().eval_eqn(eqn, *map(_whole, args))

    def eval_nested(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive is scan_p:
            self.loops.append(eqn.params["length"])
        return super().eval_nested(eqn, *args)

    def _linear(self, eqn: JaxprEqn, args: Sequence[Any]) -> _Partial | None:
        """The equation applied to the parts, where that is the same and moves no more bytes."""
        parts = [a for a in args if isinstance(a, _Partial)]
        if not parts or len({p.op for p in parts}) > 1:
            return None
        out: Any = eqn.outvars[0].aval
        if parts[0].part.size < out.size:
            return None
        same_dtype = out.dtype == parts[0].part.dtype
        if (
            eqn.primitive in _UNARY
            or (eqn.primitive is convert_element_type_p and same_dtype)
            or (eqn.primitive in _SUMS and len(parts) == len(args))
        ):
            (part,) = compat.bind(eqn, eqn.params, [p.part for p in parts])
        elif (eqn.primitive is mul_p or (eqn.primitive is div_p and args[0] is parts[0])) and (
            len(parts) == 1 and all(a is parts[0] or _is_replicated(a) for a in args)
        ):
            # A replicated factor; in an untyped trace nothing says that it is.
            (part,) = compat.bind(
                eqn,
                eqn.params,
                [
                    a.part if isinstance(a, _Partial) else _cast(a, v.aval)
                    for a, v in zip(args, eqn.invars, strict=True)
                ],
            )
        else:
            return None
        return _Partial(part, parts[0].op, self.shapes)

    def _reduce(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        axes, op = eqn.params["axes"], eqn.params["op"] or self.op
        if axes != (AXIS,):  # of a mesh axis of the user's own
            return all_reduce_p.bind(_whole(x), **eqn.params)
        if isinstance(x, _Cast) and x.axes == axes:
            return x.value if op == "mean" else x.value * lax.axis_size(AXIS)
        return _Partial(_whole(x), op, self.shapes)

    def _per_part(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        value = _whole(x)
        return value / eqn.params["parts"] if self.op == "mean" else value

    def _expand(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        axes = eqn.params["axes"]
        value = _whole(x)
        if AXIS in axes and self.op == "mean":
            value = value * jnp.asarray(lax.axis_size(AXIS), value.dtype)
        if not compat.checking_types():
            return value
        return compat.pvary_p.bind(value, axes=axes)
