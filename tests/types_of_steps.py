"""A decorated step keeps its parameters and its result; `pyright` checks this file, and nothing runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist

Params = dict[str, jax.Array]


class State(NamedTuple):
    params: Params
    steps: int


def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def with_aux(params: Params, batch: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, batch), len(batch)


@jaxdist.data_parallel
def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    loss, grads = jaxdist.value_and_grad(loss_fn)(state.params, batch)
    return State(jax.tree.map(lambda w, g: w - 0.1 * g, state.params, grads), state.steps + 1), loss


@jaxdist.data_parallel(batch_argnums="batch")
def evaluate(state: State, batch: np.ndarray, scale: float = 1.0) -> float:
    return scale * float(batch.sum())


@jaxdist.parallel(mesh={"data": -1, "model": 1})
def on_a_mesh(state: State, batch: jax.Array) -> State:
    return state


class Model:
    @jaxdist.data_parallel
    def step(self, params: Params, batch: jax.Array) -> jax.Array:
        return loss_fn(params, batch)


state, x, host = State({"w": jnp.ones(3)}, 0), jnp.ones((8, 3)), np.ones((8, 3))

# What is right, and what comes back.
assert_type(step(state, x), tuple[State, jax.Array])
assert_type(step(state, batch=x), tuple[State, jax.Array])
assert_type(evaluate(state, host), float)
assert_type(evaluate(state, host, scale=2.0), float)
assert_type(on_a_mesh(state, x), State)
assert_type(jaxdist.parallel(loss_fn, mesh={"data": -1})(state.params, x), jax.Array)
assert_type(jaxdist.data_parallel(loss_fn, check_every=10)(state.params, x), jax.Array)
assert_type(Model().step(state.params, x), jax.Array)
assert_type(jaxdist.value_and_grad(loss_fn, microbatches=2)(state.params, x)[0], jax.Array)
assert_type(jaxdist.value_and_grad(with_aux, has_aux=True)(state.params, x)[0], tuple[jax.Array, int])
assert_type(jaxdist.per_device(loss_fn, (jax.P(), jax.P("data")), jax.P())(state.params, x), jax.Array)
step.lower(state, x).compile()
step.clear_cache()

# What is wrong: each line is an error, or its comment is one.
step(state, x, 3)  # pyright: ignore[reportCallIssue]
step(state)  # pyright: ignore[reportCallIssue]
step(state, "x")  # pyright: ignore[reportArgumentType]
step(state, batches=x)  # pyright: ignore[reportCallIssue]
step(state, host)  # pyright: ignore[reportArgumentType]
step.lower(state)  # pyright: ignore[reportCallIssue]
evaluate(state, host, scale="2")  # pyright: ignore[reportArgumentType]
on_a_mesh(state.params, x)  # pyright: ignore[reportArgumentType]
Model().step(x, state.params)  # pyright: ignore[reportArgumentType]
jaxdist.value_and_grad(loss_fn)(x, state.params)  # pyright: ignore[reportArgumentType]
jaxdist.grad(loss_fn)(state.params)  # pyright: ignore[reportCallIssue]
jaxdist.per_device(loss_fn, jax.P(), jax.P())(state.params)  # pyright: ignore[reportCallIssue]
jaxdist.data_parallel(loss_fn, donated=False)  # pyright: ignore[reportCallIssue]
jaxdist.parallel(loss_fn)  # pyright: ignore[reportCallIssue]
