"""The *shards* pass: what `jaxdist.zero` keeps in shards is computed on in shards.

Logically a value is one array, the same on every device. `Shard` is how it may be held: each device has its slice along
one dimension. It starts at the state's leaves that are kept so, at what `jaxdist.zero` marks, and at the reductions of
gradients that lead to such marks, which become reduce-scatters. From there:

* elementwise operations work on the slices; what else they take is sliced, never computed whole first;
* a reduction over the split dimension reduces the slices, without their padding, and then over the devices;
* operations that leave the split dimension alone (a transpose, a sum over another one) work on the slices too;
* anything else gathers the whole array first. So do values that differ between devices: a parameter that meets the
  batch is gathered right there, once in the forward pass and again in the backward pass, in loops over layers one layer
  at a time, since a loop is given slices of the shards.

Reference: Rajbhandari et al., *ZeRO*, arXiv 1910.02054, sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core import primitives as p

from jaxdist import compat
from jaxdist.step.interpreter import Interpreter, called, live, retrace, subjaxprs
from jaxdist.step.layouts import Layout, choose, layout
from jaxdist.step.primitives import (
    AXIS,
    all_reduce,
    all_reduce_p,
    gather_shards,
    reduce_shard,
    shard_p,
)

ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt",
    "lt_to", "max", "min", "mul", "ne", "neg", "nextafter", "not", "optimization_barrier", "or", "polygamma",
    "population_count", "pow", "pvary", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
}  # fmt: skip
_FORM = {"convert_element_type", "copy", "copy_p", "broadcast_in_dim", "transpose", "squeeze", "reshape"}
_CHECKPOINT = {"checkpoint", "remat", "remat2"}


class Gathered(NamedTuple):
    """An array that was gathered because of what was to be computed.

    Attributes:
      primitive: that needed it.
      shape: of the array.
      bytes: of the whole array.
    """

    primitive: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(eq=False)
class Shard:
    """A value of which this device holds one slice.

    Attributes:
      local: the slice; where it is the end of a dimension that the devices don't divide, the rest is arbitrary.
      aval: the type of the whole value.
      dim: along which it is split.
      stored: it is the state's own, at most in another dtype.
      asked: the user, or the optimizer's `init`, wants it in shards.
      made: of what by which operation, if to gather that is as cheap: it may be gathered already.
    """

    local: Any
    aval: Any
    dim: int
    stored: bool = False
    asked: bool = False
    made: tuple[Shard, JaxprEqn] | None = None
    wholes: dict[bool, Any] = field(default_factory=dict)


@dataclass(eq=False)
class _Fill:
    """A broadcast that nobody has needed yet: whole, or of which slice.

    Attributes:
      eqn: that makes it.
      operand: of that: a value, or a `Shard`, which is gathered before it becomes larger.
      aval: its type.
    """

    eqn: JaxprEqn
    operand: Any
    aval: Any

    @property
    def in_shards(self) -> bool:
        return isinstance(self.operand, Shard)

    def of(self, shape: tuple[int, ...], operand: Any) -> Any:
        return compat.bind(self.eqn, {**self.eqn.params, "shape": shape}, [operand])[0]


@dataclass(eq=False)
class _Raveled:
    """All entries of a shard in one dimension, which nobody has needed yet in their order."""

    eqn: JaxprEqn
    operand: Shard


class Shards(Interpreter):
    """Evaluates a step on one device, with some values in shards.

    Args:
      closed: the step, after all passes that change what it computes.
      inputs: how each input is held; None: whole (a replicated one) or this device's own.
      varying: the variables whose values differ between devices.
      outputs: for each output how it is wanted: a layout, ``"whole"``, or ``"any"`` (in shards if it was asked for).
      devices: how many.

    Attributes:
      gathered: arrays gathered for an operation that can't work on slices, other than stored ones.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[Layout | None],
        varying: set[Any],
        outputs: Sequence[Layout | str],
        devices: int,
    ):
        super().__init__(
            {
                shard_p: self._mark,
                all_reduce_p: self._reduce,
                compat.pvary_p: self._cast,
                p.broadcast_in_dim_p: self._broadcast,
            }
        )
        self.rewritten = {shard_p, all_reduce_p}
        self.closed, self.inputs, self.varying, self.outputs = closed, inputs, varying, outputs
        self.devices = devices
        self.gathered: list[Gathered] = []
        self._dims = {a.shape: how.dim for a, how in zip(closed.in_avals, inputs, strict=True) if how}
        self._scattered = _destined(closed, outputs, self._dim)
        self._backward = False

    def __call__(self, *args: Any) -> tuple[list[Any], list[Layout | None]]:
        """The outputs as this device holds them, and how."""
        avals = self.closed.in_avals
        held = [
            Shard(x, aval, how.dim, stored=True) if how else x
            for x, aval, how in zip(args, avals, self.inputs, strict=True)
        ]
        outs, layouts = [], []
        for x, want in zip(self.run(self.closed, *held), self.outputs, strict=True):
            how = want if isinstance(want, Layout) else None
            if want == "any" and isinstance(x, Shard) and x.asked:
                how = self._layout(x.aval.shape, x.dim)
            outs.append(self.whole(x) if how is None else self.local(x, how.dim))
            layouts.append(how)
        return outs, layouts

    # --- between whole and sliced

    def _dim(self, shape: tuple[int, ...]) -> int | None:
        """Along which dimension a value of this shape is split."""
        if shape in self._dims:
            return self._dims[shape]
        how = choose(shape, self.devices)
        return how and how.dim

    def _layout(self, shape: tuple[int, ...], dim: int) -> Layout:
        return layout(dim, -shape[dim] % self.devices)

    def _rows(self, size: int) -> int:
        """Length of a slice."""
        return -(-size // self.devices)

    def _sliced_shape(self, shape: Sequence[int], dim: int) -> tuple[int, ...]:
        return (*shape[:dim], self._rows(shape[dim]), *shape[dim + 1 :])

    def whole(self, x: Any) -> Any:
        """The value as one array."""
        if isinstance(x, _Fill):
            return _typed(x.of(x.aval.shape, self.whole(x.operand)), x.aval)
        if isinstance(x, _Raveled):
            return compat.bind(x.eqn, x.eqn.params, [self._whole_for(x.eqn, x.operand)])[0]
        if not isinstance(x, Shard):
            return x
        if x.made is not None:
            source, eqn = x.made
            return _typed(compat.bind(eqn, eqn.params, [self.whole(source)])[0], x.aval)
        if self._backward not in x.wholes:
            x.wholes[self._backward] = gather_shards(x.local, x.dim, x.aval.shape[x.dim])
        return _typed(x.wholes[self._backward], x.aval)

    def local(self, x: Any, dim: int) -> Any:
        """This device's slice along `dim`."""
        if isinstance(x, _Fill):
            return _vary(self._fill(x, dim))
        if isinstance(x, _Raveled):
            x = self.whole(x)
        if isinstance(x, Shard):
            if x.dim == dim:
                return x.local
            x = self.whole(x)
        # A scalar, or an operand that is broadcast along the dimension, as elementwise operations do.
        return _vary(x if jnp.ndim(x) == 0 or jnp.shape(x)[dim] == 1 else self._slice(x, dim))

    def _slice(self, x: Any, dim: int) -> Any:
        rows = self._rows(x.shape[dim])
        if pad := rows * self.devices - x.shape[dim]:
            x = jnp.pad(x, [(0, pad if d == dim else 0) for d in range(x.ndim)])
        return lax.dynamic_slice_in_dim(x, lax.axis_index(AXIS) * rows, rows, dim)

    def _fill(self, fill: _Fill, dim: int) -> Any:
        operand, dims = fill.operand, fill.eqn.params["broadcast_dimensions"]
        shape = operand.aval.shape if fill.in_shards else operand.shape
        if dim in dims and shape[dims.index(dim)] > 1:
            operand = self.local(operand, dims.index(dim))
        operand = self.whole(operand)
        return fill.of(self._sliced_shape(fill.aval.shape, dim), operand)

    # --- equations

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        before = self._backward
        self._backward = before or compat.in_backward_pass(eqn)
        try:
            return self._eval(eqn, args)
        finally:
            self._backward = before

    def _eval(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        if any(isinstance(a, _Raveled) for a in args) and not called(eqn):
            if eqn.primitive is p.dot_general_p and (out := self._inner_product(eqn, args)):
                return out
            args = [self.whole(a) if isinstance(a, _Raveled) else a for a in args]
        if eqn.primitive in self.rules:
            return super().eval_eqn(eqn, *args)
        shards = any(isinstance(a, Shard) or (isinstance(a, _Fill) and a.in_shards) for a in args)
        if not shards and not self.touches(eqn):
            return compat.bind(eqn, eqn.params, list(map(self.whole, args)))
        if body := called(eqn):
            return self.run(body, *args)
        name = eqn.primitive.name
        rule = {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name)
        if name in _CHECKPOINT:
            rule = self._checkpoint
        if rule:
            return rule(eqn, args)
        if not shards:
            return super().eval_nested(eqn, *map(self.whole, args))
        return self._on_slices(eqn, args) or self._on_wholes(eqn, args)

    def _on_wholes(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        return compat.bind(eqn, eqn.params, [self._whole_for(eqn, a) for a in args])

    def _whole_for(self, eqn: JaxprEqn, x: Any) -> Any:
        """The whole value, and a note if it is not the state's own."""
        a = x.operand if isinstance(x, _Fill) else x
        if isinstance(a, Shard) and not a.stored and not a.wholes:
            size = a.aval.size * a.aval.dtype.itemsize
            self.gathered.append(Gathered(eqn.primitive.name, a.aval.shape, size))
        return self.whole(x)

    def _on_slices(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
        """The equation's results from slices, or None if they can't be had so."""
        if any(map(self._varies, eqn.invars)):
            return None
        if eqn.primitive.name in ELEMENTWISE:
            return self._elementwise(eqn, args)
        rule = _RULES.get(eqn.primitive.name)
        args = [self.whole(a) if isinstance(a, _Fill) else a for a in args]
        return rule(self, eqn, args) if rule and any(isinstance(a, Shard) for a in args) else None

    def _elementwise(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
        first = next((a for a in args if isinstance(a, Shard)), None)
        out: Any = eqn.outvars[0].aval
        dim = first.dim if first else self._dim(out.shape)
        if dim is None:
            return None
        outs = compat.bind(eqn, eqn.params, [self.local(a, dim) for a in args])
        if first and len(args) == 1 and out.dtype.itemsize >= first.aval.dtype.itemsize:
            return [self._like(first, eqn, outs[0], dim)]
        return [self._result(v, x, dim) for v, x in zip(eqn.outvars, outs, strict=True)]

    def _inner_product(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
        """Of two arrays of which at least one is raveled (``jnp.vdot``): the sum of the slices' products."""
        like = next(a.operand for a in args if isinstance(a, _Raveled))
        shape, dim = like.aval.shape, like.dim
        parts = []
        for a, var in zip(args, eqn.invars, strict=True):
            if isinstance(a, _Raveled) and (a.operand.aval.shape, a.operand.dim) == (shape, dim):
                part = self._zero_padded(a.operand)
            elif isinstance(a, (Shard, _Raveled)) or var.aval.shape != (_product(shape),):  # type: ignore[attr-defined]
                return None
            else:
                part = self.local(self.whole(a).reshape(shape), dim)
            parts.append(part.reshape(-1))
        if any(map(self._varies, eqn.invars)):
            return None
        (part,) = compat.bind(eqn, eqn.params, parts)
        return [_typed(_across(_vary(part), "sum"), eqn.outvars[0].aval)]

    def _zero_padded(self, x: Shard) -> Any:
        """This device's slice with zeros for padding."""
        size, rows = x.aval.shape[x.dim], x.local.shape[x.dim]
        if not size % self.devices:
            return x.local
        at = lax.axis_index(AXIS) * rows + lax.broadcasted_iota(jnp.int32, x.local.shape, x.dim)
        return jnp.where(at < size, x.local, jnp.zeros_like(x.local))

    def _result(self, var: Any, local: Any, dim: int) -> Shard:
        return Shard(local, var.aval, dim)

    def _like(self, x: Shard, eqn: JaxprEqn, local: Any, dim: int) -> Shard:
        """The result of an operation on one shard that can as well be done once it is gathered."""
        stored = x.stored and eqn.primitive.name in _FORM
        return Shard(local, eqn.outvars[0].aval, dim, stored, made=(x, eqn))

    # --- where shards begin

    def _mark(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        asked = eqn.params["role"] in ("asked", "state")
        if isinstance(x, Shard) and eqn.params["role"] == "gradient":
            x = self._as_kept(eqn, x)
        if isinstance(x, Shard):
            return Shard(x.local, x.aval, x.dim, x.stored, asked, x.made, x.wholes)
        aval: Any = eqn.outvars[0].aval
        dim = self._dim(aval.shape)
        if dim is None or self._varies(eqn.invars[0]):
            return x
        return Shard(self.local(x, dim), aval, dim, asked=asked)

    def _as_kept(self, eqn: JaxprEqn, x: Shard) -> Shard:
        """A gradient, split as the state that it meets is: else all of the state would have to follow it."""
        dim = self._dims.get(x.aval.shape, x.dim)
        if x.stored or dim == x.dim:
            return x
        return Shard(self.local(self._whole_for(x.made[1] if x.made else eqn, x), dim), x.aval, dim)

    def _reduce(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        x = self.whole(x)
        aval: Any = eqn.outvars[0].aval
        destined = self._scattered.get(id(eqn))
        dim = None
        if destined is not None and eqn.params["axes"] == (AXIS,):
            dim = self._dim(aval.shape) if destined.dim is None else destined.dim
        if dim is None or aval.size < self.devices:
            return all_reduce_p.bind(x, **eqn.params)
        return Shard(reduce_shard(x, dim, eqn.params["op"], eqn.params["wire"]), aval, dim)

    def _cast(self, _: Interpreter, eqn: JaxprEqn, x: Any) -> Any:
        if isinstance(x, Shard):
            return Shard(x.local, eqn.outvars[0].aval, x.dim, x.stored, x.asked, x.made, x.wholes)
        if isinstance(x, _Fill):
            return _Fill(x.eqn, x.operand, eqn.outvars[0].aval)
        return compat.bind(eqn, eqn.params, [self.whole(x)])[0]

    def _broadcast(self, _: Interpreter, eqn: JaxprEqn, x: Any, *dynamic: Any) -> Any:
        aval: Any = eqn.outvars[0].aval
        if isinstance(x, Shard) and not dynamic and aval.size == x.aval.size:
            dim = eqn.params["broadcast_dimensions"][x.dim]
            (out,) = compat.bind(eqn, {**eqn.params, "shape": self._sliced_shape(aval.shape, dim)}, [x.local])
            return self._like(x, eqn, out, dim)
        if dynamic or aval.size < self.devices or self._varies(eqn.invars[0]) or isinstance(x, _Fill):
            return compat.bind(eqn, eqn.params, [self.whole(x), *dynamic])[0]
        return _Fill(eqn, x if isinstance(x, Shard) else jnp.asarray(x), aval)

    def _varies(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in self.varying

    # --- control flow

    def _traced(
        self,
        closed: ClosedJaxpr,
        args: Sequence[Any],
        avals: Sequence[Any],
        dims: Sequence[int | None],
        wants: Sequence[int | str | None],
    ) -> _Body:
        """`closed` on slices.

        Args:
          closed: a body of control flow.
          args: what it is given, or slices of that.
          avals: the types of that, sliced.
          dims: along which each input is split; None: it is whole.
          wants: how each output is to come out: split along a dimension, None: whole, ``"any"``: as it comes.
        """
        body = _Body([], [], {})
        backward = self._backward

        def run(*xs: Any) -> list[Any]:
            body.dims.clear()
            body.same.clear()
            held = [
                x if dim is None else Shard(x, aval, dim, stored=a.stored)
                for x, a, aval, dim in zip(xs, args, closed.in_avals, dims, strict=True)
            ]
            outs = []
            for i, (x, want) in enumerate(zip(self.run(closed, *held), wants, strict=True)):
                natural = x.dim if isinstance(x, Shard) else None
                dim = natural if isinstance(want, str) else want
                body.dims.append(dim)
                out = _typed(self.whole(x), closed.out_avals[i]) if dim is None else self.local(x, dim)
                if isinstance(x, Shard) and dim is not None:
                    body.same[i] = next((j for j, y in enumerate(xs) if y is out), -1)
                outs.append(out)
            body.gathers[:] = [isinstance(x, Shard) and bool(x.wholes) for x in held]
            return outs

        noted = len(self.gathered)
        body.jaxpr = retrace(run, avals)
        body.noted = self.gathered[noted:]
        del self.gathered[noted:]
        self._backward = backward
        return body

    def _accept(self, body: _Body) -> Callable[..., Sequence[Any]]:
        self.gathered += body.noted
        return jaxpr_as_fun(body.jaxpr)

    def _held(self, args: Sequence[Any]) -> tuple[list[Any], list[int | None]]:
        """What control flow is given, and along which dimension it is split."""
        values = [a.local if isinstance(a, Shard) else self.whole(a) for a in args]
        return values, [a.dim if isinstance(a, Shard) else None for a in args]

    def _outs(self, variables: Sequence[Any], values: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        return [
            x if dim is None else self._result(v, x, dim) for v, x, dim in zip(variables, values, dims, strict=True)
        ]

    def _scan(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        first, count = compat.scan_split(eqn.params)
        rest = first + count
        closed = eqn.params["jaxpr"]
        args = list(args)
        args[rest:] = [self.whole(a) if isinstance(a, Shard) and not a.dim else a for a in args[rest:]]
        wants: list[int | str | None] = ["any"] * len(closed.out_avals)
        while True:
            values, dims = self._held(args)
            dims[rest:] = [None if d is None else d - 1 for d in dims[rest:]]
            avals = [_type(x, aval, dim) for x, aval, dim in zip(values, closed.in_avals, dims, strict=True)]
            avals[rest:] = [
                a.update(shape=x.shape[1:]) if d is not None else a
                for a, x, d in zip(avals[rest:], values[rest:], dims[rest:], strict=True)
            ]
            body = self._traced(closed, args, avals, dims, wants)
            # What each turn would gather anew (the weights of a recurrence) is gathered once, before the loop; but for
            # a loop over microbatches: each of its turns gathers next to the use.
            constants = [i for i in range(rest) if body.gathers[i] and not _differentiates(closed.jaxpr)]
            for i in constants:
                args[i] = self._whole_for(eqn, args[i])
                if i >= first:
                    wants[i - first] = None
            # A carry that the body leaves in shards starts in shards.
            start = [
                (first + i, d) for i, d in enumerate(body.dims[:count]) if d is not None and dims[first + i] is None
            ]
            for i, d in start:
                aval = closed.in_avals[i]
                args[i] = Shard(self.local(args[i], d), aval, d)
            if constants or start:
                continue
            if body.dims[:count] == dims[first:rest]:
                break
            wants[:count] = dims[first:rest]
        run = self._accept(body)
        same = {i: j for i, j in body.same.items() if i >= count and j >= rest}  # slices that go out as they came in

        def turn(carry: Sequence[Any], xs: Sequence[Any]) -> Any:
            outs = run(*values[:first], *carry, *xs)
            return tuple(outs[:count]), tuple(x for i, x in enumerate(outs) if i >= count and i not in same)

        settings = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(turn, tuple(values[first:rest]), tuple(values[rest:]), **settings)
        made = iter(ys)
        ys = [args[same[i]].local if i in same else next(made) for i in range(count, len(wants))]
        out_dims = [*body.dims[:count], *(None if d is None else d + 1 for d in body.dims[count:])]
        outs = self._outs(eqn.outvars, [*carry, *ys], out_dims)
        for i in same:
            outs[i].stored = args[same[i]].stored
        return outs

    def _start(
        self, args: list[Any], dims: Sequence[int | None], outs: Sequence[int | None], first: int, avals: Sequence[Any]
    ) -> bool:
        """Put those carries in shards that the body leaves in shards; whether there are any."""
        changed = [(first + i, dim) for i, dim in enumerate(outs) if dim is not None and dims[first + i] is None]
        for i, dim in changed:
            args[i] = Shard(self.local(args[i], dim), avals[i], dim)
        return bool(changed)

    def _while(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond, closed = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
        first = n_cond + n_body
        if self._varies(cond.jaxpr.outvars[0]):
            return self._on_wholes(eqn, args)  # devices that don't take the same turns can't meet
        args = list(args)
        wants: list[int | str | None] = ["any"] * len(closed.out_avals)
        while True:
            values, dims = self._held(args)
            given = [
                _type(x, aval, d) for x, aval, d in zip(values[n_cond:], closed.in_avals, dims[n_cond:], strict=True)
            ]
            body = self._traced(closed, args[n_cond:], given, dims[n_cond:], wants)
            constants = [n_cond + i for i, gathers in enumerate(body.gathers) if gathers]
            for i in constants:
                args[i] = self._whole_for(eqn, args[i])
                if i >= first:
                    wants[i - first] = None
            start = self._start(args, dims, body.dims, first, [None] * n_cond + closed.in_avals)
            if constants or start:
                continue
            if body.dims == dims[first:]:
                break
            wants = list(dims[first:])
        asked = [*values[:n_cond], *values[first:]]
        asked_dims = [*dims[:n_cond], *dims[first:]]
        avals = [_type(x, aval, d) for x, aval, d in zip(asked, cond.in_avals, asked_dims, strict=True)]
        given = [*args[:n_cond], *args[first:]]
        again = self._accept(self._traced(cond, given, avals, asked_dims, [None]))
        run = self._accept(body)
        outs = lax.while_loop(
            lambda carry: again(*values[:n_cond], *carry)[0],
            lambda carry: tuple(run(*values[n_cond:first], *carry)),
            tuple(values[first:]),
        )
        return self._outs(eqn.outvars, outs, body.dims)

    def _cond(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        which, *operands = args
        if self._varies(eqn.invars[0]):
            return self._on_wholes(eqn, args)  # devices that take different branches can't meet in one
        values, dims = self._held(operands)
        branches = eqn.params["branches"]
        avals = [_type(x, aval, d) for x, aval, d in zip(values, branches[0].in_avals, dims, strict=True)]
        bodies = [self._traced(b, operands, avals, dims, ["any"] * len(eqn.outvars)) for b in branches]
        wants = [next((d for d in ds if d is not None), None) for ds in zip(*(b.dims for b in bodies), strict=True)]
        bodies = [
            body if body.dims == wants else self._traced(b, operands, avals, dims, wants)
            for b, body in zip(branches, bodies, strict=True)
        ]
        index = jnp.asarray(self.whole(which), jnp.int32)
        outs = lax.switch(index, [self._accept(b) for b in bodies], *values)
        return self._outs(eqn.outvars, outs, wants)

    def _checkpoint(self, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        closed = ClosedJaxpr(eqn.params["jaxpr"], ())
        values, dims = self._held(args)
        avals = [_type(x, aval, d) for x, aval, d in zip(values, closed.in_avals, dims, strict=True)]
        body = self._traced(closed, args, avals, dims, ["any"] * len(eqn.outvars))
        self.gathered += body.noted
        if body.jaxpr.consts:
            raise NotImplementedError("constants inside jax.checkpoint")
        outs = compat.bind(eqn, {**eqn.params, "jaxpr": body.jaxpr.jaxpr}, values)
        return self._outs(eqn.outvars, outs, body.dims)


@dataclass
class _Body:
    """A body of control flow on slices.

    Attributes:
      dims: along which each output is split.
      gathers: whether it gathers an input.
      same: outputs that are inputs.
    """

    dims: list[int | None]
    gathers: list[bool]
    same: dict[int, int]
    jaxpr: Any = None
    noted: list[Gathered] = field(default_factory=list)


def _type(x: Any, aval: Any, dim: int | None) -> Any:
    return aval if dim is None else jax.typeof(x)


def _vary(x: Any) -> Any:
    x = jnp.asarray(x) if not hasattr(x, "aval") else x
    if compat.checking_types() and AXIS not in compat.varying_axes(jax.typeof(x)):
        return lax.pcast(x, AXIS, to="varying")
    return x


def _typed(x: Any, aval: Any) -> Any:
    """`x` typed as `aval` is."""
    return _vary(x) if compat.checking_types() and AXIS in compat.varying_axes(aval) else x


def _differentiates(jaxpr: Jaxpr) -> bool:
    """Whether a body takes gradients itself."""
    passes = {compat.in_backward_pass(eqn) for eqn in jaxpr.eqns}
    return len(passes) > 1 or any(map(_differentiates, (s for eqn in jaxpr.eqns for s in subjaxprs(eqn))))


# --- operations that know about the split dimension

_Rule = Callable[[Shards, JaxprEqn, Sequence[Any]], Sequence[Any] | None]


def _reduction(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    x, axes = args[0], eqn.params["axes"]
    var: Any = eqn.outvars[0]
    name = eqn.primitive.name.removeprefix("reduce_")
    if x.dim not in axes:
        if name in ("argmax", "argmin"):
            pass
        (out,) = compat.bind(eqn, eqn.params, [x.local])
        return [s._result(var, out, x.dim - sum(a < x.dim for a in axes))]
    if name not in _IDENTITY:
        return None
    local = x.local
    size = x.aval.shape[x.dim]
    if size % s.devices:
        rows = local.shape[x.dim]
        at = lax.axis_index(AXIS) * rows + lax.broadcasted_iota(jnp.int32, local.shape, x.dim)
        local = jnp.where(at < size, local, jnp.asarray(_IDENTITY[name](local.dtype), local.dtype))
    (part,) = compat.bind(eqn, eqn.params, [local])
    return [_typed(_across(_vary(part), name), var.aval)]


def _lowest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


_IDENTITY: dict[str, Callable[[Any], Any]] = {
    "sum": lambda _: 0, "prod": lambda _: 1, "max": _lowest, "min": _highest, "and": lambda _: True,
    "or": lambda _: False,
}  # fmt: skip


def _across(part: Any, name: str) -> Any:
    """The reduction of the devices' parts, on each."""
    if part.dtype == bool:
        return _across(part.astype(jnp.int32), "min" if name in ("and", "min", "prod") else "max") > 0
    match name:
        case "sum":
            return all_reduce(part, op="sum")
        case "max":
            return lax.pmax(part, AXIS)
        case "min":
            return lax.pmin(part, AXIS)
    every = compat.all_gather_replicated(part, AXIS)
    if name == "prod":
        return jnp.prod(every, 0).astype(part.dtype)
    every = jnp.moveaxis(every, 0, -1)  # bitwise and, or of integers
    reduce = jnp.bitwise_and.reduce if name == "and" else jnp.bitwise_or.reduce
    return reduce(every, axis=-1)


def _unmoved(axis: str) -> _Rule:
    """An operation along one dimension, or some, that is not the split one."""

    def rule(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
        axes = eqn.params[axis]
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        dim = next(a.dim for a in args if isinstance(a, Shard))
        if dim in axes:
            return None
        outs = compat.bind(eqn, eqn.params, [s.local(a, dim) for a in args])
        return [s._result(v, x, dim) for v, x in zip(eqn.outvars, outs, strict=True)]

    return rule


def _transpose(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    (out,) = compat.bind(eqn, eqn.params, [args[0].local])
    return [s._like(args[0], eqn, out, eqn.params["permutation"].index(args[0].dim))]


def _squeeze(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    (out,) = compat.bind(eqn, eqn.params, [args[0].local])
    dim = args[0].dim - sum(d < args[0].dim for d in eqn.params["dimensions"])
    return [s._like(args[0], eqn, out, dim)]


def _reshape(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    x, var = args[0], eqn.outvars[0]
    shape = var.aval.shape  # type: ignore[attr-defined]
    size = x.aval.shape[x.dim]
    dim = _same_place(x.aval.shape, x.dim, shape)
    if len(args) > 1 or eqn.params["dimensions"] is not None:
        return None
    # The same dimension, or one that starts with it or that it starts with, and is cut in the same places.
    if dim is None or (shape[dim] != size and (size % s.devices or shape[dim] % s.devices)):
        return [_Raveled(eqn, x)] if len(shape) == 1 else None
    new = s._sliced_shape(shape, dim)
    (out,) = compat.bind(eqn, {**eqn.params, "new_sizes": new}, [x.local])
    return [s._like(x, eqn, out, dim)]


def _same_place(shape: Sequence[int], dim: int, other: Sequence[int]) -> int | None:
    """The dimension of another shape of the same entries that starts where `dim` of this one does."""
    before = _product(shape[:dim])
    return next((d for d in range(len(other)) if _product(other[:d]) == before and other[d] > 1), None)


def _product(sizes: Sequence[int]) -> int:
    out = 1
    for n in sizes:
        out *= n
    return out


def _slice(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    x, dim = args[0], args[0].dim
    start, limit, strides = (eqn.params[k] for k in ("start_indices", "limit_indices", "strides"))
    if start[dim] or limit[dim] != x.aval.shape[dim] or (strides and strides[dim] != 1):
        return None
    limit = (*limit[:dim], x.local.shape[dim], *limit[dim + 1 :])
    (out,) = compat.bind(eqn, {**eqn.params, "limit_indices": limit}, [x.local])
    return [s._result(eqn.outvars[0], out, dim)]


def _pad(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    x, value = args
    if not isinstance(x, Shard) or any(eqn.params["padding_config"][x.dim]):
        return None
    (out,) = compat.bind(eqn, eqn.params, [x.local, _vary(s.whole(value))])
    return [s._result(eqn.outvars[0], out, x.dim)]


def _dot(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    """A product whose split dimension is contracted: sums of the slices' products."""
    var: Any = eqn.outvars[0]
    (left, right), _ = eqn.params["dimension_numbers"]
    shards = [(x, dims) for x, dims in zip(args, (left, right), strict=True) if isinstance(x, Shard)]
    at = {dims.index(x.dim) if x.dim in dims else None for x, dims in shards}
    if len(at) > 1 or None in at:
        return None
    if len(shards) == 1 and var.aval.size > shards[0][0].aval.size:
        return None  # to reduce it would be more than to gather
    (i,) = at
    parts = [
        s._zero_padded(x) if isinstance(x, Shard) else s.local(x, dims[i])
        for x, dims in zip(args, (left, right), strict=True)
    ]
    (part,) = compat.bind(eqn, eqn.params, parts)
    return [_typed(_across(_vary(part), "sum"), var.aval)]


def _scatter(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    """Entries along another dimension are replaced (``x.at[i].set(row)``)."""
    x, indices, updates = args
    numbers = eqn.params["dimension_numbers"]
    moved = {*numbers.inserted_window_dims, *numbers.operand_batching_dims, *numbers.scatter_dims_to_operand_dims}
    if not isinstance(x, Shard) or x.dim in moved:
        return None
    window = [d for d in range(len(x.aval.shape)) if d not in numbers.inserted_window_dims]
    dim = numbers.update_window_dims[window.index(x.dim)]
    if eqn.invars[2].aval.shape[dim] != x.aval.shape[x.dim]:  # type: ignore[attr-defined]
        return None
    (out,) = compat.bind(eqn, eqn.params, [x.local, _vary(s.whole(indices)), s.local(updates, dim)])
    return [s._result(eqn.outvars[0], out, x.dim)]


def _gather(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    """Entries along another dimension are picked (``x[i]``)."""
    x, indices = args
    numbers, sizes = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if not isinstance(x, Shard) or x.dim in gone or sizes[x.dim] != x.aval.shape[x.dim]:
        return None
    dim = numbers.offset_dims[[d for d in range(len(sizes)) if d not in gone].index(x.dim)]
    sizes[x.dim] = x.local.shape[x.dim]
    (out,) = compat.bind(eqn, {**eqn.params, "slice_sizes": tuple(sizes)}, [x.local, _vary(s.whole(indices))])
    return [s._result(eqn.outvars[0], out, dim)]


def _dynamic_slice(s: Shards, eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any] | None:
    x, *starts = args
    sizes = list(eqn.params["slice_sizes"])
    if not isinstance(x, Shard) or sizes[x.dim] != x.aval.shape[x.dim]:
        return None
    sizes[x.dim] = x.local.shape[x.dim]
    params = {**eqn.params, "slice_sizes": tuple(sizes)}
    (out,) = compat.bind(eqn, params, [x.local, *(_vary(s.whole(i)) for i in starts)])
    return [s._result(eqn.outvars[0], out, x.dim)]


_RULES: Mapping[str, _Rule] = {
    **{f"reduce_{name}": _reduction for name in _IDENTITY},
    "argmax": _reduction, "argmin": _reduction,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _unmoved("axis")),
    "rev": _unmoved("dimensions"), "sort": _unmoved("dimension"), "concatenate": _unmoved("dimension"),
    "transpose": _transpose, "squeeze": _squeeze, "reshape": _reshape, "slice": _slice, "pad": _pad,
    "dot_general": _dot,
    "gather": _gather, "dynamic_slice": _dynamic_slice, "scatter": _scatter,
}  # fmt: skip


# --- which reductions of gradients become reduce-scatters


class _Want(NamedTuple):
    """How the uses of a value want it.

    Attributes:
      shards: they can do with slices, and lead to a mark of `jaxdist.zero`.
      never_whole: of level 2 or 3.
      whole: some need it whole.
      dim: along which they split it.
    """

    shards: bool = False
    never_whole: bool = False
    whole: bool = False
    dim: int | None = None

    def __or__(self, other: _Want) -> _Want:
        return _Want(
            self.shards or other.shards,
            self.never_whole or other.never_whole,
            self.whole or other.whole,
            other.dim if self.dim is None else self.dim,
        )


_NOTHING = _Want()
_SHAPED = {"reshape", "squeeze", "broadcast_in_dim", "slice", "pad", "concatenate", "expand_dims", "rev"}
_REDUCED = {"argmax", "argmin", *(f"reduce_{name}" for name in _IDENTITY)}


def _destined(
    closed: ClosedJaxpr, outputs: Sequence[Layout | str], dim_of: Callable[[tuple[int, ...]], int | None]
) -> dict[int, _Want]:
    """The reductions, by the id of their equation, whose result is to come out in shards."""
    found: dict[int, _Want] = {}
    wants = [
        _Want(shards=True, never_whole=True, dim=how.dim) if isinstance(how, Layout) else _Want(whole=how == "any")
        for how in outputs
    ]
    _wanted(closed.jaxpr, wants, found, dim_of)
    return {at: want for at, want in found.items() if want.shards and (want.never_whole or not want.whole)}


def _wanted(jaxpr: Jaxpr, outs: Sequence[_Want], found: dict[int, _Want], dim_of: Any) -> list[_Want]:
    """What is wanted of the inputs of `jaxpr`, from what is wanted of its outputs."""
    env: dict[Any, _Want] = {}

    def want(atom: Any, how: _Want) -> None:
        if not isinstance(atom, Literal) and how != _NOTHING:
            env[atom] = env.get(atom, _NOTHING) | how

    for var, how in zip(jaxpr.outvars, outs, strict=True):
        want(var, how)
    for eqn in reversed(live(jaxpr)):
        hows = _through(eqn, [env.get(v, _NOTHING) for v in eqn.outvars], found, dim_of)
        for atom, how in zip(eqn.invars, hows, strict=True):
            want(atom, how)
    return [env.get(v, _NOTHING) for v in jaxpr.invars]


def _through(eqn: JaxprEqn, outs: list[_Want], found: dict[int, _Want], dim_of: Any) -> Sequence[_Want]:
    name, n = eqn.primitive.name, len(eqn.invars)
    first = outs[0] if outs else _NOTHING
    if eqn.primitive is all_reduce_p:
        found[id(eqn)] = found.get(id(eqn), _NOTHING) | first
        return [_NOTHING]
    if eqn.primitive is shard_p:
        aval: Any = eqn.invars[0].aval
        return [_Want(True, eqn.params["level"] > 1, first.whole, dim_of(aval.shape))]
    if name in ELEMENTWISE:
        every = _NOTHING
        for out in outs:
            every |= out
        return [every] * n
    if name == "transpose":
        dim = first.dim
        return [first._replace(dim=None if dim is None else eqn.params["permutation"][dim])]
    if name == "reshape" and first.dim is not None:
        given, made = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape  # type: ignore[attr-defined]
        return [first._replace(dim=_same_place(made, first.dim, given))] * n
    if name in _SHAPED:
        return [first._replace(dim=None)] * n
    if name in _REDUCED:
        return [_NOTHING] * n
    if body := called(eqn):
        return _wanted(body.jaxpr, outs, found, dim_of)
    if name in _CHECKPOINT:
        return _wanted(eqn.params["jaxpr"], outs, found, dim_of)
    if name == "cond":
        hows = [_NOTHING] * (n - 1)
        for branch in eqn.params["branches"]:
            hows = [a | b for a, b in zip(hows, _wanted(branch.jaxpr, outs, found, dim_of), strict=True)]
        return [_NOTHING, *hows]
    if name == "scan":
        consts, carries = compat.scan_split(eqn.params)
        ys = [w._replace(dim=w.dim - 1 if w.dim else None) for w in outs[carries:]]
        body = eqn.params["jaxpr"].jaxpr
        hows = _fixpoint(lambda carry: _wanted(body, [*carry, *ys], found, dim_of), outs[:carries], consts)
        return [
            *hows[: consts + carries],
            *(w._replace(dim=None if w.dim is None else w.dim + 1) for w in hows[consts + carries :]),
        ]
    if name == "while":
        skipped, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body = eqn.params["body_jaxpr"].jaxpr
        return [_NOTHING] * skipped + _fixpoint(lambda carry: _wanted(body, carry, found, dim_of), outs, consts)
    return [_Want(whole=True)] * n


def _fixpoint(run: Callable[[list[_Want]], list[_Want]], carry: list[_Want], first: int) -> list[_Want]:
    while True:
        hows = run(carry)
        joined = [a | b for a, b in zip(carry, hows[first : first + len(carry)], strict=True)]
        if joined == carry:
            return hows
        carry = joined
