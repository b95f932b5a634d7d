"""Batches that the ranks do not divide, as several processes pass them: the results of one device with all rows."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness.check import close
from harness.errors import raises

import jaxdist

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size
SIZES = [4 * N + 1, 1, 4 * N, 3, 4 * N - 1, 4 * N + 1, 2 * N + 1, 4 * N - 1]  # of which ranks pass as many of several
TX = optax.adam(0.05)


def batch(i: int, rows: int) -> dict[str, Any]:
    """The whole batch of a step."""
    rng = np.random.default_rng(i)
    keys = jax.random.split(jax.random.key(i), rows)
    return {"x": rng.normal(size=(rows, 3)), "label": rng.integers(0, 4, rows), "key": keys}


def train(w: Any, opt: Any, batch: Any) -> Any:
    """A mean, sums, a sort, random numbers of each example, and values of each."""

    def loss_fn(w: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(batch["key"])
        scores = jnp.tanh(batch["x"] + 0.1 * noise) @ w
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean(), scores

    (loss, scores), grads = jax.value_and_grad(loss_fn, has_aux=True)(w)
    updates, opt = TX.update(grads, opt)
    aux = loss, scores, jnp.sort(batch["x"][:, 0]), jnp.bincount(batch["label"], length=4), len(scores)
    return optax.apply_updates(w, updates), opt, aux


W = np.random.default_rng(9).normal(size=(3, 4))
Pass = Callable[[dict[str, Any]], dict[str, Any]]


def own(one: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[ctx.rows(len(x))], one)


def by_hand(one: dict[str, Any]) -> dict[str, Any]:
    """Without asking: each rank has equally many, the last ones fewer."""
    rows = len(one["label"])
    each = -(-rows // N)
    return jax.tree.map(lambda x: x[min(rows, R * each) : min(rows, (R + 1) * each)], one)


def ahead(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """On the device before their turn comes, as a prefetching iterator has them."""
    moved = (jax.tree.map(jnp.asarray, one) for one in batches)
    held = list(itertools.islice(moved, count))
    while held:
        held += itertools.islice(moved, 1)
        yield held.pop(0)


def in_a_thread(batches: Iterator[Any]) -> Iterator[Any]:
    """On the device, at a time of their own."""
    made = queue.Queue[Any](3)
    threading.Thread(target=lambda: [*map(made.put, map(jnp.asarray, batches)), made.put(None)], daemon=True).start()
    return iter(made.get, None)


def run(parts: Iterator[dict[str, Any]], sizes: list[int]) -> None:
    """Train on the ranks' rows of batches of these sizes."""
    step: Any = jaxdist.data_parallel(lambda w, opt, batch: train(w, opt, batch))
    got: Any = W, jaxdist.zero(TX, 3).init(W)
    want: Any = W, TX.init(W)
    for i, (part, rows) in enumerate(zip(parts, sizes, strict=True)):
        *got, aux = step(*got, part)
        *want, expected = jax.jit(train)(*want, batch(i, rows))
        close(jaxdist.unshard((tuple(got), aux)), (tuple(want), expected))


def steps() -> None:
    """However the rows come: asked for, cut by hand, on the device, or asked for before their turn."""
    batches = lambda sizes=SIZES: (batch(i, rows) for i, rows in enumerate(sizes))
    run(map(own, batches()), SIZES)
    distinct = [4 * N, 2 * N - 1, 4 * N, 2 * N - 1]  # no rank passes as many rows of two of them
    run(map(by_hand, batches(distinct)), distinct)
    moved = SIZES[2:6]
    run((jax.tree.map(jnp.asarray, own(one)) for one in batches(moved)), moved)
    tail = [*[4 * N] * 5, 4 * N - 1]  # in a call that is not compared for its number alone
    run(ahead(map(own, batches(tail)), 1), tail)


def loaders() -> None:
    """A loader's, with a tail; two at once with other sizes; sums, values of each, and parts of a batch."""
    x = np.random.default_rng(0).normal(size=(4 * N + 3, 3))
    step = jaxdist.data_parallel(lambda w, x: (jnp.sum((x @ w) ** 2), x), batch_argnums="x")
    for size in (1, 3, 2 * N + 1, 4 * N + 2, 5 * N):
        batches = jaxdist.loader(x, size, shuffle=False, tail="keep")
        found = [jaxdist.unshard(step(W, part)) for part in batches]
        wholes = [x[i : i + size] for i in range(0, len(x), size)]
        close(found, [(np.sum((one @ W) ** 2), one) for one in wholes])
        values = [jaxdist.data.gather_for_metrics(step(W, part)[1]) for part in batches]
        assert sorted(np.concatenate(values).ravel()) == sorted(x.ravel())
        close(jaxdist.evaluate(lambda w, x: step(w, x)[0], W, batches), float(np.sum((x @ W) ** 2)))
    two = jaxdist.data_parallel(lambda w, x, y: jnp.sum(x @ w) * jnp.mean(y @ w), batch_argnums=("x", "y"))
    first, second = (jaxdist.loader(x, size, shuffle=False) for size in (4 * N, 4 * N - 1))
    for a, b in zip(first, second, strict=False):
        close(two(W, a, b), np.sum(x[: 4 * N] @ W) * np.mean(x[: 4 * N - 1] @ W))
    one = jaxdist.data_parallel(lambda w, x: jnp.sum(x @ w) + len(x))
    batches = jaxdist.loader(x[:-4], 2 * N, shuffle=False, tail="keep")  # most ranks pass as many of the last one
    for _, early in itertools.product(range(3), (lambda own: ahead(own, 1), lambda own: ahead(own, 2), in_a_thread)):
        for i, part in enumerate(early(iter(batches))):
            whole = x[:-4][2 * N * i : 2 * N * (i + 1)]
            close(one(W, part), np.sum(whole @ W) + len(whole))
    grads = jaxdist.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), microbatches=2)
    halves = jaxdist.data_parallel(lambda w, x: grads(w, x))
    for part in jaxdist.loader(x, 2 * N + 2, shuffle=False):
        close(halves(W, part), jax.value_and_grad(lambda w: jnp.mean((x[: 2 * N + 2] @ w) ** 2))(W))


def known() -> None:
    """A call that is known waits for nobody, where the ranks do not divide the batch too."""
    asked = [(own if i < 12 else by_hand)(batch(i, 50 * N + 1))["x"] for i in range(24)]
    batches = jaxdist.loader(batch(0, 120 * N - 1)["x"], 60 * N, tail="keep")  # N - 1 ranks pass 60 rows of both
    for parts, new in ((asked, 1), (itertools.chain.from_iterable(itertools.repeat(batches, 12)), 3)):
        step, w, made = jaxdist.data_parallel(lambda w, x: (w - 0.1 * jnp.mean(x, 0)[:, None], jnp.sum(x))), W, []
        for part in parts:
            before, _ = ctx.control.calls
            w, _ = step(w, part)
            made.append(ctx.control.calls[0] - before)
        # At calls 1, 2, 4, 8, ... the state's bits are compared.
        assert made[new:] == [int(call & (call - 1) == 0) for call in range(new + 1, 25)], made


def refused() -> None:
    """Rows of other sizes, on every rank, which names the right ones; the job goes on."""
    step = jaxdist.data_parallel(lambda w, x: jnp.sum(x @ w))
    x = np.random.default_rng(1).normal(size=(6 * N, 3))
    for sizes in ([3] + [4] * (N - 1), [4] * (N - 1) + [5], [0] + [4] * (N - 1)):
        total, start = sum(sizes), sum(sizes[:R])
        each = -(-total // N)
        with raises(ValueError, "x", f"{total}", f"{each} on rank 0", f"ctx.rows({total})"):
            step(W, x[start : start + sizes[R]])
        close(step(W, x[ctx.rows(len(x))]), np.sum(x @ W))
    whole = jax.device_put(x[: 4 * N + 1], jax.NamedSharding(ctx.mesh, jax.P()))
    of_all = jaxdist.data_parallel(lambda w, x: jnp.sum(x @ w), batch_argnums="x")
    close(of_all(W, whole), np.sum(x[: 4 * N + 1] @ W))
    with raises(ValueError, "empty"):
        step(W, x[:0])
    compiled = step.lower(W, x[ctx.rows(4 * N + 1)]).compile()
    assert compiled.in_avals[0][1].shape == (4 * N + 1, 3)
    close(compiled(W, x[ctx.rows(4 * N + 1)]), np.sum(x[: 4 * N + 1] @ W))
