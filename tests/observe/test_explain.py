"""What `explain` and the warning say of a step: the user's lines, in few words, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdist

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.relu(self.norm(self.first(x))))


def step(model: Model, optimizer: nnx.Optimizer, x: Any) -> Any:
    def loss(model: Model) -> Any:
        h = model(x)
        return jnp.mean((h @ h.T) ** 2)  # couples examples

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def state() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)


def test_lines_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = jaxdist.explain(jaxdist.data_parallel(step), *state(), X)
    assert explained.rows
    for row in explained.rows:
        assert row.line.startswith(f"{__file__}:"), row
        assert row.bytes or row.what == "repeated"
    monkeypatch.chdir(Path(__file__).parent.parent)
    text = str(explained)
    assert " observe/test_explain.py:" in text
    assert str(Path(__file__).parent) not in text


def test_columns_without_entries_are_left_out() -> None:
    text = str(jaxdist.explain(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), np.ones(4), X))
    assert text.splitlines()[0].split() == ["what", "operation", "of", "where", "bytes"]
    text = str(jaxdist.explain(lambda w, x: jnp.mean((x @ w) ** 2), np.ones(4), X))
    assert text.splitlines()[0].split() == ["what", "operation", "where", "bytes"]


def test_parameters_are_named() -> None:
    """Those of which a gradient is summed, also where the norm of all gradients mixes them; and what is gathered."""
    rows = jaxdist.explain(jaxdist.data_parallel(step), *state(), X).rows
    found = {name for row in rows if row.what == "all-reduce" for name in row.leaves}
    parameters = [("first", "bias"), ("first", "kernel"), ("norm", "bias"), ("norm", "scale"), ("last", "kernel")]
    assert found.issuperset(f"model['{layer}']['{name}']" for layer, name in parameters), rows
    assert all(name.startswith("model[") for row in rows for name in row.leaves), rows

    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), level=3)
    params, x = {"a": jnp.ones((256, 512)), "b": jnp.ones((512, 128))}, np.ones((1024, 256), np.float32)

    def train(p: Any, opt: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))(p)
        updates, opt = tx.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt, loss

    named = {row.what: row.leaves for row in jaxdist.explain(train, params, tx.init(params), x).rows if row.leaves}
    assert {what: sorted(names) for what, names in named.items()} == {
        "all-gather of shards": ["p['a']", "p['b']"],
        "reduce-scatter": ["p['a']", "p['b']"],
    }


def test_values_without_entries_do_not_move() -> None:
    def step(w: Any, none: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), none + x[:, :0].mean(0)

    assert " 0 B" not in str(jaxdist.explain(step, np.ones(4), np.ones(0), X))


def test_the_warning_comes_once_for_a_step_that_is_decorated_again(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        jaxdist.data_parallel(step)(*state(), X)
    found = [r.getMessage() for r in caplog.records if "couples examples" in r.getMessage()]
    assert len(found) == 1, found
    assert "an unknown line" not in found[0]
    assert "test_explain.py:" in found[0]
