"""The *mean* pass: give each reduction that differentiation made its meaning, and do it where it moves least.

JAX puts the reduction of a gradient where the replicated value was cast to varying, which may be after a broadcast:
the gradient of the scalar in ``jnp.where(mask, x, scalar)`` would travel as a whole batch. The reduction of a sum is
the sum of the reductions, so it waits here: past sums over dimensions, reshapes and the addition of other waiting
reductions (a tied weight), until something else needs the value. One that nothing needs is never made. Out of a loop
that only adds it up, too (gradients accumulated over microbatches): the devices' own sums are carried, and reduced once
after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import (
    add_jaxvals_p,
    add_p,
    broadcast_in_dim_p,
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
    while_p,
)

from jaxdist import compat
from jaxdist.step.interpreter import INLINED, Interpreter, live, retrace
from jaxdist.step.primitives import AXIS, Op, all_reduce, all_reduce_p, expand_p, per_part_p

_UNARY = {reduce_sum_p, reshape_p, squeeze_p, transpose_p, neg_p, copy_p}
_SUMS = {add_p, sub_p, add_jaxvals_p}


@dataclass(eq=False)
class _Partial:
    """A replicated value of which each device still holds its own part; reduced when it is first needed.

    Attributes:
      part: this device's.
      op: of the reduction.
      wire: the dtype in which it travels, if not its own.
      shapes: where it is noted when it is done.
      made: False for what a loop carries, until a reduction is added to it.
    """

    part: Any
    op: Op
    wire: str | None
    shapes: list[tuple[int, ...]]
    made: bool = True
    _whole: list[Any] = field(default_factory=list)

    @property
    def needed(self) -> bool:
        """Whether something needed the whole value."""
        return bool(self._whole)

    def whole(self) -> Any:
        if not self._whole:
            self.shapes.append(self.part.shape)
            dtype = self.part.dtype
            narrower = (
                self.wire and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > jnp.dtype(self.wire).itemsize
            )
            self._whole.append(all_reduce(self.part, (AXIS,), self.op, self.wire if narrower else None))
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


def _is_partial(value: Any) -> bool:
    return isinstance(value, _Partial)


def _is_replicated(value: Any) -> bool:
    return compat.checking_types() and (
        isinstance(value, (bool, int, float, complex))
        or (not isinstance(value, _Cast) and AXIS not in compat.varying_axes(jax.typeof(value)))
    )


def _cast(value: Any, aval: Any) -> Any:
    return lax.pcast(jnp.asarray(value, aval.dtype), AXIS, to="varying")


def _waits(value: Any) -> bool:
    return isinstance(value, _Partial) and not value.needed


def _with(avals: Sequence[Any], other: dict[int, Any]) -> list[Any]:
    return [other.get(i, a) for i, a in enumerate(avals)]


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact) and AXIS not in compat.varying_axes(aval)


def _not_in_condition(eqn: JaxprEqn, first: int) -> set[int]:
    """Carries of a while loop on which its condition does not depend; none if devices may disagree on it."""
    cond = eqn.params["cond_jaxpr"]
    if AXIS in compat.varying_axes(cond.out_avals[0]):
        return set()
    used = {v for e in live(cond.jaxpr) for v in e.invars if not isinstance(v, Literal)} | set(cond.jaxpr.outvars)
    carries = cond.jaxpr.invars[eqn.params["cond_nconsts"] :]
    return {i for i, v in enumerate(carries) if v not in used}


def _parted(value: Any, aval: Any, op: Op) -> Any:
    """Parts of a replicated value: their reduction is that value."""
    part = _cast(value, aval)
    return part if op == "mean" else jnp.where(lax.axis_index(AXIS) == 0, part, jnp.zeros_like(part))


class Reductions(Interpreter):
    """Evaluates a traced step with its gradient reductions placed and given their meaning.

    Args:
      op: what a gradient is over the devices: the ``"mean"`` of theirs (the loss is a mean over the
        batch) or the ``"sum"`` (the loss is a sum).
      compress: the dtype in which gradients travel; None: their own.

    Attributes:
      shapes: of each value reduced so far.
      loops: lengths of the scans that hold a reduction.
    """

    def __init__(self, op: Op, compress: str | None = None):
        super().__init__({all_reduce_p: self._reduce, expand_p: self._expand, per_part_p: self._per_part})
        self.rules[compat.pvary_p] = lambda _, eqn, x: _Cast(_whole(x), eqn.params["axes"])
        self.op: Op = op
        self.compress = compress
        self.shapes: list[tuple[int, ...]] = []
        self.loops: list[int] = []
        self._carrying = False  # evaluating the body of a loop that carries parts
        self._zeros: dict[int, Any] = {}  # arrays of zeros, by id

    def use(self, value: Any, uses: int) -> Any:
        # Waiting past one use of two would reduce twice.
        return value.whole() if isinstance(value, _Partial) and uses > 1 else value

    def finish(self, value: Any) -> Any:
        return _whole(value)

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive in self.rules or (self.touches(eqn) and eqn.primitive.name in INLINED):
            return super().eval_eqn(eqn, *args)
        if eqn.primitive in (scan_p, while_p) and self.touches(eqn) and compat.checking_types():
            return self._loop(eqn, args)
        if (linear := self._linear(eqn, args)) is not None:
            return [linear]
        outs = super().eval_eqn(eqn, *map(_whole, args))
        if eqn.primitive is broadcast_in_dim_p and isinstance(eqn.invars[0], Literal) and eqn.invars[0].val == 0:
            self._zeros[id(outs[0])] = outs[0]
        return outs

    def eval_nested(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        carrying, noted = self._carrying, len(self.shapes)
        self._carrying = False
        outs = super().eval_nested(eqn, *args)
        self._carrying = carrying
        if eqn.primitive is scan_p and len(self.shapes) > noted:
            self.loops.append(eqn.params["length"])
        return outs

    def _loop(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        """The *hoist* pass: a loop's carries that only add reductions up are carried in parts, and reduced after it."""
        if eqn.primitive is scan_p:
            first, count = compat.scan_split(eqn.params)
            name, skipped, free = "jaxpr", 0, set(range(count))
        else:
            skipped = eqn.params["cond_nconsts"]
            first = skipped + eqn.params["body_nconsts"]
            name, free = "body_jaxpr", _not_in_condition(eqn, first)
        held = {i for i in free if _is_float(eqn.invars[first + i].aval)}
        parts = {i: self._parts_of(args[first + i], eqn.invars[first + i].aval) for i in held}
        types = {i: jax.typeof(x) for i, x in parts.items()}
        shapes, loops = list(self.shapes), list(self.loops)
        body, kept = None, {}
        while held != kept.keys():  # fewer each time, until what goes in in parts comes out in parts
            held = set(kept) or held
            self.shapes[:], self.loops[:] = shapes, loops
            body, kept = self._in_parts(eqn.params[name], first - skipped, {i: types[i] for i in held})
            if not kept:
                break
        if not kept:
            self.shapes[:], self.loops[:] = shapes, loops
            return super().eval_eqn(eqn, *map(_whole, args))
        if eqn.primitive is scan_p and len(self.shapes) > len(shapes):
            self.loops.append(eqn.params["length"])
        params = {**eqn.params, name: body}
        if eqn.primitive is while_p:
            cond = eqn.params["cond_jaxpr"]
            avals = _with(cond.in_avals, {skipped + i: types[i] for i in kept})
            params["cond_jaxpr"] = retrace(lambda *xs: super(Reductions, self).run(cond, *xs), avals)
        start = {first + i: parts[i] for i in kept}
        # A sum that starts from something else than zero is no gradient: parameters, say.
        wires = {i: wire if self._is_gradient(args[first + i], wire) else None for i, wire in kept.items()}
        outs = compat.bind(eqn, params, [start[i] if i in start else _whole(x) for i, x in enumerate(args)])
        return [_Partial(x, self.op, wires[i], self.shapes) if i in kept else x for i, x in enumerate(outs)]

    def _is_gradient(self, start: Any, wire: str | None) -> bool:
        if _waits(start):
            return not start.made or start.wire == wire
        return id(start) in self._zeros

    def _parts_of(self, value: Any, aval: Any) -> Any:
        return value.part if _waits(value) else _parted(_whole(value), aval, self.op)

    def _in_parts(
        self, body: ClosedJaxpr, first: int, held: dict[int, Any]
    ) -> tuple[ClosedJaxpr, dict[int, str | None]]:
        """`body` with some carries in parts of these types; those that come out so, unused but for sums: their wire."""
        kept: dict[int, str | None] = {}

        def run(*xs: Any) -> list[Any]:
            args = list(xs)
            for i in held:
                args[first + i] = _Partial(xs[first + i], self.op, None, self.shapes, made=False)
            outs = self.run(body, *args)
            ready = [None if i in held and _waits(x) else self.finish(x) for i, x in enumerate(outs)]
            for i in held:
                whole = not _waits(outs[i]) or args[first + i].needed
                if not whole and outs[i].made and outs[i].op == self.op:
                    kept[i] = outs[i].wire
            return [x.part if r is None else r for r, x in zip(ready, outs, strict=True)]

        before, self._carrying = self._carrying, True
        try:
            return retrace(run, _with(body.in_avals, {first + i: t for i, t in held.items()})), kept
        finally:
            self._carrying = before

    def _linear(self, eqn: JaxprEqn, args: Sequence[Any]) -> _Partial | None:
        """The equation applied to the parts, where that is the same and moves no more bytes."""
        parts = [a for a in args if isinstance(a, _Partial)]
        if not parts or len({p.op for p in parts}) > 1:
            return None
        first, out = parts[0], eqn.outvars[0].aval
        if first.part.size < out.size:  # type: ignore[attr-defined]
            return None
        avals = [v.aval for v in eqn.invars]
        if (
            eqn.primitive in _UNARY
            or (eqn.primitive is convert_element_type_p and self._keeps(first.part.dtype, out.dtype))  # type: ignore[attr-defined]
            or (eqn.primitive in _SUMS and len(parts) == len(args))
        ):
            operands = [p.part for p in parts]
        elif eqn.primitive in _SUMS and self._carrying and all(_is_partial(a) or _is_replicated(a) for a in args):
            # What is added in each turn of a loop (the gradient of a penalty on the weights) waits with the rest.
            operands = [a.part if _is_partial(a) else _parted(a, v, first.op) for a, v in zip(args, avals, strict=True)]
        elif (eqn.primitive is mul_p or (eqn.primitive is div_p and args[0] is first)) and (
            len(parts) == 1 and all(a is first or _is_replicated(a) for a in args)
        ):
            # A replicated factor; in an untyped trace nothing says that it is.
            operands = [a.part if _is_partial(a) else _cast(a, v) for a, v in zip(args, avals, strict=True)]
        else:
            return None
        (part,) = compat.bind(eqn, eqn.params, operands)
        wires = {p.wire for p in parts if p.made}
        # What is added to a gradient must not lose digits on the wire for it.
        pure = eqn.primitive not in _SUMS or len(parts) == len(args)
        wire = wires.pop() if len(wires) == 1 and pure else None
        return _Partial(part, first.op, wire, self.shapes, made=any(p.made for p in parts))

    def _keeps(self, dtype: Any, to: Any) -> bool:
        """Whether reducing after a cast is as good: it may widen what a loop adds up, as that saves more bytes."""
        wider = self._carrying and jnp.issubdtype(to, jnp.inexact) and jnp.promote_types(dtype, to) == to
        return dtype == to or wider

    def _reduce(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        axes, op = eqn.params["axes"], eqn.params["op"] or self.op
        if axes != (AXIS,):  # of a mesh axis of the user's own
            return all_reduce_p.bind(_whole(x), **eqn.params)
        if isinstance(x, _Cast) and x.axes == axes:
            return x.value if op == "mean" else x.value * lax.axis_size(AXIS)
        gradient = eqn.params["op"] is None or eqn.params["wire"] == "gradient"
        return _Partial(_whole(x), op, self.compress if gradient else None, self.shapes)

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
