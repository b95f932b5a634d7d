"""Emit: from settled placements, the program of one device, traced once."""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from jaxdist import compat
from jaxdist.communicators import exchange
from jaxdist.ir.operations import SHAPE_ONLY
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, reduce_shard_p
from jaxdist.mesh import NAMES
from jaxdist.placements.model import values
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import Propagation
from jaxdist.placements.model.values import REPLICATED, Form, Partial, Split, form, is_narrow, local_shape, wide


class Emitter:
    """Evaluate a placed block on the values that one device holds."""

    def __init__(
        self,
        placed: Propagation,
        compressible: Mapping[int, frozenset[int]] | None = None,
        compress: str | None = None,
        marks: bool = False,
    ):
        self.placed, self.n, self.axis = placed, placed.axis.size, placed.axis.name
        self.block, self.marks = placed.block, marks
        self._compressible, self._compress = compressible or {}, compress
        # A deferred value stays in `_makers`: each form is made when it is first taken, then kept in `_forms`. Others
        # are in `_forms`, in each form that this device has had: a conversion adds one. Only the whole of a `Split` of
        # state goes to `_fetched`, once for each pass, never to `_forms`. `propagate._Messages` must foretell this.
        self._forms: defaultdict[int, dict[Form, Any]] = defaultdict(dict)
        self._makers: dict[int, tuple[Callable[..., Any], Node]] = {}
        self._fetched: dict[tuple[int, bool], Any] = {}  # by value, and whether in the backward pass
        self._reshapes: dict[int, Node] = {}  # the makers of values that only reshape a value, perhaps a stored one
        self._backward = False

    def run(self, xs: Sequence[Any]) -> list[Any]:
        """Return the outputs in their placed forms, given inputs in theirs."""
        for i, value in self.block.constants.items():
            self._forms[i][REPLICATED] = value
        for i, target, x in zip(self.block.inputs, self.placed.in_forms, xs, strict=True):
            self._forms[i][target] = x
        for node, strategy in zip(self.block.nodes, self.placed.strategies, strict=True):
            self._backward = node.backward
            if strategy.make is not None:
                self._makers[node.outs[0]] = strategy.make, node
                for i, target in zip(node.ins, strategy.in_forms, strict=True):
                    if target is not None and isinstance(self.placed.placements[i], Partial):
                        self.take(i, target)  # as propagation says, for any slices made of it
                continue
            with node.named_in_errors():
                operands = [
                    self.take(i, target or REPLICATED) for i, target in zip(node.ins, strategy.in_forms, strict=True)
                ]
                assert strategy.run is not None
                outs = strategy.run(self, node, operands)
            if node.name in SHAPE_ONLY:
                self._reshapes[node.outs[0]] = node
            for i, placement, x in zip(node.outs, strategy.out_placements, outs, strict=True):
                whole = isinstance(placement, Split) and placement.whole
                self._forms[i][REPLICATED if whole else form(placement)] = x
                if isinstance(placement, Partial) and not isinstance(resolved := self.placed.placements[i], Partial):
                    self.take(i, form(resolved))  # once, before its uses
        return [self.take(i, target) for i, target in zip(self.block.outputs, self.placed.out_forms, strict=True)]

    def bind(self, node: Node, xs: Sequence[Any], params: Mapping[str, Any] | None = None) -> Sequence[Any]:
        """Bind the operation without its shardings, which name other meshes."""
        params = dict(node.eqn.params if params is None else params)
        params.update((k, None) for k in ("sharding", "out_sharding") if params.get(k) is not None)
        return compat.bind(node.eqn, params, xs)

    # --- forms

    def take(self, i: int, target: Form) -> Any:
        """Return this device's part of a value in a form; each conversion happens once.

        A form that exists is returned. A summand is one device's slice among zeros, which sends nothing, or the whole
        value on the first device. A deferred value is made in the form. A stored value is gathered for one pass
        (`_fetch`); everything else is converted (`_convert`).
        """
        forms = self._forms[i]
        if target in forms:
            return forms[target]
        if isinstance(target, Partial):
            split = next((f for f in forms if isinstance(f, Split) and f.outer == 1), None)
            if split is not None and REPLICATED not in forms:
                forms[target] = self._among_zeros(forms[split], split)
            else:
                forms[target] = self._counted_once(self.take(i, REPLICATED))
            return forms[target]
        if i in self._makers:
            make, node = self._makers[i]
            forms[target] = make(self, node, target)
            return forms[target]
        placement = self.placed.placements[i]
        if isinstance(placement, Split) and placement.of_state and target == REPLICATED and REPLICATED not in forms:
            return self._fetch(i, forms)
        forms[target] = self._convert(i, target, forms)
        return forms[target]

    def _fetch(self, i: int, forms: Mapping[Form, Any]) -> Any:
        """Gather a stored value for the forward pass, and again for the backward pass: it is not kept in between."""
        key = i, self._backward
        if key not in self._fetched:
            node = self._reshapes.get(i)  # a reshape of a value that may be there
            before = None if node is None else self._fetched.get((node.ins[0], self._backward))
            if node is not None and before is not None:
                self._fetched[key] = self.bind(node, [before])[0]
            else:
                self._fetched[key] = self._convert(i, REPLICATED, forms)
        return self._fetched[key]

    def _convert(self, i: int, target: Form, forms: Mapping[Form, Any]) -> Any:
        """Bring a value into a form in which this device does not have it yet: see `Infer.reshard` for the kinds."""
        aval, placed_form = self.block.avals[i], form(self.placed.placements[i])
        if isinstance(target, Split) and REPLICATED in forms:
            return self.cut(forms[REPLICATED], target)
        # From the form in which propagation has it; a summand that is added up at once exists only in its first form.
        source = next(f for f in (placed_form, *forms) if f in forms and isinstance(f, (Partial, Split)))
        if isinstance(target, Split):
            if not values.in_one_collective(source, target, self.n, aval.dtype):
                return self.cut(self.take(i, REPLICATED), target)
            if isinstance(source, Partial):
                return self._scatter(i, forms[source], source, target)
            return self._exchange(forms[source], source, target)
        if isinstance(source, Partial):
            return self._reduce(i, forms[source], source)
        return self._gather(forms[source], source, aval, self._gather_order(i))

    def _wire(self, i: int, dtype: Any) -> str | None:
        """Return the dtype in which to send a summand, if it is a compressible gradient."""
        if self._compress is None or i not in self._compressible.get(id(self.placed), ()):
            return None
        narrow = jnp.dtype(self._compress)  # 16-bit gradients' summands have 32 bits
        return self._compress if dtype.itemsize > narrow.itemsize or dtype == narrow else None

    def _reduce(self, i: int, x: Any, summand: Partial) -> Any:
        aval = self.block.avals[i]
        if not aval.size:
            return jnp.zeros(aval.shape, aval.dtype)
        axes = tuple(axis.name for axis in self.placed.axis.placed if axis.name in (*summand.unreduced_axes, self.axis))
        x, back = _summed(jnp.asarray(x), summand, aval.dtype)
        return back(all_reduce_p.bind(x, axes=axes, wire=self._wire(i, aval.dtype)))

    def _scatter(self, i: int, x: Any, summand: Partial, target: Split) -> Any:
        """Reduce a summand into slices; sums over other axes are then added up as slices."""
        aval = self.block.avals[i]
        wire = self._wire(i, aval.dtype)
        if not aval.size:
            return jnp.zeros(target.shape(aval.shape), aval.dtype)
        x, back = _summed(jnp.asarray(x), summand, aval.dtype)
        part = reduce_shard_p.bind(x, axes=(self.axis,), wire=wire, dim=target.dim, devices=self.n)
        if summand.unreduced_axes:
            part = all_reduce_p.bind(part, axes=summand.unreduced_axes, wire=wire)
        return back(part)

    def _gather_order(self, i: int) -> Sequence[int]:
        """Return the order of dimensions in which to gather a value, for its next user."""
        # XLA fuses a transpose into the product before it, but loops slowly over one after a
        # gather. Ten 1024 x 1024 layers at level 0 on two CPUs take 2.6 times as long without this.
        users = self.block.users.get(i, ())
        user = self.block.nodes[users[0]] if len(users) == 1 and self.block.uses[i] == 1 else None
        return user.eqn.params["permutation"] if user is not None and user.name == "transpose" else ()

    def _gather(self, x: Any, split: Split, aval: Any, order: Sequence[int] = ()) -> Any:
        if not aval.size:
            return jnp.zeros(aval.shape, aval.dtype)
        raw, back = _raw(x)
        if order and split.outer == 1 and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            whole = self.gather(raw.transpose(order), order.index(split.dim), split.size)
            # The user's transpose undoes this one, and XLA drops both.
            return back(whole.transpose(np.argsort(order)))
        d = split.dim
        # Block by block: of two blocks of 8 rows each of 2 devices has [2 * 4], gathers [2, 4] to [2, 8], and makes
        # [16] of it.
        raw = raw.reshape(*raw.shape[:d], split.outer, split.chunk, *raw.shape[d + 1 :]) if split.outer > 1 else raw
        dim = d + (split.outer > 1)
        whole = self.gather(raw, dim, split.size)
        if split.outer > 1:
            whole = whole.reshape(*whole.shape[:d], split.outer * split.size, *whole.shape[d + 2 :])
        return back(whole)

    def gather(self, x: Any, dim: int, size: int) -> Any:
        """Gather the slices of all devices along a dimension."""
        return gather_shards_p.bind(x, axes=(self.axis,), dim=dim, size=size, devices=self.n)

    def _exchange(self, x: Any, source: Split, target: Split) -> Any:
        raw, back = exchange.bits(x)
        return back(lax.all_to_all(raw, self.axis, split_axis=target.dim, concat_axis=source.dim, tiled=True))

    def _counted_once(self, x: Any) -> Any:
        """Turn a whole value into summands: the first device along this axis has it.

        Along unreduced axes each device would count it: there only zeros come here (`summands.linear`).
        """
        x = jnp.asarray(x)
        x = x.astype(wide(x.dtype))
        nothing = -jnp.zeros_like(x)  # -0.0 changes no number
        return jnp.where(self.index == 0, x, nothing)

    def _among_zeros(self, x: Any, split: Split) -> Any:
        """Turn a slice into a summand: the slice in its place."""
        shape = [split.chunk * self.n if d == split.dim else size for d, size in enumerate(x.shape)]
        whole = -jnp.zeros(shape, wide(x.dtype))
        whole = lax.dynamic_update_slice_in_dim(whole, x.astype(whole.dtype), self.index * split.chunk, split.dim)
        return lax.slice_in_dim(whole, 0, split.size, axis=split.dim)

    @functools.cached_property
    def index(self) -> Any:
        """The index of this device along the axis."""
        return lax.axis_index(self.axis)

    def positions(self, split: Split) -> Any:
        """Return each entry's position in the whole dimension; for padding, the one it copies."""
        row = lax.iota(np.int32, split.rows)
        position = self.index * split.chunk + (row if split.outer == 1 else row % split.chunk)
        if split.is_padded(self.n):
            position = jnp.minimum(position, split.size - 1)
        return position if split.outer == 1 else position + row // split.chunk * split.size

    def real(self, split: Split, rank: int) -> Any:
        """Return a mask of entries that are not padding, broadcastable to `rank` dimensions."""
        row = lax.iota(np.int32, split.rows)
        position = self.index * split.chunk + (row if split.outer == 1 else row % split.chunk)
        return (position < split.size).reshape([-1 if d == split.dim else 1 for d in range(rank)])

    def masked(self, x: Any, split: Split, identity: Any) -> Any:
        """Replace the padding of a slice by `identity`."""
        x = jnp.asarray(x)
        return jnp.where(self.real(split, x.ndim), x, jnp.asarray(identity, x.dtype))

    def cut(self, x: Any, split: Split) -> Any:
        """Cut this device's slice out of a whole value."""
        raw, back = _raw(x)
        d = split.dim
        if not raw.size:
            return back(jnp.zeros(split.shape(raw.shape), raw.dtype))
        shape = raw.shape
        blocks = raw.reshape(*shape[:d], split.outer, split.size, *shape[d + 1 :]) if split.outer > 1 else raw
        dim = d + (split.outer > 1)
        missing = split.chunk * self.n - split.size
        if missing > 0:
            last = lax.slice_in_dim(blocks, split.size - 1, split.size, axis=dim)
            filler = jnp.broadcast_to(last, (*blocks.shape[:dim], missing, *blocks.shape[dim + 1 :]))
            blocks = lax.concatenate([blocks, filler], dim)
        out = lax.dynamic_slice_in_dim(blocks, self.index * split.chunk, split.chunk, dim)
        return back(out.reshape(*shape[:d], split.rows, *shape[d + 1 :]))

    # --- across devices

    def across(self, x: Any, kind: str) -> Any:
        """Reduce over all devices with max, min, and or or; every device gets the result."""
        if x.dtype == bool:
            return self.across(x.astype(jnp.int32), "min" if kind in ("and", "min") else "max") > 0
        if not x.size:
            return x
        if kind in ("max", "min") and not jnp.iscomplexobj(x):
            # A NaN survives: communicators lower these by `exchange.extreme`.
            return (lax.pmax if kind == "max" else lax.pmin)(x, self.axis)
        whole = self.gather(x[None], 0, self.n)
        return functools.reduce(_JOINS[kind], [whole[i] for i in range(self.n)])

    def from_root(self, x: Any) -> Any:
        """Send the first device's value to every device."""
        raw, back = _raw(x)
        # As integers: a sum of floats makes 0.0 of -0.0, and may change a NaN.
        bits, whole = exchange.unsigned(raw)
        contribution = jnp.where(self.index == 0, bits, jnp.zeros_like(bits))
        return back(whole(all_reduce_p.bind(contribution, axes=(self.axis,), wire=None)))

    # --- bodies

    def body(self, placed: Propagation) -> ClosedJaxpr:
        """Return the program of a placed body, to bind control flow to."""
        inner = Emitter(placed, self._compressible, self._compress, self.marks)
        return inner.program(local_types(placed))

    def inlined(self, placed: Propagation, xs: Sequence[Any]) -> list[Any]:
        """Run a placed block as a part of this one: an owner's work, or a device's part of a stack.

        It sends nothing, so there is nothing to compress.
        """
        return Emitter(placed).run(xs)

    def program(self, types: Sequence[Any]) -> ClosedJaxpr:
        """Return the program of one device as a jaxpr."""

        def run(*xs: Any) -> list[Any]:
            try:
                return self.run(xs)
            finally:  # `jax.checking_leaks` looks for tracers that outlive their trace
                self._forms.clear()
                self._fetched.clear()
                self.__dict__.pop("index", None)

        # Axes with one device have no pass, and the user's own code may name them.
        alone = [(name, 1) for name in NAMES if all(name != axis.name for axis in self.placed.axis.mesh)]
        return jax.make_jaxpr(run, axis_env=[*alone, *self.placed.axis.placed])(*types)


_JOINS = {"max": lax.max, "min": lax.min, "and": lax.bitwise_and, "or": lax.bitwise_or}


def local_types(placed: Propagation) -> list[Any]:
    """Return the types that one device holds for a block's inputs."""
    types: list[Any] = []
    for aval, form_ in zip((placed.block.avals[i] for i in placed.block.inputs), placed.in_forms, strict=True):
        # Summands enter a body in the dtype in which they are kept until they are added up.
        dtype = wide(aval.dtype) if isinstance(form_, Partial) else aval.dtype
        weak = aval.weak_type and dtype == aval.dtype
        types.append(jax.ShapeDtypeStruct(local_shape(aval.shape, form_), dtype, weak_type=weak))
    return types


def _summed(x: Any, summand: Partial, dtype: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a summand in the type it is added in, and a function to convert the sum back."""
    return exchange.unsigned(x) if summand.bits else (x, lambda y: y.astype(dtype))


def _raw(x: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a value (of keys, their data) as numbers of a byte or more, and a function to convert back."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        impl = jax.random.key_impl(x)
        return jax.random.key_data(x), lambda y: jax.random.wrap_key_data(y, impl=impl)
    return exchange.bits(x) if is_narrow(x.dtype) else (x, lambda y: y)
