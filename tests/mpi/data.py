"""`jaxdist.loader` on several ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.data.gathering import gather_for_metrics

ERRORS = [
    "loader, on rank 0: batch_size=0: expected an integer of at least 1",
    r"len\(source\) is 24 on rank 0(, 2)?; 23 on rank 1|is 24 on rank 0; 23 on rank 1; 22 on rank 2",
    "the checksum of the first and last example is",
    "has 0 examples",
    "fewer than one batch of all ranks",
    "loader state with different arguments: position is 0 on rank 0; 1 on rank 1",
]


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(jaxdist.unshard(a), b, 1e-10, 1e-10)


def smaller_last_batch() -> None:
    """Of which ranks hold copies of the last example: as on one device."""
    size = jaxdist.get_context().size
    rows = np.random.default_rng(2).normal(size=(8 * size + 2 * size - 1, 3))

    def step(w: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.std(x @ w) + jnp.max(x @ w))(w)
        return w - 0.1 * grads, (loss, len(x))

    decorated, one, many, counts = jaxdist.data_parallel(step), jnp.ones(3), jnp.ones(3), []
    for i, batch in enumerate(jaxdist.loader(rows, 8, shuffle=False, tail="keep")):
        one, (loss, _) = step(one, rows[8 * size * i :][: 8 * size])
        many, (got, count) = decorated(many, batch)
        counts.append(int(count))
        close(many, one)
        close(got, loss)
    assert counts == [8 * size, 2 * size - 1]


def epochs() -> None:
    """Steps, losses and evaluation counts on an odd number of examples."""
    ctx = jaxdist.get_context()
    n = 101 + ctx.size
    x = np.random.default_rng(0).normal(size=(n, 3))

    def each_loss(w: Any, x: Any) -> Any:
        return (x @ w - 1) ** 2

    @jaxdist.data_parallel
    def train(w: Any, batch: Any) -> Any:
        def loss_fn(w: Any, batch: Any) -> Any:
            x, weight = batch
            return jnp.sum(each_loss(w, x) * weight) / jnp.sum(weight)

        loss, grads = jax.value_and_grad(loss_fn)(w, batch)
        return w - 0.1 * grads, loss

    @jaxdist.data_parallel(donate=False)
    def evaluate(w: Any, batch: Any) -> Any:
        (ids, _), weight = batch
        return {"count": jnp.sum(weight > 0, dtype=jnp.int32), "ids": ids, "weight": weight}

    whole = jaxdist.loader(x, 8 * ctx.size, tail="drop")._reading.sampling  # the order of the whole
    gradient = jax.jit(jax.grad(lambda w, x: each_loss(w, x).mean()))
    for on_devices in (False, True):
        w, plain, taken = jnp.ones(3), jnp.ones(3), 0
        for batch in jaxdist.loader(x, 8, tail="pad", on_devices=on_devices):
            w, _ = train(w, batch)
            places = np.arange(taken * whole.batch_size, min(n, (taken + 1) * whole.batch_size))
            plain = plain - 0.1 * gradient(plain, x[whole.order(0, places)])
            taken += 1
        close(w, plain)
        assert taken == -(-n // (8 * ctx.size))
    assert sum(1 for _ in jaxdist.loader(x, 8)) == n // (8 * ctx.size)

    for length in (n, 1):
        count, ids = 0, []
        for batch in jaxdist.loader((np.arange(length), x[:length]), 4, tail="pad"):
            out = evaluate(jnp.ones(()), batch)
            count += int(out["count"])
            ids += gather_for_metrics(out["ids"], out["weight"]).tolist()
            assert gather_for_metrics(batch[0][0], batch[1]).tolist() == ids[-int(out["count"]) :]
        assert count == length
        assert sorted(ids) == list(range(length))

    # Worker processes under a launcher.
    got = [batch.tolist() for batch in jaxdist.loader(list(range(n)), 8, workers=1, shuffle=False)]
    assert got[0] == list(range(ctx.rank * 8, ctx.rank * 8 + 8))
    assert len(got) == n // (8 * ctx.size)


def tokens(path: Path) -> None:
    """The root alone tokenizes; a stream and packed rows are read as by one process."""
    ctx, called = jaxdist.get_context(), 0

    def encode(text: str) -> bytes:
        nonlocal called
        called += 1
        return text.encode()

    def refused(text: str) -> bytes:
        raise OSError("no tokenizer here")

    texts = ["a" * n for n in range(1, 40)]
    documents = jaxdist.tokenize(texts, encode, path / f"tokens{ctx.size}")
    assert called == (2 * len(texts) if ctx.is_root else 0)  # samples first
    with pytest.raises(OSError, match="tokenize, on rank 0: no tokenizer here"):
        jaxdist.tokenize(texts, refused, path / "never")
    rows = jaxdist.packed(documents, 16, seed=0)
    everything = jaxdist.stream(rows).map(lambda row: row["tokens"])
    several: list[tuple[Any, bool | int]] = [(rows, True), (everything, 8)]
    for source, shuffle in several:
        found = []
        for batch, weight in jaxdist.loader(source, 3, tail="pad", shuffle=shuffle):
            batch = batch["tokens"] if isinstance(batch, dict) else batch
            found += gather_for_metrics(batch, weight).tolist()
        assert sorted(found) == sorted(row["tokens"].tolist() for row in rows)


def streams_that_differ() -> None:
    """Each rank reads all of a stream: a part, or another length, is seen."""
    rank = jaxdist.get_context().rank
    with pytest.raises(ValueError, match="the checksum of the first and last example is"):
        jaxdist.loader(jaxdist.stream(range(rank, 30)), 2, shuffle=False)
    with pytest.raises(ValueError, match="loader's stream with different arguments: what was read is"):
        for _ in jaxdist.loader(jaxdist.stream([0, *range(rank, 30)]), 2, shuffle=3):
            pass
    first = [0, 2, 1] if rank == 1 else [0, 1, 2]  # exchanged in the midst of a batch
    with pytest.raises(ValueError, match="loader's stream with different arguments: what was read is"):
        for _ in jaxdist.loader(jaxdist.stream([*first, *range(3, 30)]), 2, shuffle=False):
            pass
    with pytest.raises(ValueError, match="loader's stream with different arguments: the end of the epoch is"):
        for _ in jaxdist.loader(jaxdist.stream(range(40 - 30 * (rank > 0))), 2, shuffle=False):
            pass


def errors() -> None:
    """No rank hangs."""
    ctx, x, told = jaxdist.get_context(), np.ones((24, 3)), []
    batches = jaxdist.loader(np.arange(100), 5, tail="pad", prefetch=3)
    for source, size in [(x, 0 if ctx.is_root else 4), (x[ctx.rank :], 4), (x + ctx.rank, 4), (x[:0], 4), (x[:1], 4)]:
        try:
            jaxdist.loader(source, size)
        except ValueError as error:
            told.append(str(error))
    try:
        batches.set_state({**batches.get_state(), "position": ctx.rank})
    except ValueError as error:
        told.append(str(error))
    for pattern, text in zip(ERRORS, told, strict=True):
        assert re.search(pattern, text), (pattern, text)


def some_steps(path: str, steps: int) -> None:
    """Of an epoch that jobs of other sizes have begun: what was handed out and where they stopped is in a file."""
    ctx, file = jaxdist.get_context(), Path(path)
    saved = ctx.broadcast(json.loads(file.read_text()) if file.exists() else {"seen": []})
    batches = jaxdist.loader(np.arange(100), 5, tail="pad", prefetch=3)
    if "state" in saved:
        batches.set_state(saved["state"])
    for _, (batch, weight) in zip(range(steps), batches, strict=False):
        saved["seen"] += gather_for_metrics(batch, weight).tolist()
    states = ctx.control.exchange("states", batches.get_state()) if ctx.size > 1 else [batches.get_state()]
    assert all(s == states[0] for s in states)
    if ctx.is_root:
        file.write_text(json.dumps({"seen": saved["seen"], "state": states[0]}))


def main(path: str) -> None:
    smaller_last_batch()
    epochs()
    tokens(Path(path).parent)
    streams_that_differ()
    errors()
    some_steps(path, 3)
