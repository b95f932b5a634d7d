"""`parallel(mesh="auto")`: the mesh of the least time by the estimate, and then as if it had been given."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import oracle
from harness.meshes import mesh
from harness.parity import compare
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.planning.topology import Topology
from jaxdist.step.choice import meshes, order


def mlp(w: Any, x: Any) -> Any:
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


def case(rows: int, width: int, hidden: int, places: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    w = {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5) for name, shape in shapes.items()}
    return w, rng.normal(size=(rows, places, width) if places else (rows, width))


SMALL, WIDE = case(512, 16, 16), case(1, 64, 4096, 8)


def auto(step: Any = mlp, **options: Any) -> Any:
    return jaxdist.parallel(step, mesh="auto", **options)


def chosen(step: Any) -> dict[str, int]:
    """The mesh of a step that was called."""
    return dict(step._mesh.shape)


def test_it_is_what_one_device_computes() -> None:
    found = oracle.idiom("gru_lengths", 24, level=3)
    want = oracle.run_plain(found, 2, 24)
    got = oracle.run_decorated(found, steps=2, rows=24, with_=jaxdist.parallel, mesh="auto")
    assert oracle.difference(want, got) < 1e-10


@pytest.mark.parametrize("args", [SMALL, case(4, 32, 64, 8)])
def test_none_takes_less_by_the_estimate(args: Any) -> None:
    step = auto()
    step.lower(*args)
    topology = Topology.parse("8xcpu")
    seconds = {
        tuple(sizes.items()): one.seconds
        for sizes in meshes(8, 8, [args[1]])
        for one in jaxdist.fit(jaxdist.data_parallel(mlp), *args, topology=topology, mesh=sizes).candidates
    }
    assert len(seconds) > 3
    assert tuple(chosen(step).items()) == min(seconds, key=lambda one: seconds[one])


def test_rows_are_divided_and_else_the_model_once_and_for_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXDIST_LOG", "comm,placements")
    for args, want in ((SMALL, {"data": 8}), (WIDE, {"model": 8})):
        step = auto(donate=False)
        compare(jaxdist.unshard(step(*args)), jax.jit(mlp)(*args))
        assert chosen(step) == want
        said = capsys.readouterr().err
        assert all(f"[jaxdist {word}] step 'mlp" in said for word in ("comm", "placements"))
    w, _ = step(WIDE[0], np.ones((64, 64)))
    assert chosen(step) == {"model": 8}
    assert w["up"].sharding.mesh.shape == {"model": 8}


def test_nothing_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    of = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args, **more: (lowered.append(1), of(*args, **more))[1])
    found = jaxdist.explain(auto(), *jax.eval_shape(lambda: WIDE))
    assert found.mesh.startswith("model=8, ")
    assert "the next: " in found.mesh
    assert str(found).startswith(f"mesh: {found.mesh}\n")
    assert not lowered
    assert jaxdist.explain(jaxdist.data_parallel(mlp), *SMALL).mesh == ""


def test_the_mesh_of_state_in_slices_is_taken() -> None:
    w, x = SMALL
    on = mesh({"data": 2, "model": 4})
    cut = {"up": jax.device_put(w["up"], NamedSharding(on, P(None, "model"))), "down": w["down"]}
    step = auto(donate=False)
    assert "w['up'] lies in slices on it" in jaxdist.explain(step, cut, x).mesh
    compare(jaxdist.unshard(step(cut, x)), jax.jit(mlp)(w, x))
    assert chosen(step) == {"data": 2, "model": 4}
    step = auto(donate=False)
    step(w, jax.device_put(x, NamedSharding(on, P("data"))))
    assert chosen(step) == {"data": 8}, "a batch is no state"


def test_memory_is_a_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of devices that have their own: of 8 examples one on each is fastest, and all of the state beside it."""
    context = jaxdist.get_context()
    for memory, said in ((0, "the fastest; the next"), (1, "it needs the least memory, and none is sure to fit")):
        monkeypatch.setattr(context, "kind", dataclasses.replace(context.kind, memory=memory))
        assert said in jaxdist.explain(auto(), *SMALL).mesh
    assert order(2.0, 10, 5, 10) < order(1.0, 11, 5, 10) < order(0.5, 12, 5, 10)


def test_what_is_written_for_a_device_of_one_mesh() -> None:
    """Meshes without an axis that it names are left out."""

    def step(w: Any, x: Any) -> Any:
        y = jaxdist.per_device(lambda x: x * 2, P("data"), P("data"))(x)
        return w - 0.1 * jnp.mean(y), jnp.sum(y)

    decorated, args = auto(step, donate=False), (jnp.ones(3), np.ones((8, 3)))
    compare(decorated(*args), jax.jit(lambda w, x: (w - 0.1 * jnp.mean(x * 2), jnp.sum(x * 2)))(*args))
    assert "data" in chosen(decorated)


def trained(tx: Any) -> Any:
    def step(w: Any, opt: Any, x: Any) -> Any:
        updates, opt = tx.update(jax.grad(lambda w: mlp(w, x)[1])(w), opt, w)
        return optax.apply_updates(w, updates), opt

    return step


def test_what_is_around_a_step(tmp_path: Path) -> None:
    tx = jaxdist.zero(optax.adam(1e-2), level=1)
    w, x = case(2, 32, 64)
    plain, step = jax.jit(trained(tx)), auto(trained(tx), donate=False)
    state = step(w, tx.init(w), x)
    first = plain(w, tx.init(w), x)
    want = plain(*first, x)
    compare(jaxdist.unshard(state), first)
    assert jaxdist.memory(state).total.device < jaxdist.memory((w, tx.init(w))).total.device
    jaxdist.check_sync(state)
    jaxdist.save(tmp_path, state, 1)
    restored = jaxdist.restore(tmp_path, jax.eval_shape(lambda: (w, tx.init(w))))
    (loaded,) = jaxdist.loader(x, 2, shuffle=False)
    for call, given, batch in (
        (step, restored, x), (auto(trained(tx), donate=False), state, x), (step.lower(*state, x).compile(), state, x),
        (step, state, loaded),
    ):  # fmt: skip
        compare(jaxdist.unshard(call(*given, batch)), want)
    assert step.eval_shape(*state, x)[0]["up"].shape == w["up"].shape
    assert jax.tree.structure(jax.eval_shape(step, w, tx.init(w), x)) == jax.tree.structure(state)


def test_meshes_that_groups_do_not_divide_are_none() -> None:
    tx = jaxdist.zero(optax.sgd(0.1), 3, within=4)
    w, x = case(16, 8, 16)
    compare(jaxdist.unshard(auto(trained(tx))(w, tx.init(w), x)), jax.jit(trained(tx))(w, tx.init(w), x))


def test_elsewhere() -> None:
    step, topology = auto(), Topology.parse("4xcpu")
    assert dict(jaxdist.plan(step, *WIDE, topology=topology).mesh) == {"model": 4}
    assert dict(jaxdist.plan(step, *SMALL, topology=topology).mesh) == {"data": 4}
    found = jaxdist.fit(step, *WIDE, topology=topology)
    assert found.chosen is not None
    assert found.chosen.mesh == "model=4"
    assert {one.mesh for one in found.candidates} > {"model=4"}
    assert step._context is None, "it is to be chosen for this job yet"


def test_off_and_under_tracers() -> None:
    compare(auto(enabled=False)(*SMALL), jax.jit(mlp)(*SMALL))
    step = auto()
    assert jax.eval_shape(step, *SMALL)[1].shape == ()
    again = pickle.loads(pickle.dumps(step))
    assert step._context is again._context is None
    assert again.mesh == "auto"


def test_it_is_a_mesh_of_parallel_alone() -> None:
    with pytest.raises(TypeError, match=r"jaxdist\.parallel takes"):
        jaxdist.data_parallel(mlp, mesh="auto")  # type: ignore[call-overload]


def test_an_error_of_the_step_is_the_steps() -> None:
    step = auto()
    with pytest.raises(TypeError, match="dot_general"):
        step(SMALL[0], np.ones((8, 5)))
    step(*WIDE)
    assert chosen(step) == {"model": 8}, "no mesh was chosen for it"
