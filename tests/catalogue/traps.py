"""Ways in which a placement can make a result wrong, by name: a function, its state, a batch, and devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6))
W = jnp.asarray(RNG.normal(size=(6, 6)))
WAYS = [(4, 5), (8, 16)]  # devices, examples


def total(x: Any) -> Any:
    """A sum over the batch in its own dtype."""
    return lax.reduce(x, x.dtype.type(0), lax.add, (0,))


def product(x: Any) -> Any:
    """The same as a contraction."""
    return lax.dot_general(x, jnp.ones(x.shape[:1], x.dtype), (((0,), (0,)), ((), ())))


# --- what summands may pass

PASSES: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda w, x: -x.sum(0),
    "sums of sums": lambda w, x: x.sum(0) + x[:, ::-1].sum(0) - (2 * x).sum(0),
    "a whole value counts once": lambda w, x: x.sum(0) + w[0] - w[1],
    "concatenated": lambda w, x: jnp.concatenate([x.sum(0), w[0], (x * x).sum(0)]),
    "updated": lambda w, x: jnp.zeros(6).at[2:4].set(x.sum(0)[:2]),
    "selected by a whole value": lambda w, x: jnp.where(w[0] > 0, x.sum(0), (x * x).sum(0)),
    "selected by the batch": lambda w, x: jnp.where(x.max() > 0, x.sum(0), w[0]),
    "selected by itself": lambda w, x: jnp.where(x.sum(0) > 0, x.sum(0), 0.0),
    "padded": lambda w, x: [jnp.pad(x.sum(0), 2), jnp.pad(x.sum(0), 2, constant_values=1.0)],
    "times a whole value": lambda w, x: x.sum(0) * w[0],
    "times a number": lambda w, x: [x.sum(0) * 0.3, x.sum(0) / 3.0, 3.0 / x.sum(0)],
    "by a whole value": lambda w, x: x.sum(0) / w[0],
    "times itself": lambda w, x: [x.sum(0) * x.sum(0), x.sum(0) ** 2, jnp.vdot(x.sum(0), x.sum(0))],
    "times the batch": lambda w, x: x * x.sum(0),
    "by zero": lambda w, x: [x.sum(0) / 0.0, x.sum(0) / (w[0] * 0), -x.sum(0) / (w[0] * 0)],
    "by infinity": lambda w, x: [x.sum(0) * jnp.inf, x.sum(0) * (jnp.inf * w[0]), x.sum(0) / jnp.inf],
    "contracted": lambda w, x: [x.sum(0) @ w, (x.T @ x) @ w, (x.T @ x) @ (x.T @ x)],
    "of several uses": lambda w, x: (lambda g: [g + 1, g @ w, jnp.sin(g), g.reshape(2, 3), g.sum()])(x.sum(0)),
    "reshaped": lambda w, x: jnp.broadcast_to((x.T @ x).T.reshape(4, 9)[None, :, ::-1], (2, 4, 9)),
    "not linear": lambda w, x: [jnp.abs(x.sum(0)), jnp.maximum(x.sum(0), 0), jnp.sort(x.sum(0)), jnp.exp(x.mean(0))],
    "narrowed": lambda w, x: x.sum(0).astype(jnp.float32),
    "rounded": lambda w, x: lax.reduce_precision(x.sum(0), 8, 7),
    "widened": lambda w, x: total(x.astype(jnp.float32)).astype(jnp.float64).round(3),
    "of complex numbers": lambda w, x: (lambda s: [s, s * 2, s.real, s * 1j, jnp.abs(s), s.conj()])(
        (x + 1j * x**2).sum(0)
    ),
}


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "divided": lambda s: lax.div(s, jnp.full_like(s, 7)),
    "remainder": lambda s: s % 7,
    "widened": lambda s: s.astype(jnp.int64),
    "to floats": lambda s: s.astype(jnp.float32),
    "narrowed": lambda s: s.astype(jnp.uint8),
    "times, minus": lambda s: s * 3 - 7,
    "negated": lambda s: -s,
    "compared": lambda s: s > 40,
}


def integers(rows: int, *dtypes: str) -> list[Any]:
    return [np.random.default_rng(rows).integers(0, 120, (rows, 6)).astype(dtype) for dtype in dtypes]


HALVES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda s: s,
    "widened": lambda s: s.astype(jnp.float32),
    "scaled": lambda s: s * s.dtype.type(0.01),
    "divided": lambda s: s / s.dtype.type(100),
    "finite": lambda s: jnp.isfinite(s),
    "a branch": lambda s: lax.cond(jnp.isfinite(s).all(), lambda: 1, lambda: 2),
    "added": lambda s: (s + s) - s,
    "negated": lambda s: (-s).astype(jnp.float32),
    "with whole values": lambda s: jnp.concatenate([s, jnp.arange(3).astype(s.dtype)]) + jnp.ones(6, s.dtype),
}


def of_opposites(w: Any, batch: Any) -> Any:
    """Summands overflow; the sum is small, and so is what it is multiplied by on one device."""
    x, y = batch["half"], batch["single"].sum(0)
    return [x.sum(0), x.mean(0), product(x), y * w, y / w, y * 1e20, y / 1e-20]


def opposite(value: float, dtype: Any) -> Any:
    return np.repeat([value, -value], 8)[:, None].repeat(3, 1).astype(dtype)


def of_the_batch(_: Any, batch: Any) -> Any:
    x, y = batch
    return {
        "extremes": [f(x, axis=a) for f in (jnp.max, jnp.min, jnp.argmax, jnp.argmin) for a in (0, 1, None)],
        "cumulative": [lax.cummax(x, 0), lax.cummin(x, 0)],
        "sums": [x.sum(0), x.mean(), x.var(0)],
        "sorted": [jnp.sort(x, 0), jnp.argsort(x, 0), jnp.median(x, 0), jnp.nanmax(x, 0)],
        "products": [x.T @ y, y.T @ x, y @ y.T, x.prod(0)],
        "choices": [jnp.any(jnp.isnan(x)), jnp.all(x > 0, 0), jnp.isfinite(x).sum(0)],
        "norms": [jnp.linalg.norm(x, jnp.inf, 0), jnp.linalg.norm(x)],
    }


def with_value(value: float, rows: int) -> Any:
    """In the first example, one in the middle, and the last: of which padding is a copy."""
    x, y = RNG.normal(size=(rows, 3)), RNG.normal(size=(rows, 2))
    x[0, 0] = x[rows // 2, 1] = x[-1, 2] = value
    y[-1] = value, 0
    return x, y


def extremes(_: Any, xs: Any) -> Any:
    """No extremes of complex numbers in JAX's gradients of norms either: the derivative of one."""
    of_one = lambda x: [x.max(0), x.min(0), x.max(), x.argmax(0), jnp.any(x, 0), jnp.all(x, 0)]
    return list(map(of_one, xs)), jax.grad(lambda x: jnp.abs(x + 1j * x**2).max())(xs[-1])


def by_zero(w: Any, x: Any) -> Any:
    """Less is sent of what is added up after the division, of summands of both signs; the sum is below zero."""
    return jnp.exp((x.sum(0) / w[0, 0]).sum()), jnp.exp((x.sum(0) / w[0]) @ jnp.ones(6))


NARROW = (np.int8, np.uint32, np.int64, np.float16, jnp.bfloat16, np.float32, np.float64)


def empty(w: Any, x: Any) -> Any:
    return [x[:0].sum(0), x[:, :0].sum(1), x[:, :0] @ w[:0], (x[:, :0]).T @ x, x[:0], w[:0].sum(0) + x.sum(0)]


def alike(w: Any, x: Any) -> Any:
    """Dimensions of the batch's size that are not the batch, and the other way round."""
    return [x @ w, w @ x, x + w, x * w[0], (x @ w).T @ w, w[:, 0] * x[:, 0], x.T + w, x.T + x, w.sum(0) + x.sum(0),
            jnp.stack([x, x.T]), w[x.argmax(0)], jnp.where(w > 0, x, w)]  # fmt: skip


def counted(_: Any, xs: Any) -> Any:
    return [x * jnp.arange(len(x), dtype=x.dtype)[:, None] for x in xs]


def made_of_nothing(w: Any, x: Any) -> Any:
    n = x.shape[0]
    grid = jnp.arange(n)[:, None] * jnp.ones(6)
    return [
        grid * x, grid.T @ x, grid.sum() * x, (x * jnp.eye(n, 6)).sum(0), jnp.tri(n) @ x,
        jnp.full((n, 6), w[0, 0]) * x,
        jnp.zeros_like(x).at[3].set(x[0]), jnp.flip(jnp.arange(n)) * x[:, 0], jnp.arange(n).reshape(-1, 1) + x,
        jnp.arange(6 * n).reshape(n, 6) * x, jnp.arange(6 * n).reshape(6, n).T * x, jnp.ones((n, n)), jnp.arange(n),
        jnp.broadcast_to(w[0], (n, 6)) * x, jnp.squeeze(jnp.arange(n)[:, None, None]) * x[:, 1],
    ]  # fmt: skip


TABLE, COLUMN, NUMBER = np.arange(12.0).reshape(2, 6), jnp.asarray(X[:, 0]), np.float32(0.3)


def closed_over(w: Any, x: Any) -> Any:
    noise = jax.random.normal(jax.random.key(3), x.shape)
    return [x @ (w * TABLE[0]), x[:, 0] * COLUMN, noise * x, x * NUMBER, TABLE]


passes = lambda w, x: {name: f(w, x) for name, f in PASSES.items()}
on_integers = lambda _, xs: [{name: [f(total(x)), f(product(x))] for name, f in INTEGERS.items()} for x in xs]
on_halves = lambda _, x: {name: f(product(x)) for name, f in HALVES.items()}
TRAPS: dict[str, tuple[Callable[[Any, Any], Any], Any, Any, int]] = {
    **{f"what summands pass, {rows}": (passes, W, RNG.normal(size=(rows, 6)), devices) for devices, rows in WAYS},
    "integers wrap": (on_integers, 0.0, integers(5, "uint8", "int32"), 4),
    "integers wrap, evenly": (on_integers, 0.0, integers(16, "int8", "uint16"), 8),
    # Whatever follows: a loss scaler must take the same branch.
    "a sum that overflows 16 bits": (on_halves, 0.0, np.full((96, 3), 1000, np.float16), 8),
    "a summand that overflows": (of_opposites, jnp.full(3, 1e20, jnp.float32), {
        "half": opposite(30000, np.float16), "single": opposite(2.0**99, np.float32)  # adds up exactly
    }, 2),
    "a divisor of zero": (by_zero, 0 * abs(W), np.where(np.arange(16) < 2, 1.0, -1.0)[:, None].repeat(6, 1), 8),
    "NaN, devices without any example": (of_the_batch, 0.0, with_value(np.nan, 9), 8),
    "infinity": (of_the_batch, 0.0, with_value(np.inf, 5), 4),
    "minus infinity": (of_the_batch, 0.0, with_value(-np.inf, 8), 2),
    "one example": (of_the_batch, 0.0, with_value(1.0, 1), 8),
    "extremes": (extremes, 0.0, [RNG.integers(0, 2, (13, 4)) > 0, *(
        RNG.integers(0, 100, (13, 4)).astype(dtype) for dtype in NARROW
    )], 8),
    "empty arrays on the way": (empty, W, X, 4),
    "sizes that look alike": (alike, jnp.asarray(RNG.normal(size=(16, 16))), RNG.normal(size=(16, 16)), 8),
    "counting in small floats": (counted, 0.0, [np.ones((4101, 2), jnp.dtype(d)) for d in ("float16", "bfloat16")], 4),
    **{f"made of nothing, {rows}": (made_of_nothing, W, RNG.normal(size=(rows, 6)), devices) for devices, rows in WAYS},
    "closed over": (closed_over, W, X, 8),
}  # fmt: skip
"""Functions of state and a batch, these, and devices."""
