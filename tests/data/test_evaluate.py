"""`evaluate`: the sums of one device over the whole data set, whatever the tail; and what it refuses."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.step.tracing import say_once

X = np.random.default_rng(0).normal(size=(53, 4))
DATA = {"x": X, "y": np.arange(53) % 3}
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))


def each(w: Any, batch: Any) -> Any:
    logits = batch["x"] @ w
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
    return losses, jnp.argmax(logits, 1) == batch["y"]


def sums_of(w: Any, batch: Any) -> Any:
    losses, correct = each(w, batch)
    confusion = jnp.zeros((3, 3), jnp.int32).at[batch["y"], jnp.argmax(batch["x"] @ w, 1)].add(1)
    return {"loss": jnp.sum(losses), "correct": jnp.sum(correct), "confusion": confusion, "count": len(losses)}


def weighted(w: Any, batch: Any) -> Any:
    (batch, weight), correct = batch, None
    losses, correct = each(w, batch)
    return {"loss": jnp.sum(losses * weight), "correct": jnp.sum(correct * weight), "count": jnp.sum(weight)}


EXPECTED = jax.tree.map(np.asarray, sums_of(W, DATA))


def check(sums: Any) -> None:
    for name, x in sums.items():
        assert np.allclose(x, EXPECTED[name], rtol=1e-12), name


@pytest.mark.parametrize("on_devices", [False, True])
@pytest.mark.parametrize("tail", ["pad", "keep"])
def test_the_sums_of_all_examples(tail: Any, on_devices: bool) -> None:
    step = jaxdist.data_parallel(weighted if tail == "pad" else sums_of)
    batches = jaxdist.loader(DATA, 16, tail=tail, on_devices=on_devices)
    check(jaxdist.evaluate(step, W, batches))
    check(sums := jaxdist.evaluate(step, W, batches))
    assert type(sums["loss"]) is float
    if tail == "keep":
        assert type(sums["correct"]) is type(sums["count"]) is int
        assert (type(sums["confusion"]), sums["confusion"].dtype) == (np.ndarray, np.int64)


def test_any_iterable_and_a_jitted_step() -> None:
    parts = [{name: x[i : i + 10] for name, x in DATA.items()} for i in range(0, 53, 10)]
    check(jaxdist.evaluate(jax.jit(sums_of), W, iter(parts)))
    several = lambda w, scale, batch: jnp.sum(batch["x"] @ w) * scale
    assert jaxdist.evaluate(jaxdist.data_parallel(several), W, 2.0, parts[:2]) == pytest.approx(
        2 * float(np.sum(X[:20] @ W)), rel=1e-12
    )


def test_parameters_stay_and_shards_are_taken() -> None:
    """Only what a step returns is donated: nothing here."""
    w = jaxdist.shard(W)
    step = jaxdist.data_parallel(sums_of)
    for _ in range(2):
        check(jaxdist.evaluate(step, w, jaxdist.loader(DATA, 16, tail="keep")))
    assert np.allclose(jaxdist.unshard(w), W)


def test_counts_beyond_what_32_bits_hold() -> None:
    """2**24 + 1 is no float32, and three times 2**30 no int32."""
    step = jax.jit(lambda batch: {"ones": jnp.float32(1), "many": jnp.int32(2**30), "most": jnp.float32(2**24)})
    sums = jaxdist.evaluate(step, [0] * 3)
    assert sums == {"ones": 3.0, "many": 3 * 2**30, "most": 3.0 * 2**24}
    big = jaxdist.evaluate(jax.jit(lambda x: x), [jnp.float32(2**24), jnp.float32(1)])
    assert big == 2**24 + 1


def test_nothing_waits_until_the_host_is_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched while batches come is what a step returned 32 batches before."""
    fetched: list[int] = []
    from jaxdist.data import evaluate as module  # the module: jaxdist.data has no function of this name

    monkeypatch.setattr(module, "_fetch", lambda x: fetched.append(int(x)) or np.asarray(x))
    seen: list[int] = []

    def batches() -> Any:
        for i in range(40):
            seen.append(len(fetched))
            yield np.int32(i)

    assert jaxdist.evaluate(jax.jit(lambda x: x), batches()) == sum(range(40))
    assert seen == [max(0, i - 32) for i in range(40)]
    assert fetched == list(range(40))


def test_a_limit_takes_the_same_examples_each_time() -> None:
    step, batches = jaxdist.data_parallel(sums_of), jaxdist.loader(DATA, 16, tail="keep")
    first = jaxdist.evaluate(step, W, batches, limit=2)
    assert first["count"] == 32
    again = jaxdist.evaluate(step, W, batches, limit=2)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    check(jaxdist.evaluate(step, W, batches))


def test_a_restored_loader_is_gone_over_from_its_begin() -> None:
    batches = jaxdist.loader(DATA, 16, tail="keep")
    next(iter(batches))
    other = jaxdist.loader(DATA, 16, tail="keep")
    other.set_state(batches.get_state())
    check(jaxdist.evaluate(jaxdist.data_parallel(sums_of), W, other))


def test_dropped_examples_are_said(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    step = jaxdist.data_parallel(sums_of)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        assert jaxdist.evaluate(step, W, jaxdist.loader(DATA, 16))["count"] == 48
        assert jaxdist.evaluate(step, W, jaxdist.loader(DATA, 16))["count"] == 48
        (said,) = (text for text in caplog.messages if text.startswith("evaluate"))
        assert "leaves out 5 of 53 examples" in said
        assert "depends on the number of ranks" in said
        caplog.clear()
        jaxdist.evaluate(step, W, jaxdist.loader(DATA, 16), limit=1)  # more are left out on purpose
        jaxdist.evaluate(step, W, jaxdist.loader({name: x[:48] for name, x in DATA.items()}, 16))
    assert [text for text in caplog.messages if text.startswith("evaluate")] == []


class Stream:
    """An iterable without a length."""

    def __iter__(self) -> Any:
        for i in range(53):
            yield {name: x[i] for name, x in DATA.items()}


def test_streams(caplog: pytest.LogCaptureFixture) -> None:
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "jaxdist"):
        padded = jaxdist.loader(Stream(), 16, shuffle=False, tail="pad")
        for _ in range(2):
            check(jaxdist.evaluate(jaxdist.data_parallel(weighted), W, padded))
        stream = jaxdist.loader(Stream(), 16, shuffle=False, tail="keep")
        next(iter(stream))
        check(jaxdist.evaluate(jaxdist.data_parallel(sums_of), W, stream))
        assert [text for text in caplog.messages if text.startswith("evaluate")] == []
        dropping = jaxdist.loader(Stream(), 16, shuffle=False)
        assert jaxdist.evaluate(jaxdist.data_parallel(sums_of), W, dropping)["count"] == 48
    (said,) = (text for text in caplog.messages if text.startswith("evaluate"))
    assert "leaves out what fills no batch at the end of the stream" in said


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("a mean", lambda losses, weight: jnp.sum(losses * weight) / jnp.sum(weight)),
        ("a mean that is safe", lambda losses, weight: jnp.sum(losses * weight) / jnp.maximum(jnp.sum(weight), 1)),
        ("a sum without the weight", lambda losses, weight: jnp.sum(losses)),
        ("a maximum", lambda losses, weight: jnp.max(losses * weight)),
    ],
)
@pytest.mark.parametrize("on_devices", [False, True])
def test_what_is_no_sum_is_seen_where_there_are_weights(name: str, result: Any, on_devices: bool) -> None:
    def step(w: Any, batch: Any) -> Any:
        batch, weight = batch
        return {"x": result(each(w, batch)[0], weight)}

    with pytest.raises(ValueError, match=r"result\['x'\] of the step is no sum over the examples with a weight"):
        jaxdist.evaluate(jaxdist.data_parallel(step), W, jaxdist.loader(DATA, 16, tail="pad", on_devices=on_devices))


def test_sums_that_cancel_are_sums() -> None:
    """Signed residuals: the halves are large, and their sum is small. And those of which all are 0."""
    x = np.tile([1e3, -1e3], 8).astype(np.float32)

    def step(batch: Any) -> Any:
        batch, weight = batch
        return jnp.sum(batch * weight), jnp.sum(0 * weight), jnp.sum(weight > 0)

    sums = jaxdist.evaluate(jaxdist.data_parallel(step), jaxdist.loader(x, 16, shuffle=False, tail="pad"))
    assert sums == (0, 0, 16)


def test_what_is_refused() -> None:
    batches = jaxdist.loader(DATA, 16, tail="keep")
    with pytest.raises(ValueError, match=r"result\['l'\].*an entry an example.*gather_for_metrics"):
        jaxdist.evaluate(jaxdist.data_parallel(lambda w, b: {"l": each(w, b)[0]}), W, batches)
    with pytest.raises(ValueError, match=r"is bfloat16, which does not hold sums"):
        jaxdist.evaluate(jaxdist.data_parallel(lambda w, b: jnp.sum(each(w, b)[0]).astype(jnp.bfloat16)), W, batches)
    with pytest.raises(ValueError, match=r"is bool, which"):
        jaxdist.evaluate(jaxdist.data_parallel(lambda w, b: jnp.all(each(w, b)[1])), W, batches)
    with pytest.raises(ValueError, match="no batch, on any rank"):
        jaxdist.evaluate(jax.jit(sums_of), W, iter(()))
    with pytest.raises(ValueError, match="expected sums"):
        jaxdist.evaluate(jax.jit(lambda x: {}), [1])
    with pytest.raises(ValueError, match="positive number"):
        jaxdist.evaluate(jax.jit(lambda x: x), [1], limit=0)
    with pytest.raises(TypeError, match="there are no batches"):
        jaxdist.evaluate(jax.jit(lambda x: x))
