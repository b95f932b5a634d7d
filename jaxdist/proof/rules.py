"""The rules of `jaxdist.proof.evaluate`: (evaluator, equation, operands) -> results."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jaxdist import compat
from jaxdist.placements.model.values import aval_of
from jaxdist.proof import field
from jaxdist.proof.control_flow import cond, scan, while_
from jaxdist.proof.evaluate import (
    OF_ANY,
    RULES,
    Evaluator,
    by_part,
    hashed_as,
    is_complex,
    is_float,
    narrowed,
    settings_of,
    unchecked,
)
from jaxdist.proof.field import Number, Pair


def _moved(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    return by_part(lambda *xs: [*e.bind(eqn, xs)], *xs)


def _summed(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    return by_part(lambda *xs: [field.fold(x) for x in e.bind(eqn, list(map(field.wide, xs)))], *xs)


def _ordered(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if any(isinstance(x, Pair) for x in xs):
        if name not in ("abs", "sign"):
            raise unchecked(eqn, " of complex numbers")
        return [hashed_as(aval_of(eqn.outvars[0]), name, xs)]
    factor, inverse = e.order
    in_order = lambda x, v: field.ordered(factor, x) if is_float(aval_of(v)) else x
    outs = e.bind(eqn, [in_order(x, v) for x, v in zip(xs, eqn.invars, strict=True)])
    inverse = 1 if name == "sign" else inverse
    back = lambda x, v: field.unordered(inverse, x) if is_float(aval_of(v)) else x
    return [back(x, v) for x, v in zip(outs, eqn.outvars, strict=True)]


def _compared(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    x, y = xs
    name = eqn.primitive.name.removesuffix("_to")
    if isinstance(x, Pair):
        same = (x.real == y.real) & (x.imag == y.imag)
        return [same if name == "eq" else ~same]
    return [getattr(lax, name)(field.ordered(e.order[0], x), field.ordered(e.order[0], y))]


def _same(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    if eqn.primitive.name in ("sharding_constraint", "reshard") and e.divides:
        return [jax.tree.map(lambda x: compat.bind(eqn, eqn.params, [x])[0], xs[0])]
    return [narrowed(f"{eqn.params}", xs[0])] if eqn.primitive.name == "reduce_precision" and e.strict else list(xs)


def _iota(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    x = lax.broadcasted_iota(np.uint32, eqn.params["shape"], eqn.params["dimension"])
    return [_complex(x) if is_complex(aval_of(eqn.outvars[0])) else x]


def _complex(x: Number) -> Pair:
    return x if isinstance(x, Pair) else Pair(x, jnp.zeros_like(x))


def _gather(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    x, indices = xs
    fill = np.asarray(np.nan if (fill := eqn.params["fill_value"]) is None else fill, aval_of(eqn.outvars[0]).dtype)
    return [by_part(lambda x, fill: e.bind(eqn, [x, indices], fill_value=int(fill))[0], x, field.embedded(fill))]


def _scattered(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    operand, indices, updates = xs
    kind = eqn.primitive.name.replace("-", "_")
    if kind == "scatter" and eqn.params["update_jaxpr"] is not None:  # ``x.at[i].apply(f)``
        raise unchecked(eqn, " with a function")
    if kind == "scatter_mul" and not eqn.params["unique_indices"]:
        raise unchecked(eqn, " of indices that may repeat")
    same = {k: eqn.params[k] for k in ("indices_are_sorted", "unique_indices", "mode")}
    numbers = eqn.params["dimension_numbers"]
    apply = lambda x, y: getattr(lax, kind)(field.wide(x), indices, field.wide(y), numbers, **same)
    if kind in ("scatter_max", "scatter_min"):
        ordered = apply(*(field.ordered(e.order[0], x) for x in (operand, updates)))
        return [field.unordered(e.order[1], ordered)]
    return [by_part(lambda x, y: field.fold(apply(x, y)), operand, updates)]


def _multiplied(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    (x,), params, shape = xs, eqn.params, aval_of(eqn.invars[0]).shape
    if eqn.primitive.name == "cumprod":
        return [lax.associative_scan(field.mul, x, axis=params["axis"], reverse=params["reverse"])]
    if 0 in shape:
        return [e.constant(np.ones(aval_of(eqn.outvars[0]).shape, aval_of(eqn.outvars[0]).dtype))]
    for axis in sorted(params["axes"], reverse=True):
        x = lax.associative_scan(field.mul, x, axis=axis)
        x = jax.tree.map(lambda x, axis=axis: lax.index_in_dim(x, -1, axis, keepdims=False), x)
    return [x]


def _divided(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    x, below = xs[0], eqn.invars[1]
    if isinstance(below, Literal) and not is_complex(below.aval):  # no loop in the program
        value = int(field.embedded(np.asarray(below.val, aval_of(below).dtype)))
        return [field.mul(x, pow(value, field.P - 2, field.P))]
    return [field.mul(x, field.inverse(xs[1]))]


def _reduced(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    half, combine, dims = len(xs) // 2, compat.closed(eqn.params["jaxpr"]), eqn.params["dimensions"]
    shapes = [aval_of(v).shape for v in eqn.outvars]
    # `lax.reduce` takes no function that knows the order of numbers from outside.
    rows = lambda x: jnp.moveaxis(x, dims, range(len(dims))).reshape(-1, math.prod(shapes[0]))
    join = jax.vmap(lambda a, b: e.run(combine, [*a, *b]))
    start = jax.tree.map(lambda x: jnp.full(math.prod(shapes[0]), x), xs[half:])
    out, _ = lax.scan(lambda total, x: (join(total, x), None), start, jax.tree.map(rows, xs[:half]))
    return [jax.tree.map(lambda x, shape=shape: x.reshape(shape), x) for x, shape in zip(out, shapes, strict=True)]


def _contracted(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    *pair, sizes = xs if len(xs) > 2 else (*xs, None)  # of groups
    avals = map(aval_of, eqn.invars)
    x, y = (v if is_float(aval) else field.fold(field.wide(v)) for v, aval in zip(pair, avals, strict=False))
    settings = {"preferred_element_type": np.dtype("float64"), "precision": None}
    rest = [] if sizes is None else [sizes]
    return [field.product(lambda a, b: e.bind(eqn, [a, b, *rest], **settings)[0], x, y)]


def _fft(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    """A sum of products with a table, one for each direction: both programs transform the same dimensions."""
    (x,), aval, lengths = xs, aval_of(eqn.outvars[0]), eqn.params["fft_lengths"]
    root = "inverse root" if eqn.params["fft_type"].name.startswith("I") else "root"
    for k, n in enumerate(lengths):
        d = aval.ndim - len(lengths) + k
        rows, columns = jax.tree.leaves(x)[0].shape[d], aval.shape[d]
        places = np.arange(rows)[:, None] * np.arange(columns) % n
        table = Pair(*(field.positions(f"{root} {part} {n}", (n,))[places] for part in Pair._fields))
        x = field.product(lambda a, b, d=d: jnp.moveaxis(jnp.tensordot(a, b, ((d,), (0,))), -1, d), x, table)
    return [x if is_complex(aval) else x.real]


def _converted(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    (x,), before, after = xs, aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    if not is_float(after):
        if after.dtype != bool or isinstance(x, Pair):  # small numbers stay themselves: counts, labels
            part = x.real if isinstance(x, Pair) else x
            x = field.signed(jnp.where(_is_small(x), part, field.hashed("integer", x)))
        return [x != 0 if after.dtype == bool else x.astype(after.dtype)]
    if not is_float(before):
        x = field.fold(field.wide(x))
    elif e.strict and _is_narrower(after.dtype, before.dtype):
        x = narrowed(str(after.dtype), x)
    return [_complex(x) if is_complex(after) else x.real if isinstance(x, Pair) else x]


def _is_narrower(dtype: Any, other: Any) -> bool:
    a, b = jnp.finfo(dtype), jnp.finfo(other)
    return a.nmant < b.nmant or a.maxexp < b.maxexp


def _is_small(x: Number) -> Any:
    return _is_small(x.real) & (x.imag == 0) if isinstance(x, Pair) else jnp.abs(field.signed(x)) < 1 << 20


def _bits(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    (x,), before, after = xs, aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    if before.dtype.itemsize != after.dtype.itemsize or (is_float(before) and after.dtype.itemsize < 4):
        raise unchecked(eqn, f" of {before.dtype}")
    if not is_float(after):
        return [x.astype(after.dtype)]
    x = field.wide(x)
    is_number = (x >= 0) & (x < field.P)  # there and back: the same number
    return [jnp.where(is_number, x.astype(jnp.uint32), field.hashed("bits", x))]


def _of_matrices(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    ranks = {"householder_product": (2, 1), "cholesky_update": (2, 1)}
    digests = [field.digest(x, n) for x, n in zip(xs, ranks.get(eqn.primitive.name, (2,) * len(xs)), strict=True)]
    return _by_example(f"{eqn.primitive.name}{settings_of(eqn)}", eqn, digests, digests[0].ndim)


def _by_example(name: str, eqn: JaxprEqn, digests: Sequence[Any], batch: int) -> Sequence[Any]:
    """Return results that depend, for each example, on digests of the operands, and on the place in the example."""
    made = []
    for k, aval in enumerate(map(aval_of, eqn.outvars)):
        shape = aval.shape[batch:]
        places = jnp.arange(math.prod(shape)).reshape(shape)
        of_example = [jnp.expand_dims(d, range(d.ndim, d.ndim + len(shape))) for d in digests]
        out = hashed_as(aval, f"{name}{k}", [*of_example, places])
        whole_number = not is_float(aval) and aval.dtype != bool
        out = out % max(1, *shape[-1:]) if whole_number else out  # pivots
        made.append(jax.tree.map(lambda x, shape=aval.shape: jnp.broadcast_to(x, shape), out))
    return made


def _solved(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    """A product with a matrix that depends on the coefficients: columns of `b` may be divided, or sums."""
    (*coefficients, b), size = xs, aval_of(eqn.invars[0]).shape[-1]
    batch = aval_of(eqn.outvars[0]).ndim - 2
    digests = [field.digest(a, aval_of(v).ndim - batch) for a, v in zip(coefficients, eqn.invars, strict=False)]
    keys = [jnp.asarray(x)[..., None] for x in digests]
    entries = field.hashed(f"{eqn.primitive.name}{settings_of(eqn)}", *keys, jnp.arange(size**2))
    matrix = entries.reshape(*entries.shape[:-1], size, size)
    apply = (lambda m, b: m @ b) if eqn.params.get("left_side", True) else (lambda m, b: b @ m)
    return [field.product(apply, matrix, b)]


def _linear_solve(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    solve, operands = compat.linear_solve(eqn.params, xs)
    return e.run(compat.closed(solve), operands)


def _shard_map(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    params, body = eqn.params, compat.closed(eqn.params["jaxpr"])
    given = {"mesh": params["mesh"], "axis_names": set(params["newly_manual_axes"]), "check_vma": False}
    ins, outs = tuple(params["in_specs"]), tuple(params["out_specs"])
    return jax.shard_map(lambda *xs: tuple(e.run(body, xs)), in_specs=ins, out_specs=outs, **given)(*xs)


def _psum(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    """Add up in an untyped ``shard_map`` as a typed one does."""
    axes = eqn.params["axes"]
    add_up = lambda x: field.fold(lax.psum(field.wide(x), axes))
    pairs = zip(xs, map(aval_of, eqn.invars), strict=True)
    return [by_part(add_up, x) if is_float(aval) else lax.psum(x, axes) for x, aval in pairs]


def _outside(e: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    """A function of all of its operands, but for those dimensions that `jax.vmap` added."""
    count = compat.batches(eqn)
    batch = aval_of(eqn.outvars[0]).shape[:count] if eqn.outvars else ()
    digests = [jnp.zeros(batch, np.uint32)]
    for x, aval in zip(xs, map(aval_of, eqn.invars), strict=True):
        x, shared = x if is_float(aval) else field.fold(field.wide(x)), aval.shape[:count] != batch
        digests.append(jnp.broadcast_to(field.digest(x, aval.ndim - (0 if shared else count)), batch))
    function = getattr(eqn.params.get("callback"), "callback_func", None)  # of a callback
    name = getattr(function, "__qualname__", getattr(function, "__name__", ""))
    return _by_example(f"{eqn.primitive.name}{compat.kernel_name(eqn)}{name}", eqn, digests, count)


_IN_PLACE = ("sharding_constraint", "device_put", "pvary", "jaxdist_shard", "mesh_cast", "reshard", "jaxdist_plain",
             "name", "optimization_barrier", "layout_constraint", "reduce_precision")  # fmt: skip
_SCATTERS = ("scatter", *(f"scatter{dash}{kind}" for dash in "-_" for kind in ("add", "sub", "min", "max", "mul")))
OF_ANY |= {
    "scan": scan, "while": while_, "cond": cond, "shard_map": _shard_map, "custom_linear_solve": _linear_solve,
    **dict.fromkeys(("pure_callback", "io_callback"), _outside), **dict.fromkeys(_IN_PLACE, _same),
    **dict.fromkeys(("remat2", "checkpoint"), lambda e, eqn, xs: e.run(compat.closed(eqn.params["jaxpr"]), xs)),
    **dict.fromkeys(("debug_callback", "debug_print"), lambda e, eqn, xs: []),
    "custom_partitioning": lambda e, eqn, xs: e.run(eqn.params["call"], xs),
    "pallas_call": lambda e, eqn, xs: e.run(compat.interpreted_kernel(eqn), xs),
    "psum_invariant": _psum,
    "jaxdist_count": lambda e, eqn, xs: [jnp.zeros(aval_of(eqn.outvars[0]).shape, np.uint32)],
}  # fmt: skip
RULES |= {
    **OF_ANY,
    **dict.fromkeys(("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice",
                     "concatenate", "rev", "select_n", "copy", "copy_p", "split", "dynamic_update_slice", "pad",
                     "all_gather", "all_to_all", "ppermute", "jaxdist_all_gather", "unstack", "stack", "tile"), _moved),
    **dict.fromkeys(("reduce_sum", "reduce_window_sum", "psum", "reduce_scatter", "jaxdist_all_reduce",
                     "jaxdist_reduce_scatter", "select_and_scatter_add", "cumsum"), _summed),
    **dict.fromkeys(("reduce_max", "reduce_min", "argmax", "argmin", "max", "min", "cummax", "cummin", "abs", "sign",
                     "sort", "top_k", "pmax", "pmin", "reduce_window_max", "reduce_window_min", "clamp"), _ordered),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to"), _compared),
    **dict.fromkeys(_SCATTERS, _scattered),
    **dict.fromkeys(("dot_general", "conv_general_dilated", "ragged_dot_general"), _contracted),
    **dict.fromkeys(("cholesky", "lu", "qr", "svd", "eigh", "geqrf", "householder_product", "tridiagonal", "schur",
                     "hessenberg", "eig", "cholesky_update"), _of_matrices),
    "complex": lambda e, eqn, xs: [Pair(*jnp.broadcast_arrays(*xs))],
    "conj": lambda e, eqn, xs: [Pair((x := _complex(xs[0])).real, field.neg(x.imag))],
    "real": lambda e, eqn, xs: [xs[0].real], "imag": lambda e, eqn, xs: [xs[0].imag],
    **dict.fromkeys(("empty", "empty2"), lambda e, eqn, xs: [e.constant(np.zeros(a.shape, a.dtype))
                                                             for a in map(aval_of, eqn.outvars)]),
    "is_finite": lambda e, eqn, xs: [field.is_finite(xs[0])],
    "neg": lambda e, eqn, xs: [field.neg(xs[0])], "sub": lambda e, eqn, xs: [field.add(xs[0], field.neg(xs[1]))],
    **dict.fromkeys(("add", "add_any"), lambda e, eqn, xs: [field.add(*xs)]),
    "mul": lambda e, eqn, xs: [field.mul(*xs)], "square": lambda e, eqn, xs: [field.mul(xs[0], xs[0])],
    "div": _divided,
    "integer_pow": lambda e, eqn, xs: [field.power(xs[0], eqn.params["y"])],
    "reduce_prod": _multiplied, "cumprod": _multiplied, "reduce": _reduced, "iota": _iota, "gather": _gather,
    "fft": _fft, "convert_element_type": _converted, "bitcast_convert_type": _bits,
    **dict.fromkeys(("triangular_solve", "tridiagonal_solve"), _solved),
}  # fmt: skip


def _refused(_: Evaluator, eqn: JaxprEqn, xs: Sequence[Any]) -> Sequence[Any]:
    raise unchecked(eqn)


RULES |= dict.fromkeys(("cumlogsumexp", "approx_top_k"), _refused)  # no hash adds up logarithms
