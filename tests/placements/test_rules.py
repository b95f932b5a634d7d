"""The table of rules: each primitive of JAX is in it, or known to be computed whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives
from operations_of_a_batch import OPERATIONS, batch, state

from jaxdist.ir.interpreter import INLINED, subjaxprs
from jaxdist.placements import infer, rules
from jaxdist.placements.describe import Factors
from jaxdist.placements.rules import FACTORS, factors
from jaxdist.placements.values import Split

WHOLE = {
    "rng_bit_generator": "bits of a generator that is not by place",
    "select_and_scatter": "JAX emits select_and_scatter_add alone",
    "platform_index": "a scalar: for which platform this is compiled",
}
"""Computed by every device on whole operands, knowingly, and why."""

NAMED_AXES = {"all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all"}
"""Gone from a trace, whose axis has size one; over others they are refused or the user's own (`shard_map`)."""

NO_STEPS = {
    "after_all", "call", "create_token", "custom_lin", "empty2", "get", "swap",
}  # fmt: skip
"""Not in a step: of effects and references, or what transformations leave none of."""


def known(name: str) -> bool:
    if name == "custom_linear_solve":  # its solution is, see `placements.block`
        return True
    return name in rules.ELEMENTWISE | FACTORS.keys() | infer.SPECIAL.keys() | INLINED.keys() | WHOLE.keys()


def test_each_public_primitive_is_known() -> None:
    public = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    assert len(public) > 150
    assert sorted(name for name in public - NAMED_AXES - NO_STEPS if not known(name)) == []


def test_each_primitive_of_the_operations_is_known() -> None:
    found: set[str] = set()

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found.add(eqn.primitive.name)
            for sub in subjaxprs(eqn):
                visit(sub)

    for f in OPERATIONS.values():
        visit(jax.make_jaxpr(f)(state(), batch(8)).jaxpr)
    assert len(found) > 100
    assert sorted(name for name in found if not known(name)) == []


def test_no_rule_is_of_a_name_that_is_not_there() -> None:
    """A primitive that JAX renamed would be computed whole, in silence."""
    assert not rules.ELEMENTWISE & FACTORS.keys()
    assert not set(WHOLE) & (rules.ELEMENTWISE | FACTORS.keys() | infer.SPECIAL.keys())


SHAPES: dict[str, Any] = {"mul": [(8, 3), (8, 3)], "add": [(8, 3), ()], "select_n": [(8, 3), (8, 3), (8, 3)]}


@pytest.mark.parametrize("name", SHAPES)
def test_elementwise(name: str) -> None:
    found = factors(name, {}, SHAPES[name], [(8, 3)])
    assert found is not None
    assert found.results == ((0, 1),)
    assert all(dims == ((0, 1) if shape else ()) for dims, shape in zip(found.operands, SHAPES[name], strict=True))


def of(f: Any, *shapes: tuple[int, ...], primitive: str, **how: Any) -> Factors | None:
    jaxpr = jax.make_jaxpr(f)(*(jnp.ones(s, **how) for s in shapes)).jaxpr
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == primitive)
    return factors(primitive, eqn.params, [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars])  # type: ignore[union-attr]


def test_contractions() -> None:
    found = of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (5, 2, 3), (5, 3, 4), primitive="dot_general")
    assert found is not None
    (a, b), (c,) = found.operands, found.results
    assert a[0] == b[0] == c[0]
    assert a[2] == b[1]
    assert found.reduced == {a[2]: "sum"}
    assert {a[1], b[2]} == {c[1], c[2]}


def test_reductions_and_what_needs_a_dimension_whole() -> None:
    found = of(lambda x: x.sum(1), (4, 5, 6), primitive="reduce_sum")
    assert found == Factors(((0, 1, 2),), ((0, 2),), reduced={1: "sum"})
    found = of(lambda x: lax.cumsum(x, 1), (4, 5, 6), primitive="cumsum")
    assert found is not None
    assert (found.operands, found.results) == (((0, None, 2),), ((0, None, 2),))


def test_parameters_for_slices() -> None:
    found = of(lambda x: x[:, 1:3], (8, 4), primitive="slice")
    assert found is not None
    assert found.operands == ((0, None),)
    assert found.params is not None
    params = {"start_indices": (0, 1), "limit_indices": (8, 3), "strides": None}
    assert found.params(params, 0, Split(0, 8, 2))["limit_indices"] == (2, 3)


def test_einsums_as_rules() -> None:
    rule = rules.einsum("bd,.d,b->b,")
    found = rule({}, [(8, 3), (4, 3), (8,)], [(8,), ()])
    assert found is not None
    assert found.operands == ((0, 1), (None, 1), (0,))
    assert found.results == ((0,), ())
    assert found.reduced == {1: "sum"}


def test_a_rule_of_ones_own() -> None:
    """For a primitive that nothing is known about: whole and said without a rule, on slices with one."""
    import parity

    scale = Primitive("test_scale")
    scale.def_impl(lambda x: x * 3)
    scale.def_abstract_eval(lambda aval: aval)
    from jax.interpreters import mlir

    mlir.register_lowering(scale, mlir.lower_fun(lambda x: x * 3, multiple_results=False))
    f = lambda x: scale.bind(x).sum(1)
    x = np.arange(48.0).reshape(16, 3)
    parity.check(f, x, devices=8, batch_argnums=0)
    assert [kind for kind, *_ in parity.collectives(parity.program(f, x, batch_argnums=0))] == ["all-gather"]
    FACTORS["test_scale"] = rules.einsum("bd->bd")
    try:
        parity.check(f, x, devices=8, batch_argnums=0)
        assert parity.collectives(parity.program(f, x, batch_argnums=0)) == []
    finally:
        del FACTORS["test_scale"]
