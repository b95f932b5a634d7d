"""A decorated step keeps its parameters and its result: pyright finds a call that does not fit."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from harness import jobs

# A comment says what pyright has to tell of its line: the type that it knows, or the rule that is broken.
CODE = """
from typing import NamedTuple

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
reveal_type(step(state, x))  # tuple[State, Array]
reveal_type(step(state, batch=x))  # tuple[State, Array]
reveal_type(evaluate(state, host))  # float
reveal_type(evaluate(state, host, scale=2.0))  # float
reveal_type(on_a_mesh(state, x))  # State
reveal_type(jaxdist.parallel(loss_fn, mesh={"data": -1})(state.params, x))  # Array
reveal_type(jaxdist.data_parallel(loss_fn, check_every=10)(state.params, x))  # Array
reveal_type(Model().step(state.params, x))  # Array
reveal_type(jaxdist.value_and_grad(loss_fn, microbatches=2)(state.params, x)[0])  # Array
reveal_type(jaxdist.value_and_grad(with_aux, has_aux=True)(state.params, x)[0])  # tuple[Array, int]
reveal_type(jaxdist.per_device(loss_fn, (jax.P(), jax.P("data")), jax.P())(state.params, x))  # Array
step.lower(state, x).compile()
step.clear_cache()

# What is wrong: each line is an error.
step(state, x, 3)  # reportCallIssue
step(state)  # reportCallIssue
step(state, "x")  # reportArgumentType
step(state, batches=x)  # reportCallIssue
step(state, host)  # reportArgumentType
step.lower(state)  # reportCallIssue
evaluate(state, host, scale="2")  # reportArgumentType
on_a_mesh(state.params, x)  # reportArgumentType
Model().step(x, state.params)  # reportArgumentType
jaxdist.value_and_grad(loss_fn)(x, state.params)  # reportArgumentType
jaxdist.grad(loss_fn)(state.params)  # reportCallIssue
jaxdist.per_device(loss_fn, jax.P(), jax.P())(state.params)  # reportCallIssue
jaxdist.data_parallel(loss_fn, donated=False)  # reportCallIssue
jaxdist.parallel(loss_fn)  # reportCallIssue
"""


@pytest.mark.slow
def test_pyright_knows_the_types_and_finds_wrong_calls(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CODE)
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "train.py"],
        env=jobs.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    said: dict[int, set[str]] = defaultdict(set)
    for found in json.loads(done.stdout)["generalDiagnostics"]:
        revealed = re.search(r'is "(.*)"$', found["message"]) if found["severity"] == "information" else None
        said[found["range"]["start"]["line"]].add(revealed[1] if revealed else found["rule"])
    wanted = {n: {line.partition("  # ")[2]} for n, line in enumerate(CODE.splitlines()) if "  # " in line}
    assert said == wanted
    assert len(wanted) == 25
