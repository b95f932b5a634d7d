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


def losses_divided(w: Any, x: Any) -> Any:
    """A mean over a device's own examples, divided by the devices: the sum of its gradients is the mean under pmap."""
    grads = jax.grad(lambda w: loss_fn(w, x) / jax.local_device_count())(w)
    return w - 0.1 * lax.psum(grads, "batch")


def losses_over_all_examples(w: Any, x: Any) -> Any:
    total = x.shape[0] * len(jax.devices())
    grads = jax.grad(lambda w: jnp.sum((x @ w - x.sum(1)) ** 2) / total)(w)
    return w - 0.1 * lax.psum(grads, "batch")


def lower(step: Callable[..., Any]) -> None:
    jaxdist.data_parallel(step).lower(W, X)  # type: ignore[attr-defined]


def stepped(mean: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda w, x: w - 0.1 * mean(jax.grad(loss_fn)(w, x))


COUNT, LOCAL = r"asks for jax\.device_count\(\)", r"asks for jax\.local_device_count\(\)"
LENGTH = r"asks for the length of jax\.{}\(\)"
NUMBER = "divides a sum over the axis by 8"
WRONG = {
    "by device_count": (lambda g: lax.psum(g, "batch") / jax.device_count(), COUNT),
    "by local_device_count": (lambda g: lax.psum(g, "batch") / jax.local_device_count(), LOCAL),
    "by a number from outside": (lambda g: lax.psum(g, "batch") / DEVICES, NUMBER),
    "what was gathered, by a number": (lambda g: lax.all_gather(g, "batch").sum(0) / DEVICES, NUMBER),
    "a scattered sum, by a number": (lambda g: lax.psum_scatter(g, "batch", tiled=True) / DEVICES, NUMBER),
    "times its inverse": (lambda g: (1 / DEVICES) * lax.psum(g, "batch"), NUMBER),
    "in a function of jit": (jax.jit(lambda g: lax.psum(g, "batch") / DEVICES), NUMBER),
    "by the length of devices": (lambda g: lax.psum(g, "batch") / len(jax.devices()), LENGTH.format("devices")),
    "by the length of local_devices": (
        lambda g: lax.psum(g, "batch") / len(jax.local_devices()), LENGTH.format("local_devices"),
    ),
    "before the sum": (lambda g: lax.psum(g / jax.device_count(), "batch"), COUNT),
    "of what was gathered": (lambda g: lax.all_gather(g, "batch").sum(0) / jax.device_count(), COUNT),
    "of a scattered sum": (lambda g: lax.psum_scatter(g, "batch", tiled=True) / jax.local_device_count(), LOCAL),
    "by processes and devices of each": (
        lambda g: lax.psum(g, "batch") / (jax.process_count() * len(jax.local_devices())), "asks for",
    ),
    "by the examples": (lambda g: lax.psum(g * 16, "batch") / (16 * jax.device_count()), COUNT),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_sum_divided_by_the_devices(name: str, caplog: pytest.LogCaptureFixture) -> None:
    mean, said = WRONG[name]
    asked = jax.device_count, jax.local_device_count, jax.process_count, jax.devices, jax.local_devices
    for _ in range(2):
        lower(stepped(mean))
    (message,) = [r.getMessage() for r in caplog.records if "names the axis" in r.getMessage()]
    assert re.search(said, message), message
    assert "test_tracing.py:" in message
    assert "Write lax.pmean(x, 'batch'), or divide by lax.axis_size('batch')" in message
    now = jax.device_count, jax.local_device_count, jax.process_count, jax.devices, jax.local_devices
    assert now == asked, "as they were"


@pytest.mark.parametrize("step", [losses_divided, losses_over_all_examples])
def test_a_loss_divided_by_the_devices(step: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    lower(step)
    (message,) = [r.getMessage() for r in caplog.records if "names the axis" in r.getMessage()]
    assert re.search(r"asks for (the length of )?jax\.\w+\(\) at \S*test_tracing\.py:\d+", message), message


RIGHT = {
    "pmean": lambda g: lax.pmean(g, "batch"),
    "by axis_size": lambda g: lax.psum(g, "batch") / lax.axis_size("batch"),
    "by psum of one": lambda g: lax.psum(g, "batch") / lax.psum(1, "batch"),
    "a gathered value, by as much": lambda g: DEVICES * (lax.all_gather(g[:, None], "batch").sum(2)[0] / DEVICES),
    "by something else": lambda g: 2 * lax.psum(g, "batch") / 2.0,
    "the kind": lambda g: lax.pmean(g, "batch") * (jax.devices()[0].platform == jax.local_devices()[0].platform),
    "without the axis": lambda g: g * (jax.device_count() / DEVICES),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    lower(stepped(RIGHT[name]))
    assert "names the axis" not in caplog.text
