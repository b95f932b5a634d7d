"""The table of rules: each primitive of JAX is in it, or known to be computed whole."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.interpreters import batching, mlir
from operations_of_a_batch import OPERATIONS, batch, state

import jaxdist
from jaxdist.ir.interpreter import INLINED, subjaxprs
from jaxdist.ir.operations import is_elementwise
from jaxdist.ir.trace import trace
from jaxdist.placements import rules, walk
from jaxdist.placements.describe import Factors
from jaxdist.placements.rules import FACTORS, factors
from jaxdist.placements.strategy import UNKNOWN
from jaxdist.placements.values import Split

NAMED_AXES = {"all_gather", "all_to_all", "axis_index", "pmax", "pmin", "ppermute", "psum", "ragged_all_to_all"}
"""Gone from a trace, whose axis has size one; over others they are refused or the user's own (`shard_map`)."""

NO_STEPS = {
    "after_all", "call", "create_token", "custom_lin", "empty2", "get", "swap",
}  # fmt: skip
"""Not in a step: of effects and references, or what transformations leave none of."""


def known(primitive: Primitive) -> bool:
    if primitive.name == "custom_linear_solve":  # its solution is, see `placements.block`
        return True
    return primitive.name in {*INLINED, *walk.SPECIAL} or rules.is_known(primitive)


def test_each_public_primitive_is_known() -> None:
    public = {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}
    assert len(public) > 150
    assert sorted(name for name in public.keys() - NAMED_AXES - NO_STEPS if not known(public[name])) == []


def test_each_primitive_of_the_operations_is_known() -> None:
    found: dict[str, Primitive] = {}

    def visit(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] = eqn.primitive
            for sub in subjaxprs(eqn):
                visit(sub)

    leaves, tree = jax.tree.flatten((state(), batch(8)))
    for f in OPERATIONS.values():
        visit(trace(lambda *xs, f=f: jax.tree.leaves(f(*jax.tree.unflatten(tree, xs))), leaves).jaxpr)
    assert len(found) > 100
    assert sorted(name for name in found if not known(found[name])) == []


def test_no_rule_is_of_a_name_that_is_not_there() -> None:
    """A primitive that JAX renamed would be computed whole, in silence."""
    assert not rules.WHOLE.keys() & (FACTORS.keys() | walk.SPECIAL.keys())


SHAPES: dict[str, Any] = {"mul": [(8, 3), (8, 3)], "add": [(8, 3), ()], "select_n": [(8, 3), (8, 3), (8, 3)]}


@pytest.mark.parametrize("name", SHAPES)
def test_elementwise(name: str) -> None:
    found = factors(getattr(primitives, f"{name}_p"), {}, SHAPES[name], [(8, 3)])
    assert found is not None
    assert found.results == ((0, 1),)
    assert all(dims == ((0, 1) if shape else ()) for dims, shape in zip(found.operands, SHAPES[name], strict=True))


def of(f: Any, *shapes: tuple[int, ...], primitive: str, **how: Any) -> Factors | None:
    jaxpr = jax.make_jaxpr(f)(*(jnp.ones(s, **how) for s in shapes)).jaxpr
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == primitive)
    return factors(eqn.primitive, eqn.params, [v.aval.shape for v in eqn.invars], [v.aval.shape for v in eqn.outvars])  # type: ignore[union-attr]


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


def _primitive(name: str) -> Primitive:
    """An operation of a user's own, of one array, that adds 1."""
    own = Primitive(name)
    own.def_impl(lambda x: x + 1)
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(lambda x: x + 1, multiple_results=False))
    return own


def test_what_is_registered_with_jax_as_elementwise_is(caplog: pytest.LogCaptureFixture) -> None:
    """There is no list of ours that a new version of JAX, or a user's operation, would have to be entered in."""
    own = _primitive("own_elementwise")
    batching.defvectorized(own)
    assert is_elementwise(own)
    step = jaxdist.data_parallel(lambda w, x: w + own.bind(x * w).mean(0), donate=False)
    w, x = np.ones(3), np.arange(24.0).reshape(8, 3)
    np.testing.assert_allclose(step(w, x), w + (x + 1).mean(0))
    assert {row.what for row in jaxdist.explain(step, w, x).rows} == {"all-reduce"}
    assert not caplog.records


def test_a_user_is_told_of_an_operation_that_nobody_knows(caplog: pytest.LogCaptureFixture) -> None:
    own = _primitive("own_unknown")
    step = jaxdist.data_parallel(lambda w, x: w + own.bind(x * w).mean(0), donate=False)
    w, x = np.ones(3), np.arange(24.0).reshape(8, 3)
    np.testing.assert_allclose(step(w, x), w + (x + 1).mean(0))
    (record,) = caplog.records
    told = r"own_unknown at .*test_rules.py:\d+ moves 192 B of activations .*: jaxdist does not know this operation"
    assert re.search(told, record.getMessage())
    assert UNKNOWN in {row.why for row in jaxdist.explain(step, w, x).rows if row.operation == "own_unknown"}
