"""The table of rules: each primitive of JAX is in it, or known to be computed whole."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from catalogue.operations import OPERATIONS, batch, state
from jax.extend.core import Primitive, primitives
from jax.interpreters import batching, mlir

import jaxdist
from jaxdist.ir.interpreter import INLINED, subjaxprs
from jaxdist.ir.operations import is_elementwise
from jaxdist.ir.trace import trace
from jaxdist.placements import rules, walk
from jaxdist.placements.rules import FACTORS
from jaxdist.placements.strategy import UNKNOWN

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


def test_einsums_as_rules() -> None:
    rule = rules.einsum("bd,.d,b->b,")
    found = rule({}, [(8, 3), (4, 3), (8,)], [(8,), ()])
    assert found is not None
    assert found.operands == ((0, 1), (None, 1), (0,))
    assert found.results == ((0,), ())
    assert found.reduced == {1: "sum"}


def of_ones_own(name: str) -> tuple[Primitive, Any]:
    """An operation of one array, that adds 1, and a step with it."""
    own = Primitive(name)
    own.def_impl(lambda x: x + 1)
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(lambda x: x + 1, multiple_results=False))
    return own, jaxdist.data_parallel(lambda w, x: w + own.bind(x * w).mean(0), donate=False)


W, X = np.ones(3), np.arange(24.0).reshape(8, 3)


@pytest.mark.parametrize("how", ["with jaxdist", "by its parameters", "with JAX as elementwise", "nowhere"])
def test_an_operation_of_a_users_own_that_is_registered(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """With JAX: there is no list of ours that a new version of JAX, or a user's operation, would have to be entered in.
    Nowhere: it is computed whole, and the user is told."""
    own, step = of_ones_own(f"own {how}")
    if how == "with jaxdist":
        jaxdist.register(own, "b... -> b...")
    elif how == "by its parameters":
        jaxdist.register(own, lambda params, operands, results: "ab -> ab" if operands == results else None)
    elif how == "with JAX as elementwise":
        batching.defvectorized(own)
        assert is_elementwise(own)
    np.testing.assert_allclose(step(W, X), W + (X + 1).mean(0))
    rows = jaxdist.explain(step, W, X).rows
    if how != "nowhere":
        assert {row.what for row in rows} == {"all-reduce"}
        assert not caplog.records
        return
    (record,) = caplog.records
    told = r"own nowhere at .*test_rules.py:\d+ moves 192 B of activations .*: jaxdist does not know this operation"
    assert re.search(told, record.getMessage())
    assert UNKNOWN in {row.why for row in rows if row.operation == "own nowhere"}


@pytest.mark.parametrize("rule", ["b...", "b... -> b... -> b", "b_ -> b", 3])
def test_what_is_no_rule(rule: Any) -> None:
    with pytest.raises(ValueError, match=r"rule=.*: (expected )?a description such as"):
        jaxdist.register("own", rule)
