"""What is said of a step while it is traced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 4))
W = np.zeros(4)
DEVICES = jax.device_count()


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w - x.sum(1)) ** 2)


def stepped(mean: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda w, x: w - 0.1 * mean(jax.grad(loss_fn)(w, x))


WRONG = {
    "by device_count": (lambda g: lax.psum(g, "batch") / jax.device_count(), r"asks for jax\.device_count\(\)"),
    "by local_device_count": (
        lambda g: lax.psum(g, "batch") / jax.local_device_count(),
        r"jax\.local_device_count\(\)",
    ),
    "by a number from outside": (lambda g: lax.psum(g, "batch") / DEVICES, "divides a sum over the axis by 8"),
    "times its inverse": (lambda g: (1 / DEVICES) * lax.psum(g, "batch"), "divides a sum over the axis by 8"),
    "in a function of jit": (jax.jit(lambda g: lax.psum(g, "batch") / DEVICES), "divides a sum over the axis by 8"),
    "by the examples": (lambda g: lax.psum(g * 16, "batch") / (16 * jax.device_count()), r"jax\.device_count\(\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_sum_divided_by_the_devices(name: str, caplog: pytest.LogCaptureFixture) -> None:
    mean, said = WRONG[name]
    asked = jax.device_count, jax.local_device_count, jax.process_count
    for _ in range(2):
        jaxdist.data_parallel(stepped(mean))(W, X)
    (message,) = [r.getMessage() for r in caplog.records if "names the axis" in r.getMessage()]
    assert re.search(said, message), message
    assert "test_tracing.py:" in message
    assert "Write lax.pmean(x, 'batch'), or divide by lax.axis_size('batch')" in message
    assert (jax.device_count, jax.local_device_count, jax.process_count) == asked, "as they were"


RIGHT = {
    "pmean": lambda g: lax.pmean(g, "batch"),
    "by axis_size": lambda g: lax.psum(g, "batch") / lax.axis_size("batch"),
    "by psum of one": lambda g: lax.psum(g, "batch") / lax.psum(1, "batch"),
    "by something else": lambda g: 2 * lax.psum(g, "batch") / 2.0,
    "without the axis": lambda g: g * (jax.device_count() / DEVICES),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    got = jaxdist.data_parallel(stepped(RIGHT[name]))(W, X)
    np.testing.assert_allclose(got, stepped(lambda g: g)(W, X), rtol=1e-12)
    assert "names the axis" not in caplog.text
