"""`fit(mesh="auto")` takes the best of what it says of each mesh by itself."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from harness.steps import train_step

import jaxdist
from jaxdist.planning.elsewhere import Elsewhere
from jaxdist.planning.topology import Topology

FOUR = Topology.parse("4xcpu")
WIDTH, HIDDEN = 64, 256


def case(tx: Any, rows: int = 8, tokens: int | None = None) -> tuple[Any, ...]:
    """A step of an MLP over rows or over tokens, and the types of its arguments."""
    loss = lambda p, x: jnp.mean((x + jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
    step = jaxdist.data_parallel(train_step(loss, tx))
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = (rows, WIDTH) if tokens is None else (rows, tokens, WIDTH)
    return step, params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct(batch, jnp.float32)


def of_memory(size: int) -> Topology:
    return dataclasses.replace(FOUR, kind=dataclasses.replace(FOUR.kind, memory=size))


def meshes(*args: Any, topology: str = "4xcpu") -> list[dict[str, int]]:
    step, *rest = args
    return Elsewhere(step, tuple(rest), topology, ()).meshes()


@pytest.mark.parametrize("level", [None, 1])
def test_none_is_faster_by_itself(level: Any) -> None:
    tx = optax.adam(1e-3) if level is None else jaxdist.zero(optax.adam(1e-3), level)
    args = case(tx, tokens=16)
    found = jaxdist.fit(*args, topology=FOUR, mesh="auto")
    assert found.chosen is not None
    alone = [jaxdist.fit(*args, topology=FOUR, mesh=sizes).chosen for sizes in meshes(*args)]
    assert len(alone) == len({one.mesh for one in found.candidates}) > 3
    best = min(one.seconds for one in alone if one is not None)
    assert found.chosen.seconds == pytest.approx(best)


def test_state_that_does_not_fit_is_cut_by_the_model_axis() -> None:
    """Without jaxdist.zero there is nothing else that would."""
    args = case(optax.adam(1e-3))
    whole = jaxdist.fit(*args, topology=FOUR).candidates[0].row.peak
    found = jaxdist.fit(*args, topology=of_memory(2 * whole // 3), mesh="auto")
    assert found.chosen is not None
    assert "model=" in found.chosen.mesh
    assert jaxdist.fit(*args, topology=of_memory(2 * whole // 3)).chosen is None
    assert jaxdist.fit(*args, topology=of_memory(1000), mesh="auto").chosen is None


def test_what_it_says_can_be_run() -> None:
    args = case(optax.adam(1e-3), rows=1)
    found = jaxdist.fit(*args, topology=FOUR, mesh="auto")
    assert found.chosen is not None
    step, _, sizes = found.chosen.code.partition("mesh=")
    assert step == "step = jaxdist.parallel(step, "
    mesh = json.loads(sizes.removesuffix(")"))
    assert mesh == {"model": 4}, "one example is not divided"
    program = jaxdist.parallel(args[0], mesh=jax.sharding.Mesh(jax.devices()[:4], ("model",)))
    assert program.lower(*args[1:]) is not None
    assert "model=4" in str(found)
    figures = json.loads(found.to_json())
    assert figures["candidates"][figures["chosen"]]["mesh"] == "model=4"


def test_which_meshes_there_are() -> None:
    assert meshes(*case(optax.sgd(0.1))) == [{"data": 4}, {"data": 2, "model": 2}, {"model": 4}], "features"
    assert meshes(*case(optax.sgd(0.1), tokens=8)) == [
        {"data": 4}, {"data": 2, "sequence": 2}, {"data": 2, "model": 2}, {"sequence": 4},
        {"sequence": 2, "model": 2}, {"model": 4},
    ]  # fmt: skip
    assert meshes(*case(optax.sgd(0.1), rows=2, tokens=8), topology="2x2xcpu") == [
        {"data": 2, "sequence": 2}, {"data": 2, "model": 2}
    ], "the model is not cut over both hosts"  # fmt: skip
    assert {"model": 4} in meshes(*case(optax.sgd(0.1), rows=1), topology="2x2xcpu"), "there are too few examples"


def test_with_what_the_step_is_built_with() -> None:
    found = jaxdist.fit(lambda rows: case(optax.sgd(0.1), rows), topology=FOUR, vary={"rows": [4, 8]}, mesh="auto")
    assert {one.choice["rows"] for one in found.candidates} == {4, 8}
    assert found.chosen is not None
    assert found.chosen.code.startswith("<lambda>(rows=")
    assert {one.share for one in found.candidates} == {0.5, 1.0}, "the same data on every mesh"


def test_a_batch_that_no_mesh_divides() -> None:
    """The step's own mesh is one of the candidates, and no axis crosses hosts that need not."""
    args = case(jaxdist.zero(optax.adam(1e-3), 1), rows=1001)
    alone = jaxdist.fit(*args, topology="2x2xcpu").chosen
    found = jaxdist.fit(*args, topology="2x2xcpu", mesh="auto")
    assert alone is not None
    assert found.chosen is not None
    assert found.chosen.seconds <= alone.seconds
    assert {"data=4", "data=2, model=2"} <= {one.mesh for one in found.candidates} - {"model=4"}


def test_a_model_axis_that_cuts_nothing_is_no_candidate() -> None:
    def make() -> Any:
        step = jaxdist.data_parallel(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))
        return step, jax.ShapeDtypeStruct((3,), jnp.float32), jax.ShapeDtypeStruct((64, 3), jnp.float32)

    found = jaxdist.fit(*make(), topology=FOUR, mesh="auto")
    assert not any("model" in one.mesh for one in found.candidates)


def test_a_mesh_that_is_given() -> None:
    found = jaxdist.fit(*case(optax.sgd(0.1)), topology=FOUR, mesh={"data": 2, "model": -1})
    assert found.plan.mesh == {"data": 2, "model": 2}
    assert found.chosen is not None
    assert 'mesh={"data": 2, "model": 2}' in found.chosen.code
    with pytest.raises(ValueError, match="which these sizes don't make"):
        jaxdist.fit(*case(optax.sgd(0.1)), topology=FOUR, mesh={"data": 3})
