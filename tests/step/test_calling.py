"""How a decorated step is called: keywords, constants, methods, and what `jax.jit`'s result has besides."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray([1.0, -2.0, 0.5])


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def sgd(w: Any, x: Any, lr: Any = 0.1) -> Any:
    return w - lr * jax.grad(loss_of)(w, x), loss_of(w, x)


def same(mine: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), mine, expected)


def test_keywords_and_defaults() -> None:
    step = jaxdist.data_parallel(sgd, donate=False)
    same(step(W, x=X), sgd(W, X))
    same(step(x=X, w=W, lr=0.5), sgd(W, X, 0.5))
    only = jaxdist.data_parallel(lambda w, *, x, lr: sgd(w, x, lr), donate=False)
    same(only(W, x=X, lr=0.5), sgd(W, X, 0.5))
    same(only(W, lr=0.25, x=X), sgd(W, X, 0.25))
    several = jaxdist.data_parallel(lambda w, *xs, **more: sgd(w, sum(xs), more["lr"]), donate=False)
    same(several(W, X, X, lr=0.5), sgd(W, X + X, 0.5))
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'x'"):
        only(W, lr=0.5)  # type: ignore[call-arg]


@pytest.mark.optimised
def test_partial_and_methods() -> None:
    same(jaxdist.data_parallel(functools.partial(sgd, lr=0.5), donate=False)(W, X), sgd(W, X, 0.5))

    class Trainer:
        lr = 0.5

        def step(self, w: Any, x: Any) -> Any:
            return sgd(w, x, self.lr)

        @jaxdist.data_parallel
        def decorated(self, w: Any, x: Any) -> Any:
            return sgd(w, x, self.lr)

    trainer = Trainer()
    same(jaxdist.data_parallel(trainer.step, donate=False)(W, X), sgd(W, X, 0.5))
    same(trainer.decorated(W, x=X), sgd(W, X, 0.5))
    assert "all-reduce" in str(trainer.decorated.lower(W, X).compile().as_text())


def test_static_arguments() -> None:
    def power(w: Any, x: Any, n: int, kind: str = "mean") -> Any:
        return getattr(jnp, kind)((x @ w) ** (n if n > 1 else 1))

    by_name = jaxdist.data_parallel(power, static_argnames=("n", "kind"), donate=False)
    by_number = jaxdist.data_parallel(power, static_argnums=(2, -1), donate=False)
    for step in (by_name, by_number):
        for n in (2, 3, 2):
            same(step(W, X, n), power(W, X, n))
        same(step(W, X, 2, kind="sum"), power(W, X, 2, "sum"))
    with pytest.raises(ValueError, match="the static argument n is a list, which has no hash"):
        by_name(W, X, [2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"static_argnames=\['m'\]: the step's parameters are"):
        jaxdist.data_parallel(power, static_argnames="m")
    with pytest.raises(ValueError, match="static_argnums=4: the step has 4 parameters"):
        jaxdist.data_parallel(power, static_argnums=4)


def test_what_is_donated() -> None:
    def step(a: Any, b: Any, x: Any) -> Any:
        return a - 0.1 * jax.grad(loss_of)(a, x), b * 0.5

    once = jaxdist.data_parallel(step, donate=False)(W, W * 2, X)
    a, b = once
    jaxdist.data_parallel(step, donate_argnums=1)(a, b, X)
    assert b.is_deleted()
    assert not a.is_deleted()
    with pytest.raises(ValueError, match="donate_argnums=3: the step has 3 parameters"):
        jaxdist.data_parallel(step, donate_argnums=3)


def test_a_number_that_is_needed_as_one_is_a_constant() -> None:
    traced = []

    @jaxdist.data_parallel(donate=False)
    def step(config: Any, w: Any, x: Any) -> Any:
        traced.append(1)
        x = x if config["train"] else 2 * x
        for _ in range(config["layers"]):
            x = jnp.tanh(x)
        return w - config["lr"] * jax.grad(loss_of)(w, x)

    def expected(layers: int, train: bool, lr: float) -> Any:
        x = X if train else 2 * X
        for _ in range(layers):
            x = jnp.tanh(x)
        return W - lr * jax.grad(loss_of)(W, x)

    for config in ((1, True, 0.1), (2, True, 0.1), (2, False, 0.1)):
        same(step(dict(zip(("layers", "train", "lr"), config, strict=True)), W, X), expected(*config))
    count = len(traced)
    same(step({"layers": 2, "train": False, "lr": 0.5}, W, X), expected(2, False, 0.5))
    assert len(traced) == count  # what is only computed with is data


def test_equinox_modules() -> None:
    class Model(eqx.Module):
        layers: list[Any]
        repeat: int
        slope: float
        name: str

        def __init__(self) -> None:
            self.layers = [eqx.nn.Linear(3, 3, key=jax.random.key(0), dtype=jnp.float64), jax.nn.relu]
            self.repeat, self.slope, self.name = 2, 0.5, "model"

        def __call__(self, x: Any) -> Any:
            for _ in range(self.repeat):
                for layer in self.layers:
                    x = layer(x)
            return self.slope * x

    def step(model: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        updates = jax.tree.map(lambda g: -0.1 * g if eqx.is_inexact_array(g) else None, grads)
        return eqx.apply_updates(model, updates), loss

    mine = twin = Model()
    decorated = jaxdist.data_parallel(step)
    for _ in range(3):
        (mine, a), (twin, b) = decorated(mine, X), eqx.filter_jit(step)(twin, X)
        same(a, b)
    assert (mine.repeat, mine.name) == (2, "model")
    same(mine.layers[0].weight, twin.layers[0].weight)


@pytest.mark.filterwarnings("error")
def test_warnings_that_are_errors() -> None:
    """As under ``python -W error``: nothing that JAX deprecates is done with what it traced."""

    def loss(w: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.mean(jax.checkpoint(jnp.sin)(x) ** 2)

    def step(w: Any, x: Any) -> Any:
        value, gradient = jaxdist.value_and_grad(loss, microbatches=2)(w, x)
        return w - 0.1 * gradient, value

    w = jnp.ones((3, 4, 4)) / 4
    same(jaxdist.data_parallel(step, donate=False)(w, np.ones((16, 4))), jax.jit(step)(w, np.ones((16, 4))))


# --- what `jax.jit` has


@pytest.mark.optimised
def test_ahead_of_time() -> None:
    step = jaxdist.data_parallel(sgd, donate=False)
    assert "all-reduce" in str(step.lower(W, X, lr=0.5).compile().as_text())
    assert step.trace(W, X).jaxpr is not None
    shapes = step.eval_shape(W, jax.ShapeDtypeStruct((64, 3), X.dtype))
    assert [(x.shape, x.dtype) for x in shapes] == [((3,), W.dtype), ((), W.dtype)]
    assert jax.eval_shape(step, W, X)[0].shape == (3,)


@pytest.mark.optimised
@pytest.mark.parametrize("donate", [False, True])
def test_what_is_compiled_ahead_takes_the_steps_arguments(donate: bool) -> None:
    traced = []

    @jaxdist.data_parallel(donate=donate)
    def step(w: Any, x: Any, lr: float = 0.1) -> Any:
        traced.append(1)
        return sgd(w, x, lr)

    for lowered in (step.lower(W, X, lr=0.5), step.trace(W, X, lr=0.5).lower()):
        compiled = lowered.compile()
        assert compiled.cost_analysis()
        w, twin = W, W
        for _ in range(3):
            (w, loss), (twin, expected) = compiled(w, X, lr=0.5), jax.jit(sgd)(twin, X, lr=0.5)
            same((w, loss), (twin, expected))
    same(step(W, X, lr=0.5), sgd(W, X, lr=0.5))
    assert len(traced) == 1
    with pytest.raises(TypeError, match=r"compiled for arguments .*\(16, 3\).*called with .*\(8, 3\)"):
        compiled(W, X[:8], lr=0.5)
    same(step(W, X[:8], lr=0.5), sgd(W, X[:8], lr=0.5))
    same(compiled(jax.device_put(W, jax.devices()[3]), X, lr=0.5), sgd(W, X, lr=0.5))


def test_static_arguments_are_not_passed_to_what_is_compiled_ahead() -> None:
    def step(n: int, w: Any, x: Any, *, scale: float = 1.0, shift: int = 0) -> Any:
        return n * w * scale + x.mean(0) + shift

    options: Any = {"static_argnums": 0, "static_argnames": "shift"}
    for decorate in (jax.jit, jaxdist.data_parallel):
        compiled = decorate(step, **options).lower(3, W, X, scale=0.5, shift=2).compile()
        same(compiled(W, X, scale=0.5), step(3, W, X, scale=0.5, shift=2))
        with pytest.raises(TypeError):
            compiled(W, scale=0.5)


def test_of_an_object_of_nnx_ahead() -> None:
    models = [nnx.Linear(3, 1, rngs=nnx.Rngs(0)) for _ in range(2)]

    def step(model: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    decorated = jaxdist.data_parallel(step)
    compiled = decorated.lower(models[0], X).compile()
    for _ in range(3):
        same(compiled(models[0], X), nnx.jit(step)(models[1], X))
    same(nnx.state(models[0]), nnx.state(models[1]))


def test_clear_cache() -> None:
    traced = []

    @jaxdist.data_parallel(donate=False)
    def step(w: Any, x: Any) -> Any:
        traced.append(1)
        return sgd(w, x)

    first = step(W, X)
    step(W, X)
    assert len(traced) == 1
    step.clear_cache()
    same(step(W, X), first)
    assert len(traced) == 2


@pytest.mark.optimised
def test_disabled_it_is_the_plain_step() -> None:
    step = jaxdist.data_parallel(sgd, enabled=False)
    same(step(W, x=X), sgd(W, X))
    assert "all-reduce" not in str(step.lower(W, X).compile().as_text())


@pytest.mark.parametrize("decorate", [jax.jit, jaxdist.data_parallel])
def test_one_and_true_are_other_constants(decorate: Any) -> None:
    step = decorate(lambda x, k: x.sum() + (100 if isinstance(k, float) else k), static_argnums=1)
    assert [float(step(jnp.ones(8), k)) for k in (1, 1.0, True, 1)] == [9, 108, 9, 9]


def test_one_and_true_are_other_numbers_where_a_step_needs_them() -> None:
    step = jaxdist.data_parallel(lambda x, k: x.sum() + (100 if isinstance(k, float) and k > 0 else k if k > 0 else 0))
    assert [float(step(jnp.ones(8), k)) for k in (1, 1.0, True, 1)] == [9, 108, 9, 9]


@dataclasses.dataclass
class _Config:
    width: int = 3


@pytest.mark.parametrize("config", [_Config(), {"a": [1, _Config()]}])
def test_an_argument_that_can_be_neither_data_nor_constant_is_named(config: Any) -> None:
    with pytest.raises(TypeError, match=r"argument config.* is of type _Config, neither an array nor hashable"):
        jaxdist.data_parallel(lambda w, config, x: w + x.mean(0))(W, config, X)


def test_pmap_under_the_decorator_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'sgd' is jax\.pmap's: decorate with jaxdist\.data_parallel in place"):
        jaxdist.data_parallel(jax.pmap(sgd, axis_name="batch"))


def test_no_tracer_outlives_its_trace() -> None:
    with jax.checking_leaks():
        same(jaxdist.data_parallel(sgd)(W, X), sgd(W, X))


def test_gradients_of_integers() -> None:
    def step(w: Any, x: Any) -> Any:
        of = lambda n, w: (n * (x @ w) ** 2).mean()
        return jax.grad(of, argnums=(0, 1), allow_int=True)(jnp.arange(len(x)), w)

    (got, w), (expected, twin) = jaxdist.data_parallel(step)(W, X), jax.jit(step)(W, X)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    same(w, twin)


def test_nan_that_an_argument_has_already() -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        jaxdist.data_parallel(sgd)(W, np.full_like(X, np.nan))
    assert "NaN or infinity is in the argument x already" in caught.value.__notes__
    assert "stage" not in str(caught.value)
