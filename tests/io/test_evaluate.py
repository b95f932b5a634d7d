"""`evaluate` and `gather_for_metrics`: each example counts once, whatever the tail."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@functools.cache
def expected() -> Any:
    return jax.tree.map(np.asarray, sums_of(W, DATA))


def check(sums: Any) -> None:
    """They are those of one device over the whole data set."""
    for name, x in sums.items():
        np.testing.assert_allclose(x, expected()[name], rtol=1e-12, err_msg=name)


class Stream:
    """The examples, one after the other."""

    def __iter__(self) -> Any:
        return (jax.tree.map(lambda x, i=i: x[i], DATA) for i in range(53))


def test_the_sums_of_all_examples() -> None:
    """Over an epoch, over another one, and over a whole one where one was begun; of a stream too."""
    step = jaxdist.data_parallel(sums_of)
    batches = jaxdist.loader(DATA, 16, tail="keep")
    stream = jaxdist.loader(Stream(), 16, tail="keep", shuffle=False)
    for loader in (batches, batches, stream):
        next(iter(loader))
        loader.set_state(loader.get_state())
        sums = jaxdist.evaluate(step, jaxdist.shard(W), loader)
        check(sums)
        assert type(sums["loss"]) is float
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


def test_a_dropped_tail_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    step = jaxdist.data_parallel(sums_of)
    with caplog.at_level(logging.WARNING, "jaxdist"):
        for loader in (jaxdist.loader(DATA, 16), jaxdist.loader(DATA, 16), jaxdist.loader(Stream(), 16, shuffle=False)):
            assert jaxdist.evaluate(step, W, loader)["count"] == 48
    by_index, stream = (text for text in caplog.messages if text.startswith("evaluate"))
    assert [token for token in ("5 of 53", "tail='keep'") if token not in by_index] == []
    assert [token for token in ("stream", "tail='keep'") if token not in stream] == []


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
