"""The table of rules: each gives the factors of a primitive, which relate its operands' dimensions.

A factor is a loop of the operation: ``bd,dh->bh`` has b, d and h. A dimension runs along one, or along none (None: it
is needed at once). Cutting a factor gives each device some of its turns: values with it are `Split` along it, others
whole. A factor without result is reduced over: it gives a `Partial`, or needs an exchange.

Shardy calls this a sharding rule. Two ways to divide ``bd,hd->bh`` over devices::

    dot_general  x: f32[8,3]  w: f32[2,3]  ->  f32[8,2]
    operands=((1, 0), (2, 0))  results=((1, 2),)  reduced={0: "sum"}
    factor 1, of 2 devices:  f32[4,3]  f32[2,3]  ->  f32[4,2]  some rows of the result: `Split`
    factor 0, of 3 devices:  f32[8,1]  f32[2,1]  ->  f32[8,2]  a summand of all of it: `Partial`
"""

import math
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
from jax import lax
from jax.extend.core import Primitive

from jaxdist.ir.operations import is_elementwise
from jaxdist.placements.model.values import Split

Dims = tuple[int | None, ...]
Params = Mapping[str, Any]  # of an equation


@dataclass(frozen=True)
class Factors:
    """The loops of an operation."""

    operands: tuple[Dims, ...]  # by operand, the factor of each of its dimensions
    results: tuple[Dims, ...]  # by result
    reduced: Mapping[int, str] = field(default_factory=dict)  # by factor, "sum", "max", "min", "or" or "and"
    onto: int | None = None  # the operand to which the reduction is added, which must count once
    masked: tuple[int, ...] | None = None  # operands whose padding must not count, or None for all that have the factor
    counts_padding: bool = False  # padding counts in a reduction even if masked
    params: Callable[[Params, int, Split], Params] | None = None  # (parameters, factor, its slices) -> those on slices
    # by array (the operands, then the results) and dimension, the entries that a turn of its factor takes, if not one
    units: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)
    together: Mapping[int, int] = field(default_factory=dict)  # by factor, how many turns take the same entries
    why: Mapping[tuple[int, int], str] = field(default_factory=dict)  # by the same keys, the reason if it can't be cut

    @property
    def arrays(self) -> tuple[Dims, ...]:
        """The dimensions of the operands, then of the results."""
        return *self.operands, *self.results

    def is_even(self, factor: int) -> bool:
        """Check whether each turn of a factor takes one entry, and no other turn does."""
        units = (unit for (k, d), unit in self.units.items() if self.arrays[k][d] == factor)
        return factor not in self.together and all(unit == 1 for unit in units)

    def turns(self, k: int, split: Split, devices: int) -> Split | None:
        """Return each device's turns of a factor, given slices of array `k`; the usual ones if none give these."""
        if (factor := self.arrays[k][split.dim]) is None or self.is_even(factor):
            return split
        # Only multiples of `every` turns take whole entries of each array, and no part of a block that turns share.
        unit, every = self.units.get((k, split.dim), Fraction(1)), self.together.get(factor, 1)
        every = math.lcm(every, *(u.denominator for (j, d), u in self.units.items() if self.arrays[j][d] == factor))
        fits = split.chunk / unit % every == 0 and (split.outer == 1 or split.size % unit == 0)
        size = math.ceil((1 if fits else split.outer) * split.size / unit)
        per_device = int(split.chunk / unit) if fits else -(-size // (devices * every)) * every
        if (devices - 1) * per_device >= size or (split.outer > 1 and split.is_padded(devices)):
            return None  # a device without a turn
        return replace(split, size=size, chunk=per_device) if fits else Split(split.dim, size, per_device)

    def slices(self, k: int, factor: int, turns: Split, shape: Sequence[int]) -> Split | None:
        """Return the slices of array `k` that these turns of a factor take, or None if it lacks the factor."""
        if factor not in (dims := self.arrays[k]):
            return None
        d = dims.index(factor)
        if (unit := self.units.get((k, d), 1)) == 1:
            return turns.along(d)
        return replace(turns, dim=d, size=shape[d] // turns.outer, chunk=int(turns.chunk * unit))


Shapes = Sequence[tuple[int, ...]]
Rule = Callable[[Params, Shapes, Shapes], Factors | None]  # of operands, of results; None: it is computed whole


def factors(primitive: Primitive, params: Params, ins: Shapes, outs: Shapes) -> Factors | None:
    """Return the loops of an operation, or None if it is unknown."""
    if rule := FACTORS.get(primitive.name):
        return rule(params, ins, outs)
    return _elementwise(ins, outs) if is_elementwise(primitive) else None


def _elementwise(ins: Shapes, outs: Shapes) -> Factors | None:
    if len({len(s) for s in outs}) > 1 or len(set(outs)) > 1:  # a barrier of arrays of several shapes
        return None
    if any(s and len(s) != len(outs[0]) for s in ins):  # a bitcast that adds or takes the last dimension
        return None
    long = outs[0]
    dims = tuple(tuple(None if n == 1 != long[d] else d for d, n in enumerate(shape)) for shape in (*ins, *outs))
    return Factors(dims[: len(ins)], dims[len(ins) :])


# --- one operand, dimensions that move


def _transpose(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    return Factors((tuple(range(len(ins[0]))),), (tuple(params["permutation"]),))


def _broadcast(params: Params, ins: Shapes, outs: Shapes) -> Factors | None:
    if len(ins) > 1:  # its shape depends on values
        return None
    (old,), (new,), dims = ins, outs, map(int, params["broadcast_dimensions"])
    operand = tuple(d if n == new[d] else None for n, d in zip(old, dims, strict=True))
    return Factors((operand,), (tuple(range(len(new))),), params=_sized("shape"))


def _without(name: str) -> Rule:
    """Return the rule of an operation that adds or removes dimensions, which a parameter names and must be whole."""

    def rule(params: Params, ins: Shapes, outs: Shapes) -> Factors:
        extra, rank = set(np.ravel(params[name]).tolist()), max(map(len, (*ins, *outs)))
        long = tuple(None if d in extra else d for d in range(rank))
        short = tuple(d for d in range(rank) if d not in extra)

        def dims(shape: tuple[int, ...]) -> Dims:
            return long if len(shape) == rank else short if shape else ()

        return Factors(tuple(map(dims, ins)), tuple(map(dims, outs)))

    return rule


def _sized(name: str) -> Callable[[Params, int, Split], Params]:
    """Update the entry of a parameter that holds the size of the split dimension."""
    return lambda params, factor, split: {
        **params, name: tuple(split.rows if d == factor else n for d, n in enumerate(params[name]))
    }  # fmt: skip


def _keeps(whether: Callable[[Params, Shapes, Shapes], Iterable[bool]], sized: str | None = None) -> Rule:
    """Return the rule of an operation that needs all but some dimensions whole; `sized`: a parameter of sizes."""

    def rule(params: Params, ins: Shapes, outs: Shapes) -> Factors:
        factors = tuple(d if keep else None for d, keep in enumerate(whether(params, ins, outs)))
        dims = [factors if len(shape) == len(factors) else (None,) * len(shape) for shape in (*ins, *outs)]
        return Factors(tuple(dims[: len(ins)]), tuple(dims[len(ins) :]), params=_sized(sized) if sized else None)

    return rule


def _equal(a: Sequence[int], b: Sequence[int], strides: Sequence[int] | None = None) -> Iterator[bool]:
    return (n == m and s == 1 for n, m, s in zip(a, b, strides or (1,) * len(a), strict=True))


def _along(*names: str) -> Rule:
    """Return the rule of an operation that needs the dimensions named by these parameters whole."""

    def whether(params: Params, ins: Shapes, outs: Shapes) -> Iterator[bool]:
        axes = {a % len(ins[0]) for name in names for a in np.ravel(params[name]).tolist()}
        return (d not in axes for d in range(len(ins[0])))

    return _keeps(whether)


# --- reductions


def _reduce(kind: str) -> Rule:
    def rule(params: Params, ins: Shapes, outs: Shapes) -> Factors:
        axes = [axis for axis in params["axes"] if not isinstance(axis, str)]  # psum names axes of the mesh, too
        operand = tuple(range(len(ins[0])))
        return Factors((operand,), (tuple(d for d in operand if d not in axes),), reduced=dict.fromkeys(axes, kind))

    return rule


# --- contractions


def _dot_general(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    (ca, cb), (ba, bb) = params["dimension_numbers"]
    a, b = [-1] * len(ins[0]), [-1] * len(ins[1])
    for factor, (i, j) in enumerate(zip((*ba, *ca), (*bb, *cb), strict=True)):
        a[i] = b[j] = factor
    count = len(ba) + len(ca)
    for dims in (a, b):
        for d in (d for d, f in enumerate(dims) if f < 0):
            dims[d] = count
            count += 1
    contracted = range(len(ba), len(ba) + len(ca))
    result = tuple(f for f in range(count) if f not in contracted)
    return Factors((tuple(a), tuple(b)), (result,), reduced=dict.fromkeys(contracted, "sum"))


def _convolution(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    a, b, c = ([cast("int | None", None)] * len(shape) for shape in (*ins, *outs))
    features, batches = params["feature_group_count"], params["batch_group_count"]
    reduced = {}
    if batches == 1:
        a[lhs[0]] = c[out[0]] = 0
    if features == 1:
        # With batch groups (the gradient of a depthwise kernel) the features are still contracted.
        a[lhs[1]] = b[rhs[1]] = 1
        reduced = {1: "sum"}
    if features == 1 and batches == 1:
        b[rhs[0]] = c[out[1]] = 2
    return Factors((tuple(a), tuple(b)), (tuple(c),), reduced=reduced)


def _windows(params: Params, ins: Shapes, outs: Shapes) -> Iterator[bool]:
    """Check which dimensions windows leave alone: those with size 1 and no padding."""
    ones = (1,) * max(map(len, ins))
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    sizes = zip(*(ones if params.get(name) is None else params[name] for name in names), strict=True)
    return (set(values) == {1} and tuple(pad) == (0, 0) for values, pad in zip(sizes, params["padding"], strict=True))


# --- indexing


def _gather(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    operand, indices, result = ([cast("int | None", None)] * len(shape) for shape in (*ins, *outs))
    single = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}  # not in the result
    batch = [d for d in range(len(outs[0])) if d not in numbers.offset_dims]
    for i, d in enumerate(batch):  # the dimensions of the indices but for the last, in order
        indices[i] = result[d] = i
    for d, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operand[d] = indices[i]
    window = [d for d in range(len(ins[0])) if d not in single]
    for d, o in zip(window, numbers.offset_dims, strict=True):
        if sizes[d] == ins[0][d] and d not in numbers.start_index_map:
            operand[d] = result[o] = len(batch) + d
    operand_dims = tuple(operand)

    def cut(params: Params, factor: int, split: Split) -> Params:
        new = tuple(
            split.rows if f == factor and d not in single else n
            for d, (f, n) in enumerate(zip(operand_dims, params["slice_sizes"], strict=True))
        )
        return {**params, "slice_sizes": new}

    return Factors((operand_dims, tuple(indices)), (tuple(result),), params=cut)


def _scatter(kind: str | None) -> Rule:
    """Return the rule of a scatter, which adds its updates up if there is a ``kind``."""

    def rule(params: Params, ins: Shapes, outs: Shapes) -> Factors:
        numbers = lax.GatherDimensionNumbers(*params["dimension_numbers"])  # of a gather of the entries that it changes
        window = iter(ins[2][d] for d in numbers.offset_dims)
        single = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        sizes = tuple(1 if d in single else next(window) for d in range(len(ins[0])))
        gather = _gather({"dimension_numbers": numbers, "slice_sizes": sizes}, ins[:2], ins[2:])
        (operand, indices), (updates,) = gather.operands, gather.results
        several = {f for f in indices if f is not None and f not in operand}
        if not kind:
            indices, updates = (tuple(None if f in several else f for f in dims) for dims in (indices, updates))
        reduced = dict.fromkeys(sorted(several), kind) if kind else {}
        return Factors((operand, indices, updates), (operand,), reduced=reduced, onto=0, masked=(2,))

    return rule


# --- linear algebra, random bits


def _leading(count: Callable[[Params, Shapes, Shapes], int]) -> Rule:
    """Return the rule of an operation that is independent along this many leading dimensions."""

    def rule(params: Params, ins: Shapes, outs: Shapes) -> Factors:
        first = count(params, ins, outs)

        def dims(shape: tuple[int, ...]) -> Dims:
            return tuple(d if d < first <= len(shape) else None for d in range(len(shape)))

        return Factors(tuple(map(dims, ins)), tuple(map(dims, outs)))

    return rule


def _solve(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    """Return the loops of a solver: those over leading dimensions, and over right-hand sides."""
    batch = len(outs[0]) - 2
    independent = {*range(batch), batch + params.get("left_side", True)}
    sides = tuple(d if d in independent else None for d in range(batch + 2))
    return Factors((*(tuple(d if d < batch else None for d in range(len(a))) for a in ins[:-1]), sides), (sides,))


def einsum(rule: str) -> Rule:
    """Return the rule of a description such as ``"b..., .d -> b."``, with ``.`` for a dimension that stays whole."""
    equation = rule.replace(" ", "")
    twice = any(word.count(c) > 1 for word in equation.replace("->", ",").split(",") for c in {*word} - {"."})
    if equation.count("->") != 1 or set(equation) - set("->,.") - set(string.ascii_letters) or twice:
        raise ValueError(f"rule={rule!r}: expected a description such as 'b..., .d -> b.', or a function")
    letters = {c: i for i, c in enumerate(dict.fromkeys(filter(str.isalpha, equation)))}
    sides = [part.split(",") for part in equation.split("->")]
    operands, results = (tuple(tuple(letters.get(c) for c in word) for word in words) for words in sides)
    returned = {f for word in results for f in word}
    described = Factors(operands, results, reduced={f: "sum" for f in letters.values() if f not in returned})
    return lambda params, ins, outs: described


FACTORS: dict[str, Rule] = {
    "transpose": _transpose, "broadcast_in_dim": _broadcast, "squeeze": _without("dimensions"),
    **dict.fromkeys(("stack", "unstack"), _without("axis")), "reduce": _without("dimensions"),
    **dict.fromkeys(("reduce_prod", "reduce_xor", "argmax", "argmin"), _without("axes")),
    "slice": _keeps(lambda params, ins, outs: _equal(ins[0], outs[0], params["strides"]), "limit_indices"),
    "dynamic_slice": _keeps(lambda params, ins, outs: _equal(ins[0], outs[0]), "slice_sizes"),
    "dynamic_update_slice": _keeps(lambda params, ins, outs: _equal(ins[0], ins[1])),
    "pad": _keeps(lambda params, ins, outs: (tuple(pad) == (0, 0, 0) for pad in params["padding_config"])),
    "tile": _keeps(lambda params, ins, outs: (n == 1 for n in params["reps"])),
    "rev": _along("dimensions"), **dict.fromkeys(("concatenate", "sort"), _along("dimension")),
    **dict.fromkeys(("split", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "top_k"), _along("axis")),
    **dict.fromkeys(("reduce_sum", "psum"), _reduce("sum")), **dict.fromkeys(("reduce_max", "pmax"), _reduce("max")),
    **dict.fromkeys(("reduce_min", "pmin"), _reduce("min")), "reduce_or": _reduce("or"), "reduce_and": _reduce("and"),
    "dot_general": _dot_general, "conv_general_dilated": _convolution,
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
                     "select_and_scatter_add", "select_and_gather_add"), _keeps(_windows)),
    "gather": _gather, "scatter-add": _scatter("sum"), "scatter-max": _scatter("max"), "scatter-min": _scatter("min"),
    **dict.fromkeys(("scatter", "scatter-sub", "scatter-mul"), _scatter(None)),
    **dict.fromkeys(("cholesky", "cholesky_update", "lu", "qr", "geqrf", "geqp3", "ormqr", "householder_product",
                     "svd", "eigh", "eig", "schur", "hessenberg", "tridiagonal", "symmetric_product"),
                    _leading(lambda params, ins, outs: len(ins[0]) - 2)),
    "lu_pivots_to_permutation": _leading(lambda params, ins, outs: len(ins[0]) - 1),
    **dict.fromkeys(("triangular_solve", "tridiagonal_solve"), _solve),
    "fft": _leading(lambda params, ins, outs: len(ins[0]) - len(params["fft_lengths"])),
    "approx_top_k": _along("reduction_dimension"),
    **dict.fromkeys(("jaxdist_all_reduce", "ppermute"), _along()),
    "jaxdist_reduce_scatter": _along("dim"), "jaxdist_all_gather": _along("dim"),
    "all_to_all": _along("split_axis", "concat_axis"),
    # each key draws independently, and derives keys of its own to draw more than one number
    **dict.fromkeys(("random_bits", "random_split", "random_unwrap", "random_gamma"),
                    _leading(lambda params, ins, outs: len(ins[0]))),
    **dict.fromkeys(("random_wrap", "random_seed"), _leading(lambda params, ins, outs: len(outs[0]))),
}  # fmt: skip

# Known to be whole on every device, unless they say more of themselves: kernels; generators whose bits do not depend on
# position; operations that JAX emits differently; a platform index.
_WHOLE = {"custom_partitioning", "ffi_call", "rng_bit_generator", "select_and_scatter", "platform_index"}


def is_known(primitive: Primitive) -> bool:
    """Check whether an operation has a rule, or is known to have none."""
    return primitive.name in FACTORS or primitive.name in _WHOLE or is_elementwise(primitive)
