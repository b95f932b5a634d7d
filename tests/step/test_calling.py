"""How a decorated step is called: keywords, constants, methods, and what `jax.jit`'s result has besides."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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


def counted(f: Any) -> tuple[Any, list[int]]:
    """A function, and a list that has an entry for each time that it was traced."""
    traced: list[int] = []

    @functools.wraps(f)
    def count(*args: Any, **kwargs: Any) -> Any:
        traced.append(1)
        return f(*args, **kwargs)

    return count, traced


def test_keywords_and_defaults() -> None:
    step = jaxdist.data_parallel(sgd, donate=False)
    same(step(W, x=X), sgd(W, X))
    same(step(x=X, w=W, lr=0.5), sgd(W, X, 0.5))
    only = jaxdist.data_parallel(lambda w, *, x, lr: sgd(w, x, lr), donate=False)
    same(only(W, x=X, lr=0.5), sgd(W, X, 0.5))
    same(only(W, lr=0.25, x=X), sgd(W, X, 0.25))
    several = jaxdist.data_parallel(lambda w, *xs, **more: sgd(w, sum(xs), more["lr"]), donate=False)
    same(several(W, X, X, lr=0.5), sgd(W, X + X, 0.5))
    named = jaxdist.data_parallel(lambda w, a, b, lr=0.1: sgd(w, a - b, lr), batch_argnums=(1, 2), donate=False)
    same(named(W, b=X[::-1], a=X, lr=0.5), sgd(W, X - X[::-1], 0.5))
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'x'"):
        only(W, lr=0.5)  # type: ignore[call-arg]


def test_partial_methods_and_no_decoration() -> None:
    same(jaxdist.data_parallel(functools.partial(sgd, lr=0.5), donate=False)(W, X), sgd(W, X, 0.5))

    class Trainer:
        lr = 0.5

        def step(self, w: Any, x: Any) -> Any:
            return sgd(w, x, self.lr)

        @jaxdist.data_parallel
        def decorated(self, w: Any, x: Any) -> Any:  # the instance is no array: a constant
            """Doc."""
            return sgd(w, x, self.lr)

    trainer = Trainer()
    same(jaxdist.data_parallel(trainer.step, donate=False)(W, X), sgd(W, X, 0.5))
    same(trainer.decorated(W, x=X), sgd(W, X, 0.5))
    assert "all_reduce" in trainer.decorated.lower(W, X).as_text()
    assert Trainer.decorated.__doc__ == "Doc."
    plain = jaxdist.data_parallel(sgd, enabled=False)
    assert plain.__wrapped__ is sgd  # type: ignore[attr-defined]
    got = plain(W, x=X)
    same(got, sgd(W, X))
    assert len(got[0].devices()) == 1


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

    a, b = jaxdist.data_parallel(step, donate=False)(W, W * 2, X)
    jaxdist.data_parallel(step, donate_argnums=1)(a, b, X)
    assert b.is_deleted()
    assert not a.is_deleted()
    with pytest.raises(ValueError, match="donate_argnums=3: the step has 3 parameters"):
        jaxdist.data_parallel(step, donate_argnums=3)


def test_a_number_that_is_needed_as_one_is_a_constant() -> None:
    def expected(config: Any, w: Any, x: Any) -> Any:
        x = x if config["train"] else 2 * x
        for _ in range(config["layers"]):
            x = jnp.tanh(x)
        return w - config["lr"] * jax.grad(loss_of)(w, x)

    count, traced = counted(expected)
    step = jaxdist.data_parallel(count, donate=False)
    for layers, train in ((1, True), (2, True), (2, False)):
        config = {"layers": layers, "train": train, "lr": 0.1}
        same(step(config, W, X), expected(config, W, X))
    before, config = len(traced), {"layers": 2, "train": False, "lr": 0.5}
    same(step(config, W, X), expected(config, W, X))
    assert len(traced) == before  # what is only computed with is data


@pytest.mark.filterwarnings("error")
def test_warnings_that_are_errors() -> None:
    """As under ``python -W error``: nothing that JAX deprecates is done with what it traced."""

    def loss(w: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return jnp.mean(jax.checkpoint(jnp.sin)(x) ** 2)

    step = lambda w, x: jaxdist.value_and_grad(loss, microbatches=2)(w, x)
    args = jnp.ones((3, 4, 4)) / 4, np.ones((16, 4))
    same(jaxdist.data_parallel(step, donate=False)(*args), jax.jit(step)(*args))


# --- what `jax.jit` has


@pytest.mark.parametrize("donate", [False, True])
def test_ahead_of_time(donate: bool) -> None:
    count, traced = counted(sgd)
    step = jaxdist.data_parallel(count, donate=donate)
    for lowered in (step.lower(W, X, lr=0.5), step.trace(W, X, lr=0.5).lower()):
        assert "all_reduce" in lowered.as_text()
        compiled = lowered.compile()
        assert compiled.cost_analysis()
        w, twin = W, W
        for _ in range(3):
            (w, loss), (twin, expected) = compiled(w, X, lr=0.5), jax.jit(sgd)(twin, X, lr=0.5)
            same((w, loss), (twin, expected))
    same(step(W, X, lr=0.5), sgd(W, X, lr=0.5))
    assert len(traced) == 1
    assert step.trace(W, X, lr=0.5).jaxpr is not None
    with pytest.raises(TypeError, match=r"compiled for arguments .*\(16, 3\).*called with .*\(8, 3\)"):
        compiled(W, X[:8], lr=0.5)
    same(step(W, X[:8], lr=0.5), sgd(W, X[:8], lr=0.5))
    same(compiled(jax.device_put(W, jax.devices()[3]), X, lr=0.5), sgd(W, X, lr=0.5))
    for shapes in (step.eval_shape, functools.partial(jax.eval_shape, step)):
        assert [(x.shape, x.dtype) for x in shapes(W, jax.ShapeDtypeStruct((64, 3), X.dtype))] == [
            ((3,), W.dtype), ((), W.dtype),
        ]  # fmt: skip


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

    compiled = jaxdist.data_parallel(step).lower(models[0], X).compile()
    plain = nnx.jit(step)
    for _ in range(3):
        same(compiled(models[0], X), plain(models[1], X))
    same(nnx.state(models[0]), nnx.state(models[1]))


def test_clear_cache() -> None:
    count, traced = counted(sgd)
    step = jaxdist.data_parallel(count, donate=False)
    first = step(W, X)
    step(W, X)
    assert len(traced) == 1
    step.clear_cache()
    same(step(W, X), first)
    assert len(traced) == 2


def test_one_and_true_are_other_constants() -> None:
    static = lambda x, k: x.sum() + (100 if isinstance(k, float) else k)
    needed = lambda x, k: x.sum() + (100 if isinstance(k, float) and k > 0 else k if k > 0 else 0)
    steps = [decorate(static, static_argnums=1) for decorate in (jax.jit, jaxdist.data_parallel)]
    for step in (*steps, jaxdist.data_parallel(needed)):
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


def test_a_number_beside_arrays_of_several_types() -> None:
    """What a state is in one call after another is told apart by the types of all its leaves."""
    step = jaxdist.data_parallel(lambda s, x: {"w": s["w"] - x.mean() * s["w"], "n": s["n"] + 1})
    for w in (jnp.ones((3, 2)), jnp.asarray(2.0), jnp.asarray(2.0, float), jnp.ones((3, 2))):
        for _ in range(2):
            got = step({"w": w, "n": 0}, X)
            same(got["w"], w - X.mean() * w)
            assert got["n"] == 1
