"""`zero`, `shard`, `unshard`: what is kept where, that nothing else changes, and what is refused."""

import collections
import copy
import functools
import logging
import pickle
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from harness.check import check_steps, close, compare, decorated, held, mesh, train_step
from harness.errors import raises
from jax import lax
from jax.flatten_util import ravel_pytree
from optax.experimental import aggregating

import jaxdist
from jaxdist import planning

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(6, 5))), "v": jnp.asarray(RNG.normal(size=(5, 8))), "s": jnp.asarray(2.0)}
BATCH = RNG.normal(size=(16, 6))
BATCHES = [np.roll(BATCH, i, 0) for i in range(3)]
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
SLICES, WHOLE = {"w": 10, "v": 10, "s": 1}, {"w": 30, "v": 40, "s": 1}
"""Entries on one of four devices: 6x5 in slices of 2x5, 5x8 in slices of 5x2."""


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ p["w"] @ p["v"] * p["s"]) ** 2)


def state_of(tx: Any, params: Any = PARAMS) -> Any:
    return params, tx.init(params)


def step_of(tx: Any, loss_fn: Any = loss_fn) -> Any:
    return train_step(loss_fn, tx)


def keeps(tree: Any) -> Any:
    return jax.tree.map(held, tree)


def run(step: Any, state: Any, steps: int = 1) -> Any:
    for batch in BATCHES[:steps]:
        *state, _ = step(*state, batch)
    return tuple(state)


# --- what is kept where


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.rmsprop(0.1)], ids=["momentum", "rmsprop"])
def test_state_with_exactly_the_leaves_of_the_parameters_is_kept_in_shards(tx: Any, level: Any) -> None:
    sharded = jaxdist.zero(tx, level)
    params, opt_state = check_steps(step_of(sharded), state_of(sharded), BATCHES, on=4, plain=step_of(tx))
    assert [held(x) for x in jax.tree.leaves(opt_state)] == jax.tree.leaves(SLICES)
    assert keeps(params) == WHOLE


def test_gradients_behind_a_barrier_are_cut_each_by_its_shape() -> None:
    tx = jaxdist.zero(ADAM, 2)
    behind = tx._replace(update=lambda g, *rest: tx.update(lax.optimization_barrier(g), *rest))
    params = {"b": jnp.ones(3), "u": jnp.ones((8, 4)), "w": jnp.ones((4, 8))}
    loss = lambda p, x: jnp.mean((x[:, :8] @ p["u"] @ p["w"] + p["b"].sum()) ** 2)
    batch = np.random.default_rng(0).normal(size=(16, 8))
    check_steps(train_step(loss, behind), state_of(behind, params), [batch], on=4, plain=train_step(loss, ADAM))


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_a_level_keeps_in_shards(level: Any) -> None:
    tx = jaxdist.zero(ADAM, level)
    params, opt_state = check_steps(step_of(tx), state_of(tx), BATCHES, on=4, plain=step_of(ADAM))
    assert keeps(opt_state[1][0].mu) == (SLICES if level else WHOLE)
    assert keeps(params) == (SLICES if level == 3 else WHOLE)


@pytest.mark.parametrize("inner", [jax.checkpoint, lambda f: lambda x: lax.cond(True, jax.checkpoint(f), f, x)])
def test_state_that_comes_through_a_function_is_kept_in_shards(inner: Any) -> None:
    tx, same = jaxdist.zero(ADAM, 3), inner(lambda tree: tree)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        return step_of(tx)(same(params), same(opt_state), x)

    params, opt_state = check_steps(step, state_of(tx), BATCHES, on=4)
    assert keeps(params) == keeps(opt_state[1][0].mu) == SLICES


def test_groups_of_two_sizes_are_refused() -> None:
    one, other = jaxdist.zero(ADAM, 1, within=2), jaxdist.zero(ADAM, 1)

    def step(params: Any, a: Any, b: Any, x: Any) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        return params, one.update(grads, a, params)[1], other.update(grads, b, params)[1]

    with raises(ValueError, "groups of 2 and of 4", "within"):
        decorated(step, 4)(PARAMS, one.init(PARAMS), other.init(PARAMS), BATCH)


def test_what_is_alike_is_kept_alike() -> None:
    """A target network as its online network is, and so are gradients that a step returns."""
    tx = jaxdist.zero(ADAM, 3)

    def step(target: Any, params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, x) * loss_fn(target, x))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return target, optax.apply_updates(params, updates), opt_state, (loss, grads)

    target, params, opt_state = check_steps(step, (PARAMS, *state_of(tx)), BATCHES, on=4)
    assert keeps(target) == keeps(params) == SLICES
    assert keeps(decorated(step, 4)(target, params, opt_state, BATCH)[3][1]) == SLICES
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, PARAMS)
    assert jax.tree.structure(opt_state) == jax.tree.structure(ADAM.init(PARAMS))


def test_a_communicator_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rules take the place of ours, on the axis of data or its inner part."""
    used: list[str] = []

    def rule(name: str, call: Any) -> Any:
        return lambda x, **how: (used.append(name), call(x, **how))[1]

    own = {
        "all_reduce": lambda x, wire: lax.psum(x, "data"),
        "reduce_scatter": lambda x, dim, devices, wire: lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True),
        "all_gather": lambda x, dim, size, devices: lax.all_gather(x, "data", axis=dim, tiled=True),
        "max": lambda x: lax.pmax(x, "data"),
    }
    given = {name: rule(name, call) for name, call in own.items()}
    monkeypatch.setattr(jaxdist.get_context(), "rules", given)  # as `init(communicator=given)` does
    params = {"w": PARAMS["v"].T[:, :4], "v": PARAMS["v"][:4], "s": PARAMS["s"]}  # 4 devices divide these
    shards = own.keys() - {"max"}
    for level, within, names in ((0, None, {"all_reduce"}), (2, None, shards), (3, 2, shards)):
        train = step_of(jaxdist.zero(ADAM, level, within))  # type: ignore[arg-type]

        def step(p: Any, o: Any, x: Any, train: Any = train) -> Any:
            p, o, loss = train(p, o, x)
            return p, o, (loss, x.max())

        used.clear()
        check_steps(step, state_of(ADAM, params), [RNG.normal(size=(16, 8))], on=4)
        assert set(used) == names | {"max"}, level


def test_leaves_of_all_kinds() -> None:
    """Of all shapes, in less precision, frozen, and one array as two of them."""
    shapes = [(), (1,), (3,), (7, 5), (2, 3, 5, 7), (0, 4), (33, 1)]
    params = {f"{i}": jnp.asarray(RNG.normal(size=shape)) for i, shape in enumerate(shapes)}
    params |= {"half": params["3"].astype(jnp.float32), "frozen": params["3"].T, "tied": params["3"]}
    x = {name: RNG.normal(size=(24, *p.shape)).astype(p.dtype) for name, p in params.items()}
    labels = {name: "freeze" if name == "frozen" else "train" for name in params}
    adamw = optax.masked(optax.adamw(1e-2), lambda p: True)
    inner = optax.partition({"freeze": optax.set_to_zero(), "train": adamw}, labels)

    def loss(p: Any, x: Any) -> Any:
        each = {name: jnp.sum(jnp.tanh(w - x[name]).reshape(24, -1) ** 2, 1) for name, w in p.items()}
        return sum(jnp.mean(y, dtype=float) for y in each.values()) + jnp.sum(p["3"] * p["tied"] * p["frozen"].T)

    tx = jaxdist.zero(inner, 3)
    got = check_steps(step_of(tx, loss), state_of(inner, params), [x, x], tolerance=1e-6)
    compare(jaxdist.unshard(got[0]["frozen"]), params["frozen"], 0)


def test_levels_and_groups_can_change_on_the_way() -> None:
    want = got = state_of(ADAM)
    for level, within in ((3, 2), (2, None), (1, 2), (3, None), (0, None)):
        want = run(jax.jit(step_of(ADAM)), want)
        got = run(decorated(step_of(jaxdist.zero(ADAM, level, within)), 4), got)  # type: ignore[arg-type]
        close(got, want)
    # What is in slices of groups stays so, until it is made whole.
    assert keeps(got[0]) == {"w": 15, "v": 20, "s": 1}
    assert keeps(jaxdist.unshard(got[0])) == WHOLE


@pytest.mark.parametrize("level", [0, 3])
def test_outside_a_decorated_step_it_is_the_transformation(level: Any) -> None:
    tx = jaxdist.zero(ADAM, level)
    compare(run(jax.jit(step_of(tx)), state_of(tx)), run(jax.jit(step_of(ADAM)), state_of(ADAM)), 0)


def test_what_cannot_be_computed_on_shards_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def median(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda m: -0.1 * m / (1 + jnp.sort(m.ravel())[m.size // 2] ** 2), updates), state

    sorting = optax.GradientTransformation(lambda params: optax.EmptyState(), median)
    for _ in range(2):  # a step that is decorated anew says nothing new
        with caplog.at_level(logging.WARNING, "jaxdist"):
            jaxdist.data_parallel(step_of(jaxdist.zero(sorting, 2, split="slices"))).lower(*state_of(sorting), BATCH)
    (said,) = caplog.messages
    assert all(word in said for word in ("640 B", "sort", "test_zero.py:"))
    caplog.clear()
    for tx in (jaxdist.zero(ADAM, 3), jaxdist.zero(optax.contrib.muon(1e-2), 2), jaxdist.zero(sorting, 2)):
        jaxdist.data_parallel(step_of(tx)).lower(*state_of(tx), BATCH)
    assert not caplog.messages


def test_dynamic_loss_scaling_skips_the_step_on_all_devices() -> None:
    """flax's DynamicScale; one device's part of the batch overflows."""
    tx = jaxdist.zero(optax.adam(1e-2), 3)

    def step(params: Any, opt_state: Any, scale: Any, x: Any) -> Any:
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x)
        updates, new_state = tx.update(grads, opt_state, params)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return keep(optax.apply_updates(params, updates), params), keep(new_state, opt_state), scale, loss

    bad = BATCH.copy()
    bad[3] = np.inf
    start = (*state_of(tx), DynamicScale(scale=jnp.asarray(2.0**16)))  # type: ignore[arg-type]
    *_, scale = check_steps(step, start, [BATCH, bad, BATCH])
    assert float(scale.scale) == 2.0**15


def test_gradients_of_each_example() -> None:
    """`dpsgd` is given those: it clips and adds them up itself."""

    def step_with(tx: Any) -> Any:
        def step(params: Any, opt_state: Any, x: Any) -> Any:
            grads = jax.vmap(jax.grad(loss_fn), (None, 0))(params, x[:, None])
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, 0

        return step

    tx = optax.contrib.dpsgd(0.1, 0.01, 1.3, 0, momentum=0.9)
    got = check_steps(step_with(jaxdist.zero(tx, 3)), state_of(tx), BATCHES[:2], on=4, plain=step_with(tx))
    assert keeps(got[0]) == SLICES


class Descent:
    """A transformation of the user's own class."""

    def __init__(self, lr: float):
        self.lr = lr

    def init(self, params: Any) -> Any:
        return ()

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        return -self.lr * updates, state


def test_the_class_of_a_transformation_stays() -> None:
    """A loop that asks for it goes on in the same way: with gradients of each example, here."""
    aggregator = aggregating.process(optax.identity(), aggregating.average_per_element_updates(), optax.sgd(0.1))

    def step(w: Any, state: Any, x: Any, tx: Any) -> Any:
        loss_of = lambda w, x: jnp.mean((x @ w) ** 2)
        of_each = lambda w: jax.vmap(jax.grad(loss_of), (None, 0))(w, x)
        grads = of_each(w) if isinstance(tx, aggregating.Aggregator) else 3 * jax.grad(loss_of)(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, 0.0

    w, sharded = jnp.ones((6, 4)), jaxdist.zero(aggregator, level=1)
    plain, zeroed = functools.partial(step, tx=aggregator), functools.partial(step, tx=sharded)
    check_steps(zeroed, (w, sharded.init(w)), BATCHES, on=4, plain=plain)
    accumulating: Any = optax.MultiSteps(optax.sgd(0.1), 2)
    several: Any = jaxdist.zero(accumulating)
    assert isinstance(several, optax.MultiSteps)
    assert not several.has_updated(several.init(w))
    assert isinstance(jaxdist.zero(optax.sgd(0.1)), optax.GradientTransformationExtraArgs)
    own: Any = jaxdist.zero(typing.cast("Any", Descent(0.1)))
    own.lr = 0.5
    np.testing.assert_array_equal(own.update(jnp.ones(2), ())[0], [-0.5, -0.5])
    named: Any = collections.namedtuple("Named", ("init", "update", "name"))(*optax.sgd(0.1), "sgd")
    kept: Any = jaxdist.zero(named)
    assert (type(kept), kept.name) == (type(named), "sgd")
    check_steps(step_of(kept), state_of(kept), BATCHES, on=4, plain=step_of(named))


def test_parameters_that_are_not_given_to_update() -> None:
    def step_with(tx: Any) -> Any:
        def step(params: Any, opt_state: Any, x: Any) -> Any:
            updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state)
            return optax.apply_updates(params, jax.tree.map(lambda u: 2 * u, updates)), opt_state, 0

        return step

    adam = optax.adam(1e-2)
    got = check_steps(step_with(jaxdist.zero(adam, 1)), state_of(adam), BATCHES, on=4, plain=step_with(adam))
    assert keeps(got[1][0].mu) == SLICES
    assert keeps(got[0]) == WHOLE


def test_evaluation_takes_shards_and_a_copy_survives_the_next_step() -> None:
    tx = jaxdist.zero(ADAM, 3)
    step = jaxdist.data_parallel(step_of(tx))
    state = run(step, state_of(tx))
    evaluate = jaxdist.data_parallel(loss_fn)
    got = float(evaluate(state[0], BATCH))
    assert got == pytest.approx(float(loss_fn(jaxdist.unshard(state[0]), BATCH)), rel=1e-12)
    assert float(evaluate(state[0], BATCH)) == got
    whole = jaxdist.unshard(state)
    before = jax.tree.map(np.array, whole)
    run(step, state)
    close(whole, before, 0)


def test_a_leaf_with_padding_looks_like_the_array() -> None:
    x = jaxdist.shard(PARAMS)["w"]
    assert (x.shape, x.ndim, x.size, x.dtype, x.nbytes) == ((6, 5), 2, 30, np.float64, 240)
    np.testing.assert_array_equal(np.asarray(x), PARAMS["w"])
    state = jaxdist.zero(ADAM, 3).init(jaxdist.shard(PARAMS))
    close(jaxdist.unshard(state), ADAM.init(PARAMS))
    np.testing.assert_array_equal(jnp.sum(jnp.asarray(x), 1), jnp.sum(PARAMS["w"], 1))
    assert jax.block_until_ready(x) is x
    for made in (jnp.zeros_like(x), *jax.tree.leaves(optax.tree.zeros_like(jaxdist.shard(PARAMS)))):
        np.testing.assert_array_equal(made, np.zeros(made.shape))
    for same in (pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x), np.array(x)):
        np.testing.assert_array_equal(np.asarray(same), PARAMS["w"])
    assert isinstance(copy.deepcopy(x), type(x))
    with pytest.raises(AttributeError):
        x._unknown  # noqa: B018
    assert getattr(x, "unknown", None) is None


def _of_a_model(x: Any) -> Any:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(x)

    return nnx.jit(lambda model: jnp.tanh(model.w))(Model())


@pytest.mark.parametrize(
    "use",
    [lambda x: x * 2, lambda x: 2 - x, lambda x: x // 2, lambda x: x[0], lambda x: x.T @ x, lambda x: np.ones(6) @ x,
     lambda x: x == x, lambda x: x < 1, lambda x: 1 << x.astype(int), abs, len, list,
     jnp.sum, jnp.linalg.norm, lambda x: jnp.where(True, x, 0), jax.jit(lambda x: x), jax.jit(jnp.tanh),
     lambda x: jax.jit(jnp.tanh).lower(x).compile()(x), lambda x: jax.jit(lambda: lax.tanh(x))(), lax.tanh,
     jax.nn.relu, jax.nn.softmax, jax.grad(lambda x: jnp.sum(x**2)), lambda x: jax.vjp(jnp.tanh, x)[1](x),
     lambda x: jax.jvp(jnp.tanh, (x,), (x,)), jax.vmap(lambda x: 2 * x), jax.checkpoint(jnp.tanh), _of_a_model,
     lambda x: lax.scan(lambda c, row: (c + row, None), x[0], x), optax.global_norm,
     lambda x: ravel_pytree([x, x])[0], lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
     lambda x: x.sum(), lambda x: x.astype("int8"), lambda x: x.at[0].set(1), jax.device_put, jax.device_get,
     jnp.from_dlpack, lambda x: jax.eval_shape(jnp.sum, x).shape, lambda x: x.aval.shape, lambda x: jax.typeof(x).shape,
     lambda x: jax.tree.map(jnp.shape, jax.make_jaxpr(jnp.tanh)(x).in_avals)],
)  # fmt: skip
def test_one_process_has_the_value_of_a_padded_leaf_outside_of_a_step(use: Callable[[Any], Any]) -> None:
    compare(use(jaxdist.shard(PARAMS)["w"]), use(PARAMS["w"]), 1e-15)


def test_what_is_about_devices_is_refused_by_name() -> None:
    x = jaxdist.shard(PARAMS)["w"]
    for name in ("addressable_shards", "device", "delete", "unknown"):
        with raises(AttributeError, name, "jaxdist.unshard", "(6, 5)"):
            getattr(x, name)


def test_memory_counts_what_is_replicated_and_padding() -> None:
    tx = jaxdist.zero(optax.adam(1e-2), 3)
    step = decorated(step_of(tx), 4)
    params, opt_state = run(step, state_of(tx))
    table = planning.memory({"params": params, "opt_state": opt_state}, step.lower(params, opt_state, BATCH).compile())
    row = next(row for row in table.rows if row.kind == "params")
    assert (row.whole, row.device, row.replicated) == (8 * (30 + 40 + 1), 8 * (10 + 10 + 1), 8)
    assert row.padding == pytest.approx(8 * (10 - 30 / 4), abs=8)
    assert table.compiled["arguments"] >= table.total.device
    assert all(word in str(table) for word in ("params", "opt_state", "replicated", "padding", "total"))


# --- groups of devices


@pytest.mark.parametrize(("devices", "level"), [(4, 2), (8, 3)])
def test_a_group_keeps_what_all_devices_would(level: Any, devices: int) -> None:
    tx, flat = jaxdist.zero(ADAM, level, within=2), jaxdist.zero(ADAM, level)
    got = check_steps(step_of(tx), state_of(tx), BATCHES, on=devices, plain=step_of(ADAM))
    assert keeps(tuple(got)) == keeps(run(decorated(step_of(flat), 2), state_of(flat)))


def test_shard_and_unshard_within_groups() -> None:
    tree = {"even": jnp.arange(12.0).reshape(4, 3), "odd": jnp.arange(5.0), "one": jnp.ones(())}
    kept = jaxdist.shard(tree, within=2)
    assert planning.memory(kept).total.device == (6 + 3 + 1) * 8
    compare(jaxdist.unshard(kept), tree, 0)
    jaxdist.check_sync(kept)
    x = np.random.default_rng(0).normal(size=(16, 4))
    evaluate = decorated(lambda p, x: jnp.mean(x @ p["even"]), 8)
    close(evaluate(kept, x), np.mean(x @ tree["even"]))


# --- refused


zero: Any = jaxdist.zero
REFUSED: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    *((lambda level=level: zero(ADAM, level), ValueError, ("level=",)) for level in (4, -1, "2", 1.0, True, None)),
    *((lambda tx=tx: zero(tx, 1), TypeError, ("init", "update")) for tx in (None, 1e-3, optax.adam, lambda g: g)),
    *((lambda given=given: zero(ADAM, 2, **given), ValueError, tuple(f"{name}=" for name in given)) for given in (
        {"split": "owner"}, {"split": 2}, {"within": "node"}, {"within": 0}, {"within": 1.5})),
    (lambda: zero(ADAM, 0, offload=True), ValueError, ("level 0",)),
    (lambda: zero(ADAM, 1, offload="host"), TypeError, ("offload='host'",)),
    (lambda: zero(ADAM, 1, precision="half"), ValueError, ("precision='half'", "bf16", "fp16")),
    (lambda: decorated(step_of(zero(ADAM, 2, 3)), 4)(*state_of(ADAM), BATCH), ValueError, ("3", "4")),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "tokens"), REFUSED)
def test_refused(call: Any, kind: type[Exception], tokens: tuple[str, ...]) -> None:
    with raises(kind, *tokens):
        call()


def test_parameters_that_are_needed_and_cannot_be_found() -> None:
    def step(params: Any, opt_state: Any, x: Any) -> Any:
        return jaxdist.zero(optax.adam(1e-2), 3).update(jax.grad(loss_fn)(params, x), opt_state)

    with raises(ValueError, "level=3", "tx.update(grads, state, params)"):
        jaxdist.data_parallel(step)(PARAMS, optax.adam(1e-2).init(PARAMS), BATCH)


def test_state_of_another_number_of_devices() -> None:
    tx = jaxdist.zero(ADAM, 1)
    state = run(decorated(step_of(tx), 4), state_of(tx))
    with raises(ValueError, "opt_state", "0 to 3", "0 to 7"):
        jaxdist.data_parallel(step_of(tx))(*state, BATCH)
    run(jaxdist.data_parallel(step_of(tx)), jaxdist.unshard(state))


def test_groups_as_a_batch() -> None:
    rows = jaxdist.shard(jnp.arange(32.0).reshape(16, 2), within=2)
    with raises(ValueError, "x", "state"):
        jaxdist.data_parallel(lambda w, x: jnp.mean(w * x), batch_argnums=1)(jnp.ones(2), rows)


def test_one_step_has_one_way() -> None:
    txs = [jaxdist.zero(optax.sgd(0.1), 2, split=split) for split in ("owners", "slices")]

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: sum(jnp.mean((x @ w) ** 2) for w in p))(params)
        updates = [tx.update(g, tx.init(p), p)[0] for tx, g, p in zip(txs, grads, params, strict=True)]
        return optax.apply_updates(params, updates)

    with raises(ValueError, "split"):
        jaxdist.data_parallel(step, mesh=mesh(2))([jnp.ones((4, 4)), jnp.ones((4, 4))], np.ones((8, 4)))
