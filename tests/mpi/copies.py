"""State that lies on all ranks and that no decorated step has returned is compared; what steps return costs nothing."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from calls import W, X, alike, ctx, loss_of, refused, whole

import jaxdist

EXCHANGES: list[str] = []
MINE = X[ctx.rank]


def counted() -> None:
    """Take down what is exchanged from now on."""
    exchange = ctx.control.exchange

    def listen(tag: str, *args: Any, **kwargs: Any) -> Any:
        EXCHANGES.append(tag)
        return exchange(tag, *args, **kwargs)

    ctx.control.exchange = listen  # type: ignore[method-assign]


def during(name: str, call: Any, most: int) -> Any:
    EXCHANGES.clear()
    out = call()
    assert len(EXCHANGES) <= most, (name, EXCHANGES)
    return out


def descend(w: Any, m: Any, x: Any) -> tuple[Any, Any, Any]:
    loss, grads = jax.value_and_grad(loss_of)(w, x)
    m = 0.9 * m + grads
    return w - 0.1 * m, m, loss


def steady() -> None:
    """What steps return, one to another, and what they only read, is compared no more."""
    step = jaxdist.data_parallel(descend)
    evaluate = jaxdist.data_parallel(loss_of, donate=False)
    w, m = W, jnp.zeros(3)
    expected: Any = W, jnp.zeros(3)
    for _ in range(3):
        w, m, _ = step(w, m, MINE)
        evaluate(w, MINE)
        expected = descend(expected[0], expected[1], whole(X))[:2]

    def loop() -> Any:
        nonlocal w, m
        for _ in range(4):
            w, m, _ = step(w, m, MINE)
            for _ in range(2):
                evaluate(w, MINE)
        return w, m

    for _ in range(2):  # the second time its order is known
        found = during("steady", loop, 99)
        for _ in range(4):
            expected = descend(expected[0], expected[1], whole(X))[:2]
    found = during("steady", loop, 0)
    for _ in range(4):
        expected = descend(expected[0], expected[1], whole(X))[:2]
    alike("steady", found, expected)


def updated_outside(folder: str) -> None:
    """On every rank alike, in each call: compared in fewer and fewer of them."""
    gradient = jaxdist.data_parallel(jax.grad(loss_of), donate=False)
    w, expected, calls = W, W, []
    for i in range(20):
        grads = during("outside", lambda w=w: gradient(w, MINE), 99)
        calls += [i] * any("copies" in tag for tag in EXCHANGES)
        w, expected = w - 0.1 * grads, expected - 0.1 * jax.grad(loss_of)(expected, whole(X))
    alike("updated outside", w, expected)
    assert calls == [1, 2, 4, 8, 16], calls
    EXCHANGES.clear()
    jaxdist.save(f"{folder}/outside", {"w": w}, 1)
    restored = jaxdist.restore(f"{folder}/outside", {"w": w})["w"]
    during("restored", lambda: gradient(restored, MINE), 99)
    assert not any("copies" in tag for tag in EXCHANGES), EXCHANGES


def changed_on_one_rank(folder: str) -> None:
    step = jaxdist.data_parallel(descend, donate=False)
    w, m, _ = step(W, jnp.zeros(3), MINE)
    own = w * (3.0 if ctx.rank == 1 else 1.0)
    for words in ("state leaf w is an array of all ranks", "rank 0 and rank 1 do not hold the same", "if rank =="):
        refused("a copy changed on one rank", lambda: step(own, m, MINE), words)
        step(w, m, MINE)
    refused("a copy saved", lambda: jaxdist.save(f"{folder}/own", {"w": own, "m": m}, 1), "an array of all ranks")
    scaled = w * 1.0 if ctx.rank == 1 else w
    words = "The copy of rank 0 alone would be saved"
    refused("a copy saved, what to do", lambda: jaxdist.save(f"{folder}/own", {"w": own}, 1), words)
    jaxdist.save(f"{folder}/own", {"w": scaled, "m": m}, 1)  # the same, though of one rank alone
    alike("the step goes on", step(w, m, MINE), descend(w, m, whole(X)))

    # In a first call all ranks compare, so nobody has to be stopped.
    w, m, _ = step(w, m, MINE)
    fresh = jaxdist.data_parallel(lambda w, x: w - jax.grad(loss_of)(w, x), donate=False)
    changed = w * 3.0 if ctx.rank == 1 else w
    refused("in a first call", lambda: fresh(changed, MINE), "the origin of w is leaf 0 of what step")


def keys_and_shards() -> None:
    """Keys are compared by their data; of what is in shards each rank has its own."""
    noisy = lambda key, w, x: (jax.random.split(key)[0], w - loss_of(w, x + jax.random.normal(key, x.shape)))
    step = jaxdist.data_parallel(noisy, donate=False)
    key, w = step(jax.random.key(0), W, MINE)
    step(jax.random.fold_in(key, 1), w, MINE)
    refused("a key", lambda: step(jax.random.fold_in(key, ctx.rank), w, MINE), "do not hold the same")
    shards = jaxdist.data_parallel(lambda w, x: (jaxdist.shard(w + 0), loss_of(w, x)), donate=False)
    big, _ = shards(jnp.ones((4 * ctx.size, 3)).sum(1)[:3], MINE)
    jaxdist.data_parallel(lambda w, x: loss_of(w, x), donate=False)(big * 1.0, MINE)


def train(leaf: str) -> None:
    """Rank 1 alone changes w or key between two calls, or passes two results of one type in the other order."""
    if leaf == "exchange":
        swap, p, q = jaxdist.data_parallel(exchange), W, W + 1
        for i in range(6):
            p, q = swap(*((q, p) if i == 3 and ctx.rank == 1 else (p, q)), MINE)
        jax.block_until_ready((p, q))
        return

    @jaxdist.data_parallel
    def step(w: Any, key: Any, x: Any) -> Any:
        key, now = jax.random.split(key)
        return w - 0.1 * jax.grad(loss_of)(w, x + jax.random.normal(now, x.shape)), key

    w, key = W, jax.random.key(0)
    for i in range(6):
        if i == 3 and ctx.rank == 1:
            w, key = (w * 3, key) if leaf == "w" else (w, jax.random.fold_in(key, 7))
        w, key = step(w, key, MINE)
    jax.block_until_ready((w, key))


def exchange(p: Any, q: Any, x: Any) -> Any:
    return tuple(w - 0.1 * jax.grad(loss_of)(w, x) for w in (p, q))


def states_of_one_type(folder: str) -> None:
    """Saved under the other's name on one rank; and a loop over them costs nothing once it is known."""
    step = jaxdist.data_parallel(exchange, donate=False)
    pairs = [(W, W + 1), (W + 2, W + 3)]

    def loop() -> None:
        for _ in range(3):
            for k, pair in enumerate(pairs):
                pairs[k] = step(*pair, MINE)

    for _ in range(2):
        during("states in turn", loop, 99)
    during("states in turn", loop, 0)
    saved = dict(zip("pq", pairs[0][:: -1 if ctx.rank == 1 else 1], strict=True))
    words = "leaf p, an array of all ranks, is an array with checksum"
    refused("another's name", lambda: jaxdist.save(f"{folder}/pairs", saved, 1), words)
    scaled = jaxdist.data_parallel(lambda p, q, x: (p * 2, q + 1, x.sum()), batch_argnums="x", donate=False)
    p, q = jaxdist.shard((jnp.ones((64, 5)), jnp.zeros((64, 5))))
    p, q, _ = scaled(p, q, MINE)
    saved = {"p": q if ctx.rank == 1 else p}
    words = "of which each rank has a part, is leaf 0 of what step"
    refused("a part of another", lambda: jaxdist.save(f"{folder}/parts", saved, 1), words)


def main(folder: str) -> None:
    logging.getLogger("jaxdist").setLevel(logging.ERROR)
    counted()
    steady()
    updated_outside(folder)
    changed_on_one_rank(folder)
    keys_and_shards()
    states_of_one_type(folder)
    assert np.isfinite(W).all()
