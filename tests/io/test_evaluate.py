"""`evaluate` and `gather_for_metrics`: each example counts once, whatever the tail."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.sources import Again
from harness.errors import raises

import jaxdist

X = np.random.default_rng(0).normal(size=(53, 4))
DATA = {"x": X, "y": np.arange(53) % 3}
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)))


def each(w: Any, batch: Any) -> Any:
    """The losses, and whether an example is right."""
    logits = batch["x"] @ w
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1)[:, 0]
    return losses, jnp.argmax(logits, 1) == batch["y"]


def sums_of(w: Any, batch: Any) -> Any:
    """Of all examples of a batch."""
    losses, correct = each(w, batch)
    confusion = jnp.zeros((3, 3), jnp.int32).at[batch["y"], jnp.argmax(batch["x"] @ w, 1)].add(1)
    return {"loss": jnp.sum(losses), "correct": jnp.sum(correct), "confusion": confusion, "count": len(losses)}


def weighted(w: Any, batch: Any) -> Any:
    """Of those with a weight."""
    batch, weight = batch
    losses, correct = each(w, batch)
    return {"loss": jnp.sum(losses * weight), "correct": jnp.sum(correct * weight), "count": jnp.sum(weight)}


EXPECTED = jax.tree.map(np.asarray, sums_of(W, DATA))
STEPS = {"pad": weighted, "keep": sums_of}


def check(sums: Any) -> None:
    """They are those of one device over the whole data set."""
    for name, x in sums.items():
        np.testing.assert_allclose(x, EXPECTED[name], rtol=1e-12, err_msg=name)


class Stream:
    """The examples, one after the other."""

    def __iter__(self) -> Any:
        return (jax.tree.map(lambda x, i=i: x[i], DATA) for i in range(53))


@pytest.mark.parametrize("tail", ["pad", "keep"])
def test_the_sums_of_all_examples(tail: Any) -> None:
    """Over an epoch, over another one, and over a whole one where one was begun; of a stream too."""
    step = jaxdist.data_parallel(STEPS[tail])
    batches = jaxdist.loader(DATA, 16, tail=tail)
    stream = jaxdist.loader(Stream(), 16, tail=tail, shuffle=False)
    for loader in (batches, batches, stream):
        next(iter(loader))
        loader.set_state(loader.get_state())
        sums = jaxdist.evaluate(step, jaxdist.shard(W), loader)
        check(sums)
        assert type(sums["loss"]) is float
    if tail == "keep":
        assert type(sums["correct"]) is type(sums["count"]) is int
        assert (type(sums["confusion"]), sums["confusion"].dtype) == (np.ndarray, np.int64)


def test_any_iterable_and_a_jitted_step() -> None:
    parts = [{name: x[i : i + 10] for name, x in DATA.items()} for i in range(0, 53, 10)]
    check(jaxdist.evaluate(jax.jit(sums_of), W, iter(parts)))
    several = lambda w, scale, batch: jnp.sum(batch["x"] @ w) * scale
    got = jaxdist.evaluate(jaxdist.data_parallel(several), W, 2.0, parts[:2])
    np.testing.assert_allclose(got, 2 * np.sum(X[:20] @ np.asarray(W)), rtol=1e-12)


def test_counts_beyond_what_32_bits_hold() -> None:
    step = jax.jit(lambda batch: {"many": jnp.int32(2**30), "most": jnp.float32(2**24)})
    assert jaxdist.evaluate(step, [0] * 3) == {"many": 3 * 2**30, "most": 3.0 * 2**24}
    assert jaxdist.evaluate(jax.jit(lambda x: x), [jnp.float32(2**24), jnp.float32(1)]) == 2**24 + 1


def test_many_batches() -> None:
    """More than the host may be ahead of the device."""
    assert jaxdist.evaluate(jax.jit(lambda x: x), (np.int32(i) for i in range(100))) == sum(range(100))


def test_a_dropped_tail_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    step = jaxdist.data_parallel(sums_of)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        for loader in (jaxdist.loader(DATA, 16), jaxdist.loader(DATA, 16), jaxdist.loader(Stream(), 16, shuffle=False)):
            assert jaxdist.evaluate(step, W, loader)["count"] == 48
    by_index, stream = (text for text in caplog.messages if text.startswith("evaluate"))
    assert [token for token in ("5 of 53", "tail='keep'") if token not in by_index] == []
    assert [token for token in ("stream", "tail='keep'") if token not in stream] == []


@pytest.mark.parametrize(
    "result",
    [
        lambda losses, weight: jnp.sum(losses * weight) / jnp.sum(weight),
        lambda losses, weight: jnp.sum(losses * weight) / jnp.maximum(jnp.sum(weight), 1),
        lambda losses, weight: jnp.sum(losses),
        lambda losses, weight: jnp.max(losses * weight),
    ],
    ids=["a mean", "a mean that is safe", "a sum without the weight", "a maximum"],
)
def test_what_is_no_sum_is_seen_where_there_are_weights(result: Any) -> None:
    step = jaxdist.data_parallel(lambda w, batch: {"x": result(each(w, batch[0])[0], batch[1])})
    with raises(ValueError, "result['x']", "weight"):
        jaxdist.evaluate(step, W, jaxdist.loader(DATA, 16, tail="pad"))


def test_sums_that_cancel_are_sums() -> None:
    """Signed residuals: the halves are large, and their sum is small. And those of which all are 0."""
    x = np.tile([1e3, -1e3], 8).astype(np.float32)
    step = lambda batch: (jnp.sum(batch[0] * batch[1]), jnp.sum(0 * batch[1]), jnp.sum(batch[1] > 0))
    batches = jaxdist.loader(x, 16, shuffle=False, tail="pad")
    assert jaxdist.evaluate(jaxdist.data_parallel(step), batches) == (0, 0, 16)


def test_what_is_refused() -> None:
    batches, step = jaxdist.loader(DATA, 16, tail="keep"), jaxdist.data_parallel
    for wrong, arguments, how, tokens in [
        (step(lambda w, b: {"l": each(w, b)[0]}), (W, batches), {}, ("result['l']", "gather_for_metrics")),
        (step(lambda w, b: jnp.sum(each(w, b)[0]).astype(jnp.bfloat16)), (W, batches), {}, ("bfloat16",)),
        (step(lambda w, b: jnp.all(each(w, b)[1])), (W, batches), {}, ("bool",)),
        (jax.jit(sums_of), (W, iter(())), {}, ("no batch",)),
        (jax.jit(lambda x: {}), ([1],), {}, ("sums",)),
        (jax.jit(lambda x: x), (), {}, ("batches",)),
    ]:
        with raises((ValueError, TypeError), *tokens):
            jaxdist.evaluate(wrong, *arguments, **how)


def test_what_each_example_gives() -> None:
    """Without those that fill up the last batch; of what a step returned, and of a rank's own."""
    step = jaxdist.data_parallel(lambda w, batch: (batch[0]["id"] * w, batch[1]))
    ids = list[int]()
    for batch in jaxdist.loader({"id": np.arange(43)}, 16, shuffle=False, tail="pad"):
        got, weight = step(jnp.ones((), int), batch)
        ids += jaxdist.data.gather_for_metrics({"id": got}, weight)["id"].tolist()
        assert jaxdist.data.gather_for_metrics(batch[0]["id"], batch[1]).tolist() == ids[-int(batch[1].sum()) :]
    assert ids == list(range(43))
    stream = jaxdist.loader(Again(), 16, shuffle=False, tail="pad")
    assert sum(len(jaxdist.data.gather_for_metrics(*batch)) for batch in stream) == len(list(Again()))
    with raises(ValueError, "['a']", "(3,)", "2"):
        jaxdist.data.gather_for_metrics({"a": np.ones(3)}, np.ones(2))
