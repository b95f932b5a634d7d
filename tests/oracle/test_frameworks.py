"""Steps in the style of each library, only the decorator changed: they do what its own decorator makes of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from harness.errors import raises
from jax.sharding import Mesh

import jaxdist

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.random.default_rng(1).normal(size=12)
STEPS = 2
F64 = {"param_dtype": jnp.float64}

Program = Callable[[Any], Any]
PROGRAMS: list[Any] = []


def program(own: Any, tolerance: float = 1e-10) -> Callable[[Program], Program]:
    """A program that takes the decorator of its steps, and that of its library; where that has float32, how close."""

    def add(run: Any) -> Program:
        PROGRAMS.append(pytest.param(run, own, tolerance, id=run.__name__))
        return run

    return add


def squares(predicted: Any, y: Any) -> Any:
    return jnp.mean((predicted - y) ** 2)


# --- flax nnx


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.first = self.second = nnx.Linear(3, 3, rngs=nnx.Rngs(0), **F64)

    def __call__(self, x: Any) -> Any:
        return self.second(jnp.tanh(self.first(x))).sum(-1)


@program(nnx.jit)
def nnx_variables_as_arguments(decorate: Any) -> Any:
    weight, other = nnx.Param(jnp.arange(3.0)), nnx.Param(jnp.ones(3))

    @decorate
    def step(weight: Any, other: Any, x: Any) -> Any:
        weight[...] = weight[...] + x.sum(0) * other[...]
        return x @ weight[...]

    return [step(weight, other, X) for _ in range(STEPS)], weight[...], other[...]


def trained(decorate: Any, cached: bool) -> Any:
    model = Tied()
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    @decorate
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: squares(model(x), y))(model)
        optimizer.update(model, grads)
        return loss

    call = nnx.cached_partial(step, model, optimizer) if cached else lambda x, y: step(model, optimizer, x, y)
    return [call(X, Y) for _ in range(STEPS)], nnx.state(model)


@program(nnx.jit)
def shared_variables(decorate: Any) -> Any:
    return trained(decorate, cached=False)


@program(nnx.jit)
def nnx_cached_partial(decorate: Any) -> Any:
    return trained(decorate, cached=True)


@program(nnx.jit, 1e-5)
def modes_of_a_model(decorate: Any) -> Any:
    model = nnx.Sequential(
        nnx.BatchNorm(3, rngs=nnx.Rngs(1), **F64),
        nnx.Dropout(0.5, rngs=nnx.Rngs(2)),
        nnx.Linear(3, 1, rngs=nnx.Rngs(3), **F64),
    )
    step = decorate(lambda model, x, y: squares(model(x)[:, 0], y))
    losses = []
    for mode in (model.train, model.eval, model.train):
        mode()
        losses.append(step(model, X, Y))
    return losses, jax.tree.map(lambda x: x, nnx.state(model, nnx.BatchStat))


@program(nnx.jit, 1e-5)
def metrics_and_a_variable(decorate: Any) -> Any:
    models = {"a": nnx.Linear(3, 3, rngs=nnx.Rngs(0), **F64), "b": [nnx.Linear(3, 1, rngs=nnx.Rngs(1), **F64)]}
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    @decorate
    def step(models: Any, metrics: Any, batch: Any) -> None:
        def loss_of(a: Any) -> Any:
            return squares(models["b"][0](a(batch["x"]))[:, 0], batch["y"])

        loss, grads = nnx.value_and_grad(loss_of)(models["a"])
        models["a"].kernel[...] -= 0.1 * grads["kernel"][...]
        metrics.update(loss=loss)

    for _ in range(STEPS):
        step(models, metrics, {"x": X, "y": Y})
    return nnx.state(models["a"]), metrics.compute()


# --- equinox


class WithState(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(3, 4, key=key, dtype=jnp.float64)
        self.norm = eqx.nn.BatchNorm(4, "examples", mode="ema", dtype=jnp.float64)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        x, state = self.norm(self.linear(x), state)
        return self.dropout(x, key=key).sum(), state


@program(eqx.filter_jit, 1e-5)
def equinox_state(decorate: Any) -> Any:
    model, state = eqx.nn.make_with_state(WithState)(jax.random.key(0))
    tx = optax.adam(0.1)
    opt = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @decorate
    def step(model: Any, state: Any, opt: Any, x: Any, y: Any, key: Any) -> Any:
        def loss_of(model: Any, state: Any) -> Any:
            keys = jax.random.split(key, x.shape[0])
            each = jax.vmap(model, axis_name="examples", in_axes=(0, None, 0), out_axes=(0, None))
            predicted, state = each(x, state, keys)
            return squares(predicted, y), state

        (loss, state), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(model, state)
        updates, opt = tx.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt, loss

    loss = None
    for i in range(STEPS):
        model, state, opt, loss = step(model, state, opt, X, Y, jax.random.key(i))
    return eqx.filter(model, eqx.is_array), loss


class Scaled(eqx.Module):
    w: Any
    scale: Any


@program(eqx.filter_jit)
def a_number_then_an_array(decorate: Any) -> Any:
    step = decorate(lambda model, x: model.scale * (x @ model.w).mean())
    return [step(Scaled(jnp.ones(3), scale), X) for scale in (2, jnp.asarray(3.0), 4)]


def test_shards_that_are_padded_are_saved_as_the_docs_say(tmp_path: Path) -> None:
    @jaxdist.parallel(mesh=Mesh(np.array(jax.devices()[:3]), ("data",)))
    def step(model: Any, x: Any) -> Any:
        model = jax.tree.map(jaxdist.shard, model)
        return eqx.tree_at(lambda m: m.bias, model, model.bias + x.sum())

    model = step(eqx.nn.Linear(4, 7, key=jax.random.key(0)), X)
    is_saved = lambda x: hasattr(x, "dtype")
    arrays, static = eqx.partition(model, is_saved)
    assert len(jax.tree.leaves(arrays)) == 2
    jaxdist.save(tmp_path, arrays, step=1)
    found = eqx.combine(jaxdist.restore(tmp_path, arrays), static)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


# --- jax


@jax.tree_util.register_pytree_node_class
class Matrix:
    """A node that looks at what it is made of: of arrays, and in JAX's own code of ``object()``."""

    def __init__(self, w: Any, name: str = "a"):
        if type(w) is not object and not (isinstance(w, (jax.Array, np.ndarray)) and w.ndim == 2):
            raise TypeError(f"a matrix is needed, not a {type(w).__name__}")
        self.w, self.name = w, name

    def tree_flatten(self) -> tuple[tuple[Any], str]:
        return (self.w,), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: tuple[Any]) -> "Matrix":
        return cls(*children, name)


class WithActivation(eqx.Module):
    """A node of the user's beside a leaf that is no array, in one argument."""

    matrix: Matrix
    activation: Any


@program(jax.jit)
def nodes_that_look_at_their_children(decorate: Any) -> Any:
    tx = jaxdist.zero(optax.adam(0.1), level=3)

    @decorate
    def step(model: Any, opt: Any, x: Any, y: Any) -> Any:
        def loss_of(matrix: Matrix, x: Any, y: Any) -> Any:
            return squares(jnp.tanh(x.w @ matrix.w).sum(-1), y)

        both = jaxdist.value_and_grad(loss_of, microbatches=3, batch_argnums=(1, 2))
        loss, grads = both(model, x, y)
        updates, opt = tx.update(grads, opt, model)
        return optax.apply_updates(model, updates), opt, loss

    model: Any = Matrix(jnp.ones((3, 8)))
    opt, loss = tx.init(model), None
    for _ in range(STEPS):
        model, opt, loss = step(model, opt, Matrix(X), Y)
    return model, loss


def test_stages_of_a_step_that_changes_nnx_objects() -> None:
    compiled = jaxdist.data_parallel(lambda model, x: model(x).mean()).lower(Tied(), X).compile()
    assert (compiled.out_info.shape, compiled.out_tree) == ((), jax.tree.structure(0))
    assert compiled.output_shardings.is_fully_replicated
    np.testing.assert_allclose(compiled(Tied(), X), Tied()(X).mean())


def test_nodes_that_look_at_their_children_elsewhere(tmp_path: Path) -> None:
    matrix: Any = Matrix(jnp.ones((3, 8)))
    model = WithActivation(matrix, jnp.tanh)
    step: Any = jaxdist.data_parallel(lambda model, x: (model, model.activation(x @ model.matrix.w).mean()))
    same, mean = step(model, X)
    assert same.activation is jnp.tanh
    np.testing.assert_allclose(mean, jnp.tanh(X @ matrix.w).mean())
    staged: Any = lambda model, *, x: (model, x @ model.w)
    traced = jaxdist.data_parallel(staged).trace(matrix, x=X)
    assert traced.out_tree == jax.tree.structure((matrix, X))
    np.testing.assert_allclose(traced.lower().compile()(matrix, x=X)[1], X @ matrix.w)
    jaxdist.save(tmp_path, matrix, step=1)
    jaxdist.send(matrix, dst=0)
    found = [
        jaxdist.restore(tmp_path, matrix), jaxdist.recv(matrix, src=0), jaxdist.allreduce(matrix),
        jaxdist.unshard(jaxdist.shard(matrix)),
    ]  # fmt: skip
    for one in found:
        np.testing.assert_array_equal(one.w, matrix.w)
    with raises(TypeError, "x[<flat index 0>]", "traced"):
        jax.jit(jaxdist.allreduce)(matrix)


def replicas(step: Any) -> Any:
    """`jax.pmap` over as many devices as there are examples to each."""
    parallel = jax.pmap(step, axis_name="batch", in_axes=(None, 0, 0))
    return lambda w, x, y: parallel(w, x.reshape(3, 4, 3), y.reshape(3, 4))[0]


@program(replicas)
def pmap_code(decorate: Any) -> Any:
    def step(w: Any, x: Any, y: Any) -> Any:
        return w - 0.1 * jax.lax.pmean(jax.grad(lambda w: squares(x @ w, y))(w), axis_name="batch")

    return decorate(step)(jnp.ones(3), X, Y)


def grown(model: Any, x: Any) -> Any:
    model.more = nnx.Param(jnp.ones(3))
    return x.sum()


def swapped(model: Any, x: Any) -> Any:
    model.a, model.b = model.b, model.a
    return x.sum()


def replaced(model: Any, x: Any) -> Any:
    model.a = nnx.Param(model.a[...] + 1)
    return x.sum()


class TwoParams(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.ones(3))


@pytest.mark.parametrize(
    ("step", "model", "token"),
    [(lambda model, x: model, Tied, "returns"), (grown, Tied, "variable"), (swapped, TwoParams, "moved"),
     (replaced, TwoParams, "in place")],
)  # fmt: skip
def test_what_a_step_may_not_do_with_nnx_objects(step: Any, model: Any, token: str) -> None:
    with raises(jaxdist.StepError, "nnx", token):
        jaxdist.data_parallel(step)(model(), X)


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # flax, with x64
@pytest.mark.parametrize(("run", "own", "tolerance"), PROGRAMS)
def test_only_the_decorator_changes(run: Program, own: Any, tolerance: float) -> None:
    found, expected = run(jaxdist.data_parallel), run(own)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(jaxdist.unshard(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)
