"""Kernels by name: the loops of those that JAX ships, and the twins of others (`jaxdist.placements.register`)."""

import functools
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxdist.placements.model.block import Node
from jaxdist.placements.model.factors import FACTORS, Dims, Factors, Params, Rule, Shapes, einsum
from jaxdist.placements.model.values import aval_of

_EXAMPLE, _HEAD = 0, 1


def _attention(operands: str, results: str, reduction: str) -> Rule:
    """Return the rule of cuDNN's attention: examples and heads are independent, positions in a sequence are not.

    Args:
      operands: the kind of each. ``q`` has the dimensions of queries, ``k`` of keys; ``b`` is a bias, ``n`` has a
        number for each example, ``s`` statistics of each row, ``m`` a maximum of all; ``.`` is anything else.
      results: the kind of each.
      reduction: the reduction of results that examples or heads share.
    """

    def rule(params: Params, ins: Shapes, outs: Shapes) -> Factors:
        heads_at = 1 if params["layout"] else 2  # of (B, N, T, H), or (B, T, N, H)
        sizes = {_EXAMPLE: ins[0][0], _HEAD: ins[0][heads_at]}
        shared = Fraction(ins[1][heads_at], sizes[_HEAD])  # several heads of queries may share one of keys
        units, described, why = dict[tuple[int, int], Fraction](), list[Dims](), dict[tuple[int, int], str]()
        for k, (name, shape) in enumerate(zip((*operands, *results), (*ins, *outs), strict=False)):
            at = {"q": {0: _EXAMPLE, heads_at: _HEAD}, "k": {0: _EXAMPLE, heads_at: _HEAD}, "n": {0: _EXAMPLE},
                  "b": {0: _EXAMPLE, 1: _HEAD}, "s": {0: _EXAMPLE, 1: _HEAD}}.get(name, {})  # fmt: skip
            if name == "k":
                units[k, heads_at] = shared
            if name in ("q", "k"):
                why[k, 3 - heads_at] = "the positions of a sequence attend to each other"
            # A bias that examples or heads share has 1 there, and is whole.
            fits = {d: f for d, f in at.items() if d < len(shape) and shape[d] == sizes[f] * units.get((k, d), 1)}
            described.append(tuple(map(fits.get, range(len(shape)))))
        found = Factors(
            tuple(described[: len(ins)]), tuple(described[len(ins) :]), units=units, why=why,
            reduced=dict.fromkeys((_EXAMPLE, _HEAD), reduction),
        )  # fmt: skip
        return whole(ins, outs, reason) if (reason := _depends_on_all(params, ins)) else found

    return rule


def _depends_on_all(params: Params, ins: Shapes) -> str:
    """Return the reason if what attention computes for an example depends on the others."""
    # The operands: queries, keys, values, bias, 2 lengths, 2 offsets, 2 page tables. For what a call does not have JAX
    # passes an array of shape (0,), so a second dimension says that it is there.
    if params.get("dropout_rate"):
        return "its dropout draws by position in the whole batch"
    if "mask_type" in params and len(ins[6]) > 1:
        return "the offsets of packed sequences are those in the whole batch"
    if "mask_type" in params and len(ins[8]) > 1:
        return "a table says which pages of keys belong to which example"
    return ""


def whole(ins: Shapes, outs: Shapes, why: str) -> Factors:
    """Return the factors of an operation that is computed whole, for a reason: none."""
    places = {(k, d): why for k, shape in enumerate(ins) for d in range(len(shape))}
    none = lambda shapes: tuple((None,) * len(shape) for shape in shapes)
    return Factors(none(ins), none(outs), why=places)


def _scaled_dot(params: Params, ins: Shapes, outs: Shapes) -> Factors | None:
    """Return the loops of a product with scales for blocks of the contracted dimension, which stays whole."""
    plain = FACTORS["dot_general"](params, ins[:2], outs)
    if plain is None:
        return None
    free = [tuple(None if f in plain.reduced else f for f in dims) for dims in plain.operands]
    scales = [tuple(f if n == m else None for f, n, m in zip(dims, shape, scale, strict=True))
              for dims, shape, scale in zip(free, ins[:2], ins[2:], strict=True)]  # fmt: skip
    return replace(plain, operands=(*free, *scales), reduced={})


def _ragged_dot(params: Params, ins: Shapes, outs: Shapes) -> Factors | None:
    """Return the loops of a product of groups of rows (`jax.lax.ragged_dot_general`), each with its own matrix.

    The sizes of the groups are needed whole; `jaxdist.placements.rules.kernels` cuts them.
    """
    # The usual one is ``mk,gkn->mn``, summed over k, and over g: for rows of groups that it lacks a device adds zeros.
    # In the gradient of its matrices, ``mk,mn->gkn``, the rows m are summed over, and only the result has g.
    numbers = params["ragged_dot_dimension_numbers"]
    (ca, cb), (ba, bb) = numbers.dot_dimension_numbers
    (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    if ragged in ba:
        return None
    a, b = ({d: f for f, d in enumerate(dims)} for dims in ((*ba, *ca), (*bb, *cb)))
    count = len(a)
    for dims, shape, taken in ((a, ins[0], ()), (b, ins[1], groups)):
        for d in (d for d in range(len(shape)) if d not in dims and d not in taken):
            dims[d], count = count, count + 1
    group, contracted = count, [a[d] for d in ca]
    b |= dict.fromkeys(groups, group)
    free = [a[d] for d in sorted(a) if d not in (*ba, *ca)], [b[d] for d in sorted(b) if d not in (*bb, *cb, *groups)]
    result = [*(() if groups else (group,)), *(a[d] for d in ba), *free[0], *free[1]]
    # Sizes of groups may differ by example: then they have the dimensions of rows before the ragged one.
    others = ca if ragged in ca else [d for d in sorted(a) if d not in (*ba, *ca)]
    before = [a[d] for d in (*ba, *others[: others.index(ragged)])] if len(ins[2]) > 1 else []
    by_dim = (tuple(map(dims.get, range(len(shape)))) for dims, shape in ((a, ins[0]), (b, ins[1])))
    reduced = dict.fromkeys([*contracted, group] if groups else contracted, "sum")
    return Factors((*by_dim, (*before, None)), (tuple(result),), reduced=reduced)


FACTORS |= {
    **{f"dot_product_attention_{name}": rule
       for kernel, rule in (("fwd", _attention("qkkbnn....", "qs", "sum")),
                            ("bwd", _attention("qkkbnn....sqq", "qkkb", "sum")),
                            ("fp8_fwd", _attention("qkk......", "qmms", "max")),
                            ("fp8_bwd", _attention("qkkqqs............", "qkkmmmm", "max")))
       for name in (kernel, f"{kernel}_wrapper")},
    **dict.fromkeys(("scaled_matmul", "scaled_matmul_wrapper"), einsum("bm.,bn.,bm.,bn.->bmn")),
    "scaled_dot": _scaled_dot, "ragged_dot_general": _ragged_dot,
    "mpmd_map": lambda _, ins, outs: whole(ins, outs, "it is written for a mesh of cores"),  # `pl.kernel`
}  # fmt: skip

TWINS: dict[str, Callable[..., Any]] = {}  # by the label or name of an operation, a JAX function with its results


def twin_of(node: Node, shapes: Shapes | None = None) -> ClosedJaxpr | None:
    """Return the program of a kernel's twin, if it has one, for operands of these shapes, or else of the equation's."""
    like = TWINS.get(node.label) or TWINS.get(node.name)
    return None if like is None else traced_twin(like, node.eqn, None if shapes is None else tuple(shapes))


@functools.lru_cache(maxsize=256)
def traced_twin(like: Callable[..., Any], eqn: JaxprEqn, shapes: Shapes | None = None) -> ClosedJaxpr:
    """Return the program of a twin, for operands of these shapes."""
    # Cached by equation: `Infer.block` knows a jaxpr by its identity, and would flatten a new one each time.
    # An FFI call has parameters of its own besides the target's.
    params = eqn.params if eqn.primitive.name != "ffi_call" else dict(eqn.params.get("attributes", ()))
    avals = list(map(aval_of, eqn.invars))
    types = [
        jax.ShapeDtypeStruct(shape, aval.dtype)
        for shape, aval in zip(shapes or [a.shape for a in avals], avals, strict=True)
    ]
    return jax.make_jaxpr(functools.partial(like, **params))(*types)
