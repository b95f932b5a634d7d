"""Loops and branches of a step, by name: ``f(w, x)`` with a matrix of 6 by 6 and a batch of rows of 6."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdist

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(6, 6)) / 3)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(layer(w, x) ** 2)


def turns(x: Any, k: int = 4) -> Any:
    """As many parts, whatever the batch: its end is left out."""
    n = len(x) // k if len(x) >= k else 1
    return jnp.resize(x, (k, n, *x.shape[1:])) if len(x) < k else x[: k * n].reshape(k, n, *x.shape[1:])


def newton(x: Any) -> Any:
    """A root, in a number of turns that depends on the example."""
    start = (x, jnp.asarray(0))
    y, n = lax.while_loop(
        lambda s: (jnp.abs(s[0] ** 2 - x**2 - 2) > 1e-3) & (s[1] < 50),
        lambda s: ((s[0] + (x**2 + 2) / s[0]) / 2, s[1] + 1),
        (start[0] + 3, start[1]),
    )  # fmt: skip
    return y, n


def masked(w: Any, x: Any, loop: str) -> Any:
    """Layers that close over a mask and a filler as large as the batch, as an attention's under ``vmap``."""
    mask, filler = jnp.broadcast_to(jnp.tri(6, dtype=bool)[2], x.shape), jnp.full(x.shape, -0.5)
    hidden = lambda h, w: jnp.where(mask, layer(w, h), filler)
    ways = {
        "scan": lambda: through(hidden, x, jnp.stack([w, w.T])),
        "checkpoint in scan": lambda: through(jax.checkpoint(hidden), x, jnp.stack([w, w.T])),
        "while": lambda: lax.while_loop(lambda s: s[1] < 2, lambda s: (hidden(s[0], w), s[1] + 1), (x, 0))[0],
        "cond": lambda: lax.cond(w[0, 0] > 0, lambda: hidden(x, w), lambda: jnp.where(mask, x, 1.0)),
        "checkpoint": lambda: jax.checkpoint(hidden)(x, w),
    }
    return ways[loop]()


def through(hidden: Any, x: Any, ws: Any) -> Any:
    """Layers in a loop."""
    return lax.scan(lambda h, w: (hidden(h, w), None), x, ws)[0]


def over_turns(f: Any, w: Any, x: Any, start: Any = None) -> Any:
    return lax.scan(lambda c, p: (f(c, p), None), jnp.zeros_like(w) if start is None else start, turns(x))[0]


def dropout(w: Any, x: Any, wrap: Any = lambda f: f) -> Any:
    """A gradient of layers with dropout in a loop."""

    def hidden(carry: Any, w: Any) -> Any:
        h, key = carry
        key, own = jax.random.split(key)
        kept = jax.random.bernoulli(own, 0.7, h.shape)
        return jnp.where(kept, layer(w, h) / 0.7, 0.0), key

    value = lambda ws: jnp.mean(through(wrap(hidden), (x, jax.random.key(0)), ws)[0] ** 2)
    return jax.grad(value)(jnp.stack([w, 2 * w, w.T]))


gradient = jax.grad(loss)
MASKED = ["scan", "checkpoint in scan", "while", "cond", "checkpoint"]
FLOWS: dict[str, Callable[[Any, Any], Any]] = {
    **{f"a mask, {loop}": lambda w, x, loop=loop: masked(w, x, loop) for loop in MASKED},
    **{
        f"a mask, {loop}, gradient": lambda w, x, loop=loop: jax.grad(lambda w: jnp.mean(masked(w, x, loop) ** 2))(w)
        for loop in MASKED if loop != "while"
    },
    "dropout in a loop over layers": dropout,
    "dropout in a loop over layers, remat": functools.partial(dropout, wrap=jax.checkpoint),
    "a mask, whole and in slices": lambda w, x: lax.scan(
        lambda c, w: ((jnp.where(c[1], c[0] @ w, 0.0), c[1]), c[1].sum()),
        (x, jnp.ones(x.shape, bool)), jnp.stack([w, w]),
    ),
    "a mask that a loop also returns": lambda w, x: (
        lambda m: lax.scan(lambda h, w: (jnp.where(m > 0, h @ w, 0), m), x, jnp.stack([w, w]))
    )(jnp.ones(x.shape)),
    "scan over examples": lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c.sum()), jnp.zeros(6), x),
    "scan over examples, added": lambda w, x: lax.scan(lambda c, r: (c + jnp.sin(r @ w), r.max()), w[0], x),
    "a step an example": lambda w, x: lax.scan(lambda w, r: (w - 0.01 * gradient(w, r), loss(w, r)), w, x),
    "reverse": lambda w, x: lax.scan(lambda c, r: (c * 0.5 + r, c), jnp.zeros(6), x, reverse=True),
    "unrolled": lambda w, x: lax.scan(lambda h, w: (layer(w, h), None), x, jnp.stack([w] * 4), unroll=2),
    "a sum that each turn uses": lambda w, x: over_turns(lambda c, p: c + gradient(w - 0.1 * c, p), w, x),
    "a clipped sum": lambda w, x: over_turns(lambda c, p: jnp.clip(c + gradient(w, p), -0.1, 0.1), w, x),
    "a sum that starts elsewhere": lambda w, x: over_turns(lambda c, p: c + gradient(w, p), w, x, w * 3),
    "a start that is used whole, too": lambda w, x: (lambda s: [
        lax.scan(lambda c, r: (c + r.sum(), None), s, x)[0].sum(), jnp.sort(s, 0).sum()])(jnp.sin(x)),
    "picked one by one": lambda w, x: lax.fori_loop(0, 4, lambda i, c: c + gradient(w, turns(x)[i]), jnp.zeros_like(w)),
    "nested": lambda w, x: over_turns(
        lambda c, p: lax.fori_loop(0, 2, lambda i, c: c + gradient(w, p) * i, c), w, x
    ),
    "carries of 16 bits": lambda w, x: over_turns(lambda c, p: c + p.sum(0), w[0], jnp.round(x)),
    "carries of integers": lambda w, x: lax.scan(
        lambda c, r: (c + (r > 0).sum().astype(jnp.uint8), c), jnp.uint8(250), x
    ),
    "a swap": lambda w, x: lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + x.sum(0)), (x.mean(0), w[0])),
    "lax.map": lambda w, x: [lax.map(lambda r: jnp.sort(r) @ w, x), lax.map(lambda r: r.sum(), x, batch_size=2)],
    "while of the batch": lambda w, x: lax.while_loop(
        lambda c: jnp.abs(c[0]).max() > 0.1, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0)
    ),
    "while of the state": lambda w, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x.sum(0)), (0, w[0])
    ),
    "while, the sum decides": lambda w, x: lax.while_loop(lambda c: c.sum() < 5, lambda c: c + jnp.abs(x).sum(0), w[0]),
    "power iteration": lambda w, x: lax.while_loop(
        lambda c: c[1] < 20, lambda c: ((lambda v: v / jnp.linalg.norm(v))(x.T @ (x @ c[0])), c[1] + 1),
        (jnp.ones(6), 0),
    )[0],
    "vmap of while, of two dimensions": lambda w, x: jax.vmap(jax.vmap(newton))(x),
    "vmap of cond": lambda w, x: jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r))(x),
    "cond of the batch": lambda w, x: lax.cond(x.sum() > 0, lambda: x.mean(0), lambda: (x**2).mean(0)),
    "cond with nothing": lambda w, x: lax.cond(x.max() > 0, lambda: gradient(w, x), lambda: jnp.zeros_like(w)),
    "cond with a whole value": lambda w, x: [
        lax.cond(x.max() > c, lambda: (x.sum(0), x), lambda: (w[0], x * 2)) for c in (-100.0, 100.0)
    ],
    "cond of sums": lambda w, x: (lambda g: lax.cond(x.max() > 0, lambda g: g + 1, lambda g: -g, g))(x.sum(0)),
    "cond, gradient": lambda w, x: jax.grad(
        lambda w: lax.cond(w[0, 0] > 0, lambda: loss(w, x), lambda: jnp.zeros(()))
    )(jnp.abs(w)),
    "switch": lambda w, x: lax.switch(jnp.argmax(x.sum(0)) % 3, [lambda: x.sum(0), lambda: x.max(0), lambda: x[0]]),
    "checkpoint": lambda w, x: jax.grad(lambda w: loss(w, jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, x))))(w),
    "an associative scan": lambda w, x: lax.associative_scan(lambda a, b: a + 0.5 * b, x),
    "custom root": lambda w, x: jax.grad(
        lambda a: lax.custom_root(
            lambda y: y**3 - a * x.sum() ** 2, 1.0,
            lambda f, y: lax.fori_loop(0, 60, lambda i, y: y - f(y) / (3 * y**2 + 1e-9), y), lambda g, y: y / g(1.0),
        )
    )(2.0),
    "a solver": lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: x.T @ (x @ v) + v, w[0], maxiter=8)[0],
}  # fmt: skip


# --- where gradients are reduced


def accumulate(loop: str, body: Callable[[Any, Any], Any], start: Any, parts: Any) -> Any:
    """``start`` and what `body` adds to it, as users write it."""
    k = len(parts)
    if loop == "scan":
        return lax.scan(lambda c, p: (body(c, p), None), start, parts)[0]
    if loop == "fori":
        return lax.fori_loop(0, k, lambda i, c: body(c, parts[i]), start)
    assert loop == "while"
    return lax.while_loop(lambda s: s[0] < k, lambda s: (s[0] + 1, body(s[1], parts[s[0]])), (0, start))[1]


def strided(x: Any, k: int = 4) -> Any:
    return jnp.moveaxis(x.reshape(-1, k, x.shape[-1]), 1, 0)


def accumulated(f: Callable[[Any, Any], Any], loop: str, parts: Callable[[Any], Any] = strided) -> Any:
    """A step, with or without its gradients added up over parts of the batch."""

    def step(w: Any, x: Any) -> Any:
        add = lambda c, p: jax.tree.map(lambda a, b: a + b / 4, c, jax.value_and_grad(f)(w, p))
        value, grad = accumulate(loop, add, (jnp.zeros(()), jnp.zeros_like(w)), parts(x))
        return w - grad, value

    return step


def penalised(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda w, x: f(w, x) + 0.1 * jnp.sum(w**2)


def in_scan(ws: Any, x: Any) -> Any:
    return jnp.mean(through(lambda h, w: layer(w, h), x, ws) ** 2)


def in_groups(ws: Any, x: Any) -> Any:
    """Of two layers, the activations of each group computed again."""
    group = jax.checkpoint(lambda h, ws: through(lambda h, w: layer(w, h), h, ws))
    return jnp.mean(through(group, x, ws.reshape(2, 2, *ws.shape[1:])) ** 2)


def in_a_branch(ws: Any, x: Any) -> Any:
    return lax.cond(x.sum() > -1e9, in_scan, lambda ws, x: jnp.zeros(()), ws, x)


def normalised_in_each_turn(ws: Any, x: Any) -> Any:
    add = lambda c, p: c + (lambda g: g / jnp.linalg.norm(g))(jax.grad(in_scan)(ws, p))
    return ws - accumulate("scan", add, jnp.zeros_like(ws), strided(x))


def in_32_bits(ws: Any, x: Any) -> Any:
    add = lambda c, p: c + jax.grad(in_scan)(ws, p).astype(jnp.float32)
    return accumulate("scan", add, jnp.zeros(ws.shape, jnp.float32), strided(x))


def microbatches(w: Any, x: Any) -> Any:
    """``i::k``: no device sends examples."""
    value, grads = jaxdist.value_and_grad(loss, microbatches=4)(w, x)
    return w - grads, value


X = RNG.normal(size=(32, 6))
# Layers in a loop, whose gradients come out stacked up: here 74 kB of them, too many to wait.
STACK, ROWS = jnp.asarray(RNG.normal(size=(4, 96, 96)) / 10), RNG.normal(size=(32, 96))
HALF = jnp.asarray(np.tile(STACK.astype(jnp.bfloat16), (1, 2, 2))), jnp.asarray(np.tile(ROWS, (1, 2)), jnp.bfloat16)
in_order = lambda k: lambda x: x.reshape(k, -1, x.shape[-1])
REDUCED: dict[str, tuple[Any, tuple[Any, Any], int]] = {
    "scan, 2": (accumulated(loss, "scan", in_order(2)), (W, X), 0),
    "fori, 4": (accumulated(penalised(loss), "fori", in_order(4)), (W, X), 0),
    "while, 4": (accumulated(loss, "while", in_order(4)), (W, X), 0),
    "microbatches": (microbatches, (W, X), 0),
    "a sum that each turn uses": (FLOWS["a sum that each turn uses"], (W, X), 1),
    "a clipped sum": (FLOWS["a clipped sum"], (W, X), 1),
    "layers, scan": (accumulated(in_scan, "scan"), (STACK, ROWS), 0),
    "layers, fori": (accumulated(in_scan, "fori"), (STACK, ROWS), 0),
    "layers, while": (accumulated(in_scan, "while"), (STACK, ROWS), 0),
    "layers in groups": (accumulated(in_groups, "fori"), (STACK, ROWS), 0),
    "layers, remat": (accumulated(lambda ws, x: jax.checkpoint(in_scan)(ws, x), "while"), (STACK, ROWS), 0),
    "layers in a branch": (accumulated(in_a_branch, "while"), (STACK, ROWS), 0),
    "layers, in 32 bits": (in_32_bits, HALF, 0),
    "layers that each turn uses": (normalised_in_each_turn, (STACK, ROWS), 2),
    "layers one by one": (lambda ws, x: ws - jax.grad(in_scan)(ws, x), (STACK, ROWS), 1),
}  # fmt: skip
"""Steps, their arguments, and in how many loops the gradient is reduced: in each turn, if that uses the sum (without
microbatches: while the next layer's gradient is computed), or once after all."""
