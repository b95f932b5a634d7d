"""Loaders of several ranks."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from catalogue.sources import Again
from harness.errors import error_of

import jaxdist

ctx = jaxdist.get_context()


def steps_on_batches() -> None:
    """On an odd number of examples: as on one device with the real ones, each of which comes once."""
    n = 101 + ctx.size
    x, seen, sizes = np.random.default_rng(0).normal(size=(n, 3)), list[int](), list[int]()

    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        i, x = batch
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w), (i, len(x), jnp.max(x))

    w = one = jnp.ones(3)
    for batch in jaxdist.loader((np.arange(n), x), 8, tail="keep"):
        w, (found, count, most) = step(w, batch)
        rows = jaxdist.data.gather_for_metrics(found)
        assert most == x[rows].max()
        seen += rows.tolist()
        sizes.append(int(count))
        one = one - 0.1 * jax.grad(lambda w, rows=rows: jnp.mean((x[rows] @ w - 1) ** 2))(one)
        np.testing.assert_allclose(jaxdist.unshard(w), one, 1e-10)
    assert sorted(seen) == list(range(n))
    assert sizes == [min(8, n - i) for i in range(0, n, 8)]


same = jaxdist.data_parallel(lambda batch: batch, batch_argnums=0)


def tokens(folder: Path) -> None:
    """The root alone tokenizes; packed rows and a stream of them are read as by one process."""
    called: list[str] = []

    def encode(text: str) -> bytes:
        called.append(text)
        return text.encode()

    texts = ["a" * n for n in range(1, 40)]
    documents = jaxdist.data.tokenize(texts, encode, folder / f"tokens{ctx.size}")
    assert bool(called) == ctx.is_root
    rows = jaxdist.data.packed(documents, 16, seed=0)
    sources: list[tuple[Any, bool | int]] = [(rows, True), (Again(rows), 8)]
    for source, shuffle in sources:
        found = []
        for batch in jaxdist.loader(source, 3, tail="keep", shuffle=shuffle):
            found += jaxdist.data.gather_for_metrics(same(batch["tokens"])).tolist()
        assert sorted(found) == sorted(row["tokens"].tolist() for row in rows)


def read(source: Any, batch_size: int = 2, **settings: Any) -> None:
    """A whole epoch."""
    for _ in jaxdist.loader(source, batch_size, **settings):
        pass


def refused(text: str) -> bytes:
    """A tokenizer that is not there."""
    raise OSError("no tokenizer here")


def errors(folder: Path) -> dict[str, list[str]]:
    """What every rank is told where one of them differs."""
    rank, x = ctx.rank, np.ones((24, 3))
    batches, stream = jaxdist.loader(np.arange(100), 5, tail="keep"), {"shuffle": False}
    exchanged = [0, 2, 1] if rank == 1 else [0, 1, 2]  # in the midst of a batch
    return {
        "batch_size": error_of(read, x, 0 if ctx.is_root else 4),
        "another length": error_of(read, x[rank:]),
        "other examples": error_of(read, x + rank),
        "no examples": error_of(read, x[:0]),
        "too few": error_of(read, x[:1]),
        "another seed": error_of(read, x, seed=rank),
        "another state": error_of(batches.set_state, batches.get_state() | {"position": rank}),
        "another stream": error_of(read, Again([0, *range(rank, 30)]), shuffle=3),
        "rows exchanged": error_of(read, Again([*exchanged, *range(3, 30)]), **stream),
        "a longer stream": error_of(read, Again(range(40 - 30 * (rank > 0))), 5, **stream),
        "gathered": error_of(jaxdist.data.gather_for_metrics, {"a": x}),
        "no tokenizer": error_of(jaxdist.data.tokenize, ["a"], refused, folder / "never"),
    }


def some_steps() -> dict[str, Any]:
    """Three of an epoch."""
    batches, seen = jaxdist.loader(np.arange(100), 5, tail="keep", prefetch=3), list[int]()
    for _, batch in zip(range(3), batches, strict=False):
        seen += jaxdist.data.gather_for_metrics(same(batch)).tolist()
    return {"seen": seen, "state": batches.get_state()}


def read_by_several(folder: str) -> dict[str, Any]:
    steps_on_batches()
    tokens(Path(folder))
    return {"errors": errors(Path(folder)), **some_steps()}
