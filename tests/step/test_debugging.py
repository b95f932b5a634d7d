"""JAX's settings for debugging, and what an error of the user's step shows."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer

import jaxdist
from jaxdist.tracebacks import of_a_step

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray([1.0, -2.0, 0.5])


def test_disable_jit_runs_the_step_as_it_is() -> None:
    seen = []

    @jaxdist.data_parallel
    def step(w: Any, x: Any) -> Any:
        seen.append(type(w))
        return w - 0.1 * jnp.mean(x, 0)

    w = step(W, X)
    named = jaxdist.data_parallel(lambda w, x: w - jax.lax.pmean(x.mean(0), "batch"))
    with jax.disable_jit():
        again = step(w, X)
        np.testing.assert_allclose(named(W, X), W - X.mean(0), rtol=1e-12)
    assert not issubclass(seen[-1], Tracer)
    np.testing.assert_allclose(again, W - 0.2 * X.mean(0), rtol=1e-12)
    np.testing.assert_allclose(step(again, X), W - 0.3 * X.mean(0), rtol=1e-12)


def test_debug_nans_names_the_operation_and_keeps_the_state() -> None:
    def body(w: Any, x: Any) -> Any:
        return w - 0.1 * jnp.mean(jnp.log(x), 0), jnp.exp(1e4 * abs(x).max())

    step = jaxdist.data_parallel(body)
    w, _ = step(W, abs(X))
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="log") as error:
            step(w, X)
        assert "jnp.log(x)" in "".join(traceback.format_tb(error.value.__traceback__))
        found, infinite = step(w, abs(X))  # the state is still there, and infinity is not NaN
    assert np.isinf(infinite)
    np.testing.assert_allclose(found, w - 0.1 * np.log(abs(X)).mean(0), rtol=1e-12)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        step(found, abs(X))


def frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_an_error_of_the_step_shows_the_users_lines_alone() -> None:
    def model(w: Any, x: Any) -> Any:
        return x @ w["b"]

    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p: p - jnp.mean(model(w, batch["x"])), w)

    with pytest.raises(TypeError) as error:
        step({"b": jnp.ones(7)}, {"x": X})
    assert set(frames(error.value)) == {__file__}
    last = traceback.extract_tb(error.value.__traceback__)[-1]
    assert last.line == 'return x @ w["b"]'
    assert any("jaxdist.data_parallel" in note for note in error.value.__notes__)
    assert of_a_step(error.value), "what runs at exit tells errors of steps from others, without our frames"


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: jaxdist.save(folder, {"w": object()}, 1),
        lambda folder: jaxdist.restore(folder / "none", W),
        lambda folder: jax.jit(jaxdist.check_sync)(W),
    ],
)
def test_an_error_of_what_a_script_calls_between_steps_shows_no_frames_of_ours(call: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, FileNotFoundError)) as error:
        call(tmp_path)
    assert set(frames(error.value)) == {__file__}


def test_an_error_of_jax_names_the_argument_and_the_step() -> None:
    @jaxdist.data_parallel
    def train_step(w: Any, batch: Any) -> Any:
        return w if batch["x"].sum() > 0 else 2 * w

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        train_step(W, {"x": X})
    assert "batch['x']" in str(error.value)
    assert "train_step" in str(error.value)


def test_log_compiles_names_the_step_once(caplog: pytest.LogCaptureFixture) -> None:
    @jaxdist.data_parallel
    def train_step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    with jax.log_compiles():
        w = train_step(jnp.ones(3), X)
        compiled = [text for record in caplog.records if (text := record.getMessage()).startswith("Compiling")]
        caplog.clear()
        train_step(w, X)
    assert sum("train_step" in text for text in compiled) == 1
    assert len(compiled) <= 6  # what brings the arguments to their devices
    assert not caplog.records
