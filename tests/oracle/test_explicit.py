"""Meshes with Explicit axes: results live on the user's, and the shardings that a step names change no value."""

import contextlib
import functools
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import jobs
from harness.check import check_steps, close, compare, train_step
from harness.errors import raises
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, auto_axes, reshard
from jax.sharding import PartitionSpec as P

import jaxdist

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
RNG = np.random.default_rng(0)
W, X = RNG.normal(size=(6, 12)), RNG.normal(size=(16, 6))


def explicit(sizes: dict[str, int], kind: AxisType = EXPLICIT, devices: Any = None) -> Mesh:
    return jax.make_mesh((*sizes.values(),), (*sizes,), (kind,) * len(sizes), devices=devices)


DATA, BOTH = explicit({"data": 8}), explicit({"data": 4, "model": 2})
ONE, FOUR = explicit({"data": 1}, devices=jax.devices()[:1]), jax.devices()[:4]


def trained(forward: Callable[..., Any]) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(forward(w, x) ** 2))(w)
        return w - 0.1 * grad, loss

    return step


def plain(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


# --- shardings in a step

on_data = NamedSharding(DATA, P("data"))
SHARDINGS: dict[str, Callable[..., Any]] = {
    "with_sharding_constraint": lambda w, x: plain(w, lax.with_sharding_constraint(x, P("data"))),
    "of a mesh": lambda w, x: plain(w, lax.with_sharding_constraint(x, on_data)),
    "reshard": lambda w, x: reshard(plain(reshard(w, P("data", None)), reshard(x, P("data"))), P(None, "data")),
    "reshard to a mesh": lambda w, x: plain(w, reshard(x, on_data)),
    "typeof": lambda w, x: reshard(plain(w, x), jax.typeof(x).sharding),
    "dot": lambda w, x: jnp.tanh(jnp.dot(x, w, out_sharding=P("data", None))),
    "einsum to a mesh": lambda w, x: jnp.tanh(jnp.einsum("bi,ij->bj", x, w, out_sharding=on_data)),
    "unreduced": lambda w, x: jnp.tanh(
        reshard(jnp.dot(x, w, out_sharding=P(unreduced=frozenset({"data"}))), P("data"))
    ),
    "reshape": lambda w, x: jnp.tanh(jnp.reshape(x @ w, (2, 8, 12), out_sharding=P(None, "data"))),
    "get": lambda w, x: plain(w, x).at[jnp.arange(16)].get(out_sharding=P("data")),
    "zeros": lambda w, x: plain(w, x) + jnp.zeros((16, 12), out_sharding=P("data")),
    "device_put": lambda w, x: plain(w, jax.device_put(x, on_data)),
    "auto_axes": lambda w, x: auto_axes(plain, out_sharding=P("data"))(w, x),  # type: ignore[call-arg]
    "vmap": lambda w, x: jax.vmap(lambda row: reshard(plain(w, row), P("data")), spmd_axis_name=None)(x),
    "remat": lambda w, x: jax.checkpoint(lambda x: reshard(plain(w, x), P("data")))(x),
    "scan": lambda w, x: lax.scan(lambda c, _: (reshard(plain(w, x), P("data")), None), x @ w, None, 2)[0],
    "jit": lambda w, x: jax.jit(plain, out_shardings=on_data)(w, x),
    "a callback": lambda w, x: plain(w, jax.pure_callback(np.asarray, X, reshard(lax.stop_gradient(x), P("data")))),
    "shard_map": lambda w, x: jax.shard_map(plain, in_specs=(P(), P("data")), out_specs=P("data"))(w, x),
    "shard_map over a mesh": lambda w, x: jax.shard_map(
        plain, mesh=DATA, in_specs=(P(), P("data")), out_specs=P("data")
    )(w, x),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_shardings_in_a_step_change_no_value(name: str) -> None:
    with jax.set_mesh(DATA):
        got = jaxdist.data_parallel(trained(SHARDINGS[name]))(W, X)
    close(got, jax.jit(trained(plain))(W, X))


@pytest.mark.parametrize("name", ["reshard", "typeof", "dot", "unreduced", "zeros", "auto_axes", "vmap", "shard_map"])
def test_shardings_without_a_mesh_that_is_set(name: str) -> None:
    step = jaxdist.data_parallel(trained(SHARDINGS[name]), mesh=ONE)
    close(step(W, X), jax.jit(trained(plain))(W, X))


PARTLY: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "data": (plain, {"in_specs": (P(), P("data")), "out_specs": P("data")}),
    "model": (plain, {"in_specs": (P(None, "model"), P()), "out_specs": P(None, "model")}),
    "a sum": (
        lambda w, x: jnp.tanh(lax.psum(x @ w, "model")),
        {"in_specs": (P("model"), P(None, "model")), "out_specs": P()},
    ),
    "constrained": (
        lambda w, x: plain(w, lax.with_sharding_constraint(x, P(None, "model"))),
        {"in_specs": (P(), P("data")), "out_specs": P("data")},
    ),
    "a loop": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: plain(w, x) + 0 * c, jnp.zeros((4, 12)) + 0 * (x @ w)),
        {"in_specs": (P(), P("data")), "out_specs": P("data")},
    ),
}


@pytest.mark.parametrize("layouts", [None, {"w": 1}])
@pytest.mark.parametrize("name", PARTLY)
def test_shard_map_over_some_axes(name: str, layouts: Any) -> None:
    body, specs = PARTLY[name]
    axes = {axis for spec in jax.tree.leaves(specs["in_specs"]) for axis in spec if axis}
    with jax.set_mesh(BOTH):
        step = trained(jax.shard_map(body, axis_names=axes, **specs))
        got = jaxdist.parallel(step, mesh=BOTH, layouts=layouts)(W, X)
    close(got, jax.jit(trained(plain))(W, X))


def test_what_is_ignored_is_said_once(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "jaxdist"), jax.set_mesh(DATA):
        for k in (2, 3):
            jaxdist.data_parallel(lambda w, x, k=k: w + k * reshard(x, P("data")).mean())(W, X)
    assert sum("shardings" in record.message for record in caplog.records) <= 1  # another test may have said it


def test_an_axis_named_without_its_mesh() -> None:
    step = trained(lambda w, x: plain(w, reshard(x, NamedSharding(jax.sharding.get_abstract_mesh(), P("data")))))
    with jax.set_mesh(DATA), pytest.raises(ValueError, match="mesh") as error:
        jaxdist.data_parallel(step)(W, X)
    assert "reshard" in "".join(error.value.__notes__)


def halves(constrain: Callable[..., Any], w: Any, x: Any) -> Any:
    return jnp.tanh(constrain(x @ w)) @ w.T


# A step with a constraint; its spec; the dimension of `w` that the model axis cuts; what explain says with it alone.
WISHES: dict[str, tuple[Callable[..., Any], P, int | None, tuple[str, str]]] = {
    "features": (halves, P("data", "model"), 0, ("all-to-all of shards", "model")),
    "no rows": (
        lambda c, w, x: (z := plain(w, x)) @ z.T + jnp.sin(c(z)).sum(), P(None, "data"), None,
        ("all-to-all of activations", "data"),
    ),
    "in a loop": (
        lambda c, w, x: lax.scan(lambda x, _: (halves(c, w, x), None), x, None, 2)[0], P("data", "model"), 0,
        ("all-to-all of shards", "model"),
    ),
    "too dear": (lambda c, w, x: c(x), P(None, "data"), 1, ("not followed", "data")),
    "too short": (lambda c, w, x: plain(w, x) * c(w[:3, :1]).sum(), P("data"), None, ("not followed", "data")),
}  # fmt: skip


@pytest.mark.parametrize("name", WISHES)
def test_a_constraint_is_a_wish(name: str) -> None:
    forward, spec, dim, expected = WISHES[name]

    def said(step: Any) -> set[tuple[str, str]]:
        decorated = jaxdist.parallel(step, mesh=BOTH, layouts={"w": dim})
        close(decorated(W, X), jax.jit(step)(W, X))
        return {(row.what, row.axis) for row in jaxdist.explain(decorated, W, X).rows}

    with jax.set_mesh(explicit({"data": 4, "model": 2}, AUTO)):
        constrain = functools.partial(lax.with_sharding_constraint, shardings=spec)
        with_constraint, without = (said(trained(functools.partial(forward, c))) for c in (constrain, lambda x: x))
    assert expected in with_constraint - without


def test_one_update_of_a_dimension_that_two_axes_cut() -> None:
    def step(constrain: Callable[..., Any], w: Any, x: Any) -> Any:
        changed = constrain(x @ w).at[:, 0].set(1.0)
        return 2 * w, (changed.sum(0), changed)

    w, x, two_by_two = (
        RNG.normal(size=(12, 12)),
        RNG.normal(size=(5, 12)),
        explicit({"data": 2, "model": 2}, AUTO, FOUR),
    )
    with jax.set_mesh(two_by_two):
        by_columns = functools.partial(lax.with_sharding_constraint, shardings=P(None, "data"))
        constrained = functools.partial(step, by_columns)
        over = jaxdist.parallel(constrained, mesh=two_by_two, batch_argnums=1, layouts={"w": 1})
        close(over(w, x), jax.jit(functools.partial(step, lambda x: x))(w, x))


# --- where results live


def adam(level: Any, named: bool = True) -> tuple[Callable[..., Any], Any]:
    tx, w = optax.adam(0.1), {"a": jnp.asarray(W), "b": jnp.arange(12.0 * 5).reshape(12, 5) / 60}

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(((reshard(x, P("data")) if named else x) @ w["a"] @ w["b"]) ** 2)

    return train_step(loss, jaxdist.zero(tx, level) if named else tx), (w, tx.init(w))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("mesh", [DATA, explicit({"data": 8}, AUTO), BOTH], ids=["explicit", "auto", "two axes"])
def test_a_loop_under_a_mesh_that_is_set(mesh: Mesh, level: Any, donate: bool) -> None:
    (step, state), (unconstrained, _) = adam(level), adam(0, named=False)
    batches = [X[:15], X[1:], X[:15]]
    with jax.set_mesh(mesh):
        on: Any = {"data": 4, "model": 2} if mesh is BOTH else 8
        kinds = {"mesh": on if mesh is BOTH else None, "batch_argnums": None, "donate": donate}
        new = check_steps(step, state, batches, on=on, plain=unconstrained, **kinds)
        for x in jax.tree.leaves(new):
            jnp.sum(x)
            assert x.sharding.mesh == mesh or not isinstance(x, jax.Array)  # one with a padded end


def test_state_stays_where_it_is() -> None:
    """Also what has a padded end: the step takes its memory, not that of a copy."""
    step, state = adam(3)
    with jax.set_mesh(DATA):
        step = jaxdist.data_parallel(step, donate=True)
        *first, _ = step(*state, X)
        step(*first, X)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))


def test_what_is_in_shards_and_wanted_whole() -> None:
    """The labels' logits, of a table in slices along the model axis."""

    def step(table: Any, tokens: Any) -> Any:
        def loss(table: Any) -> Any:
            found = table.at[tokens].get(mode="clip")
            logits = jnp.tanh(found) @ table.T
            own = jnp.take_along_axis(logits, jnp.clip(tokens, 0, 36)[..., None], -1)[..., 0]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

        value, grad = jax.value_and_grad(loss)(table)
        return table - 0.1 * grad, value

    table, tokens = jnp.asarray(RNG.normal(size=(37, 6))), RNG.integers(0, 41, (6, 2))
    mesh = explicit({"data": 1, "model": 4}, devices=jax.devices()[:4])
    got = jaxdist.parallel(step, mesh=mesh, layouts={"table": 0})(table, tokens)
    close(jaxdist.unshard(got), jax.jit(step)(table, tokens))


@pytest.mark.parametrize(
    ("given", "users"),
    [
        (None, DATA),
        ({"data": 8}, DATA),
        ({"data": 4, "model": -1}, BOTH),
        (BOTH, BOTH),
        (Mesh(BOTH.devices, BOTH.axis_names), BOTH),
        (BOTH, None),
        (ONE, ONE),
        (None, explicit({"data": 8}, devices=jax.devices()[::-1])),
    ],
)
def test_results_are_arrays_of_the_users_mesh(given: Any, users: Mesh | None) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - x.mean(), {"loss": x.mean(), "each": x * 2, "key": jax.random.key(0)}

    with jax.set_mesh(users) if users else contextlib.nullcontext():
        over = jaxdist.data_parallel(step) if given is None else jaxdist.parallel(step, mesh=given)
        w, aux = over(over(W, X)[0], X)
        for x in jax.tree.leaves((w, aux)):
            assert x.sharding.mesh == (users or given)
        aux["each"] + 1, aux["loss"] * w  # they compose
    want, aux_of_one = step(step(W, X)[0], X)
    compare((w, aux), jax.tree.map(jnp.asarray, (want, aux_of_one)))


def test_a_step_goes_where_the_user_is() -> None:
    step = jaxdist.data_parallel(trained(plain))
    before, _ = step(W, X)
    with jax.set_mesh(DATA):
        under, _ = step(before, X)
        jnp.sum(under)
    after, _ = step(under, X)
    assert [w.sharding.mesh.axis_types for w in (before, under, after)] == [(AUTO,), (EXPLICIT,), (AUTO,)]
    want = W
    for _ in range(3):
        want, _ = trained(plain)(want, X)
    close(after, want)


def test_tools_under_an_explicit_mesh(tmp_path: Path) -> None:
    step, state = adam(3)
    with jax.set_mesh(DATA):
        step = jaxdist.data_parallel(step, verify=True, check_finite=True)
        *state, loss = step(*state, X)
        assert jaxdist.verify(step, *state, X)
        assert "reduce-scatter" in str(jaxdist.explain(step, *state, X))
        compiled = step.lower(*state, X).compile()
        *again, loss = compiled(*state, X)
        jaxdist.save(tmp_path, state, step=1)
        *restored, restored_loss = step(*jaxdist.restore(tmp_path, state), X)
        compare(jaxdist.unshard(restored), jaxdist.unshard(again))
        assert loss == restored_loss


@pytest.mark.parametrize(
    ("users", "tokens"),
    [
        (explicit({"x": 8}), ["'x': 8", "'data': 8", "jax.set_mesh"]),
        (explicit({"data": 4}, devices=jax.devices()[:4]), ["'data': 4", "'data': 8", "0, 1, 2, 3 "]),
        (BOTH, ["'model': 2", "'data': 8", "jaxdist.parallel"]),
    ],
)
def test_an_explicit_mesh_that_is_not_the_steps(users: Mesh, tokens: list[str]) -> None:
    with jax.set_mesh(users), raises(jaxdist.StepError, *tokens):
        jaxdist.data_parallel(trained(plain))(W, X)


def test_state_within_groups_has_no_place_on_an_explicit_mesh() -> None:
    tx = jaxdist.zero(optax.adam(0.1), 3, within=4)
    step = train_step(lambda w, x: jnp.mean((x @ w) ** 2), tx)
    with jax.set_mesh(DATA), raises(jaxdist.StepError, "within", "Auto"):
        jaxdist.data_parallel(step)(jnp.asarray(W), optax.adam(0.1).init(jnp.asarray(W)), X)


def test_a_plan_and_a_compiled_step_under_another_mesh() -> None:
    step, w, x = jaxdist.data_parallel(plain), np.ones((8, 12)), np.ones((16, 8))
    compiled = step.lower(w, x).compile()
    users = jax.make_mesh((len(jax.devices()),), ("data",), (AxisType.Explicit,))
    other = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(users), raises(TypeError, "compiled for other arguments", "mesh"):
        compiled(w, x)
    with jax.set_mesh(other):
        assert jaxdist.plan(jaxdist.parallel(plain, mesh=other), w, x, topology="4xcpu", levels=()).own.bytes


def test_an_explicit_mesh_for_the_whole_process() -> None:
    env = jobs.environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"})
    path = Path(__file__).parent / "scripts" / "set_mesh.py"
    done = subprocess.run(
        [sys.executable, str(path), "data"], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# --- a transformer with types, as JAX's tutorial of sharding in types has it


def attention(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhc->bthc", x, w[n], out_sharding=P("data", None, "model")) for n in "qkv")
    scores = jnp.einsum("bthc,bshc->bhts", q, k, out_sharding=P("data", "model")) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    mixed = jnp.einsum("bhts,bshc->bthc", weights, v, out_sharding=P("data", None, "model"))
    return jnp.einsum("bthc,hcd->btd", mixed, w["o"], out_sharding=P("data"))


def transformer(params: Any, tokens: Any) -> Any:
    x = params["embedding"].at[tokens].get(out_sharding=P("data"))
    for w in params["layers"]:
        x = x + attention(w, x)
        hidden = jax.nn.gelu(jnp.einsum("btd,df->btf", x, w["up"], out_sharding=P("data", None, "model")))
        x = x + reshard(jnp.einsum("btf,fd->btd", hidden, w["down"], out_sharding=P("data")), jax.typeof(x).sharding)
    return jnp.einsum("btd,vd->btv", x, params["embedding"], out_sharding=P("data"))


def test_a_transformer_with_types() -> None:
    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = transformer(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    draw = lambda *shape: jnp.asarray(RNG.normal(size=shape) / 3)
    layer = lambda: {
        **{n: draw(8, 4, 2) for n in "qkv"}, "o": draw(4, 2, 8), "up": draw(8, 16), "down": draw(16, 8),
    }  # fmt: skip
    params = {"embedding": draw(12, 8), "layers": [layer(), layer()]}
    tokens, want, loss, loss_of_one = RNG.integers(0, 12, (8, 7)), params, None, None
    with jax.set_mesh(explicit({"data": 1, "model": 1}, devices=jax.devices()[:1])):
        for _ in range(3):
            want, loss_of_one = jax.jit(step)(want, tokens)
    with jax.set_mesh(BOTH):
        specs = {"q": P(None, "model"), "up": P(None, "model"), "down": P("model")}
        layers = [{n: jax.device_put(x, specs.get(n, P())) for n, x in w.items()} for w in params["layers"]]
        params, decorated = {**params, "layers": layers}, jaxdist.parallel(step, mesh=BOTH)
        for _ in range(3):
            params, loss = decorated(params, jax.device_put(tokens, P("data")))
        norm = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(params)))
        assert params["layers"][0]["up"].sharding == NamedSharding(BOTH, P(None, "model"))
    close((params, loss), (want, loss_of_one))
    assert np.isfinite(norm)
