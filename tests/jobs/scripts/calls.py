"""Steps as they are called elsewhere, on several ranks: each returns what one device does for the whole batch."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from harness.check import close
from harness.errors import raises
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.placements.emit import emitter  # private: a fault is put into what is emitted

ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size
ROWS = 6


def everyones(make: Any) -> list[Any]:
    """What each rank makes, by its number."""
    return [make(np.random.default_rng(rank)) for rank in range(N)]


def whole(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: jnp.concatenate(xs) if jnp.ndim(xs[0]) else xs[0], *parts)


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What jaxdist logs meanwhile on this rank."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxdist").addHandler(handler)
    yield said
    logging.getLogger("jaxdist").removeHandler(handler)


X = everyones(lambda rng: rng.normal(size=(ROWS, 3)))
Y = everyones(lambda rng: rng.normal(size=ROWS))
Z = everyones(lambda rng: rng.normal(size=(ROWS // 2, 3)))
W = jnp.asarray([1.0, -2.0, 0.5])
CLASSES = [np.arange(ROWS) % 4 + rank for rank in range(N)]
KEYS = [jax.random.split(jax.random.key(rank), ROWS) for rank in range(N)]
TABLE = np.linspace(0.0, 1.0, 4 + N)


def loss_of(w: Any, x: Any, y: Any = 0.0) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def descend(w: Any, x: Any, y: Any = 0.0) -> Any:
    return w - 0.1 * jax.grad(loss_of)(w, x, y)


def noise(keys: Any) -> Any:
    return jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)


def centred(x: Any) -> Any:
    return jax.vmap(lambda x: x - lax.pmean(x, "rows") * lax.pmax(x, "rows"), axis_name="rows")(x)


def weighted(w: Any, b: Any) -> Any:
    return jnp.mean(b["x"] @ w * b["t"][b["y"]])


def graph(rng: Any) -> dict[str, Any]:
    """A part of a batch of graphs: its edges count from its own first node."""
    ends = rng.integers(0, ROWS, (2, 2 * ROWS))
    return {"nodes": rng.normal(size=(ROWS, 3)), "from": ends[0], "to": ends[1], "y": rng.normal(size=2)}


def convolved(w: Any, g: Any) -> Any:
    sent = jax.ops.segment_sum(jnp.tanh(g["nodes"] @ w)[g["from"]], g["to"], num_segments=g["nodes"].shape[0])
    return jnp.mean(sent**2) + g["y"].mean()


GRAPHS = everyones(graph)
MOVED = [g | {"from": g["from"] + rank * ROWS, "to": g["to"] + rank * ROWS} for rank, g in enumerate(GRAPHS)]


class Row(NamedTuple):
    """A step, of each argument of its batch what every rank passes, and what comes before."""

    step: Callable[..., Any]
    parts: list[list[Any]]
    state: tuple[Any, ...] = (W,)
    settings: dict[str, Any] = {}  # noqa: RUF012


def beside_x(**more: Any) -> list[list[Any]]:
    """A batch that is a dictionary: x, and of each other leaf what every rank has (or all)."""
    return [[{"x": X[k], **{n: v[k] if isinstance(v, list) else v for n, v in more.items()}} for k in range(N)]]


SAID: dict[str, Any] = {"batch_argnums": "b"}
STEPS: dict[str, Row] = {
    "two arguments": Row(descend, [X, Y]),
    "states as long as a part": Row(
        lambda p, o, x, y: (jax.tree.map(lambda p, o: p - o * loss_of(W, x, y), p, o), o, x.sum()),
        [X, Y], ({"a": jnp.ones(ROWS), "b": jnp.ones(ROWS)}, {"a": jnp.ones(ROWS), "b": jnp.zeros(ROWS)})),
    "parameters as long as a part": Row(
        lambda w, x, y: loss_of(w.reshape(2, 3).sum(0), x, y), [X, Y], (jnp.arange(6.0),)),
    "other sizes": Row(lambda w, x, z: w - jax.grad(lambda w: loss_of(w, x) + loss_of(w, z))(w), [X, Z], (W,),
        {"batch_argnums": ("x", "z")}),
    "only a batch, said": Row(lambda x: x - 0.1 * x.mean(0), [X], (), {"batch_argnums": "x"}),
    "axes of vmap": Row(lambda w, x: (centred(x) @ w).mean(), [X]),
    "a queue": Row(lambda w, queue, x: (loss_of(w, x), queue.sum()), [X], (W, jnp.ones((5, 3)))),
    "a key in the state": Row(
        lambda w, key, x: (w - jnp.mean(x + jax.random.normal(key, x.shape), 0), jax.random.fold_in(key, 1)),
        [X], (W, jax.random.key(1))),
    "keys in a batch": Row(lambda w, b: loss_of(w, b["x"] + noise(b["k"])), beside_x(k=KEYS)),
    "a key in a batch": Row(
        lambda w, b: loss_of(w, b["x"] + jax.random.normal(b["k"], b["x"].shape)), beside_x(k=jax.random.key(3))),
    "a number in a batch": Row(lambda w, b: w - b["s"] * jax.grad(loss_of)(w, b["x"]), beside_x(s=2.0)),
    "a count": Row(lambda w, b: loss_of(w, b["x"]) / b["mask"].sum(), beside_x(mask=[np.ones(ROWS)] * N), (W,), SAID),
    "an unused leaf": Row(lambda w, b: loss_of(w, b["x"]), beside_x(id=[np.zeros(ROWS, int)] * N)),
    "a table, said": Row(
        weighted, beside_x(y=CLASSES, t=TABLE), (W,), {"batch_argnums": ("b['x']", "b['y']")}),
    "a graph, said": Row(convolved, [MOVED], (W,), {"batch_argnums": "g"}),
    "each device's own code": Row(
        lambda w, x: w * jaxdist.per_device(lambda x: lax.pmax(x.sum(), "data"), P("data"), P())(x), [X], (W,),
        {"batch_argnums": "x"}),
}  # fmt: skip


def steps(turn: int = 0, of: int = 1) -> None:
    """Every so many of them, twice each."""
    for name, row in list(STEPS.items())[turn::of]:
        if name == "each device's own code":
            want: Any = W * max(x.sum() for x in X)
        else:
            want = jax.jit(row.step)(*row.state, *map(whole, row.parts))
        decorated = jaxdist.data_parallel(row.step, **row.settings)
        for _ in range(2):
            close(data(decorated(*row.state, *(part[R] for part in row.parts))), data(want))
    step = jaxdist.data_parallel(lambda w, *, x, lr=0.1: w - lr * jax.grad(loss_of)(w, x))
    close(step(W, lr=0.5, x=X[R]), W - 0.5 * jax.grad(loss_of)(W, whole(X)))
    power = jaxdist.data_parallel(lambda w, x, n: jnp.mean((x @ w) ** n), static_argnames="n")
    close([power(W, X[R], n) for n in (2, 4)], [jnp.mean((whole(X) @ W) ** n) for n in (2, 4)])
    made = jaxdist.data_parallel(lambda w, x: x @ w, batch_argnums="x")(W, X[R])  # of all ranks, beside a rank's part
    step = jaxdist.data_parallel(lambda w, x, y: loss_of(w[:3], x, y) * w.sum())
    close(step(np.ones(ROWS + 1), X[R], made), loss_of(np.ones(3), whole(X), whole(X) @ W) * (ROWS + 1))
    weak = jnp.broadcast_to(jnp.asarray(1.0), (6,))
    step = jaxdist.data_parallel(lambda w, x: (w * 2 + x.sum() * 0, x.sum()))
    close(step(step(weak, X[R])[0], X[R])[0], np.full(6, 4.0))


def data(tree: Any) -> Any:
    """With keys as their bits."""
    key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if key(x) else x, jaxdist.unshard(tree))


def refused() -> None:
    """On every rank, and the job goes on."""
    own, later = W + R, jnp.full((5, 3), float(R))
    over: Callable[..., Any] = lambda f, **settings: jaxdist.data_parallel(f, **settings)
    power = over(lambda w, x, n: jnp.mean((x @ w) ** n), static_argnames="n")
    drawn = over(lambda key, x: x + jax.random.normal(key, x.shape))
    enqueue = over(lambda w, queue, x: (loss_of(w, x), queue.sum()))
    enqueue(W, jnp.ones((5, 3)), X[R])
    scaled = over(lambda w, b: w - b["s"] * jax.grad(loss_of)(w, b["x"]))
    with_table = {"x": X[R], "y": CLASSES[R], "t": TABLE}
    donated = jaxdist.data_parallel(lambda w, x: (descend(w, x), loss_of(w, x)), donate_argnums=0)
    gone, _ = donated(W, X[R])
    donated(gone, X[R])
    nan = X[R] * (np.nan if R == 1 else 1.0)
    rows: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
        (lambda: over(loss_of)(own, X[R]), ValueError, ("w", "rank 0", "rank 1", "batch_argnums")),
        (lambda: enqueue(W, later, X[R]), ValueError, ("queue", "rank 0", "rank 1")),
        (lambda: power(W, X[R], 2 + 2 * (R == 1)), ValueError, ("n", "rank 0", "rank 1")),
        (lambda: drawn(jax.random.key(R), X[R]), ValueError, ("key", "rank 0", "rank 1")),
        (lambda: scaled(W, {"x": X[R], "s": 1.0 + R}), ValueError, ("b['s']", "rank 0", "rank 1")),
        (lambda: over(weighted, batch_argnums="b")(W, with_table), ValueError, ("b['t']", "batch_argnums")),
        (lambda: over(convolved)(W, GRAPHS[R]), ValueError, ("batch_argnums",)),
        (lambda: over(lambda x: x - 0.1 * x.mean(0))(X[0]), ValueError, ("x", "batch_argnums")),
        (lambda: over(lambda w, x: w - x.mean(0))(own, X[R]), ValueError, ("w", "rank 0", "rank 1", "batch_argnums")),
        (lambda: over(loss_of)(own, X[0]), ValueError, ("batch_argnums='w'", "batch_argnums='x'")),
        (lambda: over(lambda w, x: loss_of(w[:3], x))(jnp.ones(ROWS), X[R]), ValueError, ("w", "batch_argnums")),
        (lambda: jax.grad(lambda w: over(loss_of)(w, X[R]))(W), RuntimeError, ("loss_of",)),
        (lambda: jax.jit(lambda w: over(loss_of)(w, X[R]))(W), RuntimeError, (f"{N} processes",)),
        (lambda: over(loss_of, check_finite=True)(W, nan), FloatingPointError, ("loss_of",)),
        (lambda: donated(gone, X[R]), RuntimeError, ("w ", "call 2")),
        (lambda: donated(gone if R == 1 else W, X[R]), ValueError, ("w ", "call 2")),
    ]
    usual, right = over(loss_of), loss_of(W, whole(X))
    for call, kind, tokens in rows:
        with raises((kind, RuntimeError), *tokens):
            call()
        close(usual(W, X[R]), right)
    weighs = over(lambda w, c, x, y: loss_of(w, x, y) * c.sum())
    weighs(W, TABLE[:ROWS], X[0], Y[0])  # the same on all ranks tells nothing of the second argument
    with raises(ValueError, "c", "batch_argnums"):
        weighs(W, TABLE[:ROWS], X[R], Y[R])
    one = np.asarray([2.0])
    with raises(ValueError, "s", "batch_argnums"):
        over(lambda s, x: x.mean() * s.sum())(one, X[R][:1])
    again = over(loss_of)
    for _ in range(2):  # an error that was caught is no answer
        with raises(ValueError, "batch_argnums='w'"):
            again(own, X[0])
    with jax.debug_nans(True), raises(FloatingPointError, "loss_of", "NaN"):
        over(loss_of)(W, nan)


def said() -> None:
    """What is no error and may be a mistake, once, on the root; and what that means."""
    params: Any = {"w": jnp.asarray(np.random.default_rng(R).normal(size=(3, 4))), "b": jnp.ones(4) * R}
    first: Any = {"w": np.random.default_rng(0).normal(size=(3, 4)), "b": jnp.zeros(4)}
    loss = lambda p, x: jnp.mean((x @ p["w"] + p["b"]) ** 2)
    step: Any = lambda p, x: jax.tree.map(lambda a, g: a - g, p, jax.grad(loss)(p, x))
    with messages() as heard:
        close(jaxdist.data_parallel(step)(params, X[R]), step(first, whole(X)))
        forgotten = jaxdist.data_parallel(step)
        close(forgotten(first, X[0]), step(first, X[0]))
        forgotten(first, X[0])
    rows = [("rank 0", "rank 1", "'b'"), (f"{N} ranks", "same batch")]
    for tokens in rows if ctx.is_root else []:
        assert sum(all(token in text for token in tokens) for text in heard) == 1, (tokens, heard)


def known() -> None:
    """A call that is known waits for nobody: it makes no exchange, in whatever pattern steps take turns."""
    train, evaluate, w = jaxdist.data_parallel(descend), jaxdist.data_parallel(loss_of), W

    def turn() -> None:
        nonlocal w
        for _ in range(3):
            w = train(w, X[R], Y[R])
        evaluate(w, X[R], Y[R])

    made = []
    for _ in range(10):
        before, _ = ctx.control.calls
        turn()
        made.append(ctx.control.calls[0] - before)
    # New calls, then calls 1, 2, 4, 8, ... of each step, which compare the bits of the state.
    compared = [sum(n & (n - 1) == 0 for n in (3 * k + 1, 3 * k + 2, 3 * k + 3, k + 1)) for k in range(10)]
    assert made[2:] == compared[2:], made


def stages() -> None:
    """What is compiled ahead is called by each rank with its own part, as the step is."""
    step = jaxdist.data_parallel(lambda w, x, y: (descend(w, x, y), loss_of(w, x, y)))
    compiled, w, plain = step.lower(W, X[R], Y[R]).compile(), W, W
    assert compiled.in_avals[0][1].shape == (N * ROWS, 3)
    for _ in range(3):
        w, loss = compiled(w, X[R], Y[R])
        expected, plain = loss_of(plain, whole(X), whole(Y)), descend(plain, whole(X), whole(Y))
        close((w, loss), (plain, expected))
    with raises(TypeError, "compiled", f"float64[{N * (ROWS - 3)},3]"):
        compiled(w, X[R][3:], Y[R][3:])


def verified() -> None:
    """On each rank: an equal program, and one that differs on the last rank alone."""
    labels = np.arange(ROWS) + 7 * R

    def step(state: Any, x: Any, label: Any) -> Any:
        key, w = state
        chosen = jnp.where(label[:, None] % 3 == 0, x, jnp.tanh(x)) @ w + jax.random.normal(key, (N * ROWS,))
        return (key, w - 0.1 * chosen.mean()), jnp.cumsum(chosen)

    state = jax.random.key(0), W
    found = jaxdist.verify(jaxdist.data_parallel(step, batch_argnums=("x", "label")), state, X[R], labels)
    assert found, found
    picked = jaxdist.data_parallel(lambda w, label: w - w[label % 3].mean(), batch_argnums="label")
    whole_labels = jaxdist.data_parallel(lambda w, label: label * 1, batch_argnums="label")(W, labels)  # on all ranks
    for label in (labels, whole_labels, jax.ShapeDtypeStruct((ROWS,), np.int64)):
        assert jaxdist.verify(picked, W, label)
    jaxdist.data_parallel(descend, batch_argnums="x", verify=True)(W, X[R])
    short = ROWS - (R == N - 1)  # as the ranks divide a batch that is one shorter, and none but the last can know
    assert jaxdist.verify(jaxdist.data_parallel(descend, batch_argnums="x"), W, X[R][:short])
    differs = jaxdist.data_parallel(lambda w, x: descend(w, x) * (1 + (R == N - 1)), batch_argnums="x")
    with raises(ValueError, "different programs", f"rank {N - 1}", "calls.py"):
        jaxdist.verify(differs, W, X[R])
    with raises(ValueError, "points", f"rank {N - 1}"):
        jaxdist.verify(jaxdist.data_parallel(descend, batch_argnums="x"), W, X[R], points=1 + (R == N - 1))
    counts, original = jaxdist.shard(np.arange(4 * ctx.num_devices)), emitter.Emitter._reduce
    faulty: list[tuple[Any, Any]] = [(descend, W), (lambda counts, x: (counts, counts.sum()), counts)]
    last = lambda x: x * jnp.where(lax.axis_index("data") == ctx.num_devices - 1, 2, 1).astype(x.dtype)
    emitter.Emitter._reduce = lambda self, i, x, summand: last(original(self, i, x, summand))
    try:
        for wrong, given in faulty:
            found = jaxdist.verify(jaxdist.data_parallel(wrong, batch_argnums="x"), given, X[R])
            assert (found.equal, len(found.results)) == (False, 1), found
    finally:
        emitter.Emitter._reduce = original
