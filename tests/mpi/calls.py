"""Steps as they are called elsewhere, on several ranks: each returns what one device does for the whole batch."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import run_docs

import jaxdist
from jaxdist.agreement.turns import Turns

ctx = jaxdist.get_context()
ROWS = 6


def everyones(make: Any) -> list[Any]:
    """What each rank makes, by its number."""
    return [make(np.random.default_rng(rank)) for rank in range(ctx.size)]


def whole(parts: list[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def alike(name: str, mine: Any, expected: Any) -> None:
    mine, expected = jax.tree.map(np.asarray, (jaxdist.unshard(mine), expected))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(expected), strict=True):
        tolerance = 1e-5 if b.dtype == np.float32 else 1e-10  # nnx.metrics has float32 alone
        np.testing.assert_allclose(a, b, tolerance, tolerance / 100, err_msg=name)


def refused(name: str, call: Any, words: str) -> None:
    said = ""
    try:
        call()
    except (ValueError, TypeError, FloatingPointError, RuntimeError) as error:
        said = str(error)
    assert words in said, (name, said)


X = everyones(lambda rng: rng.normal(size=(ROWS, 3)))
Y = everyones(lambda rng: rng.normal(size=ROWS))
Z = everyones(lambda rng: rng.normal(size=(ROWS // 2, 3)))
W = jnp.asarray([1.0, -2.0, 0.5])


def loss_of(w: Any, x: Any, y: Any = 0.0) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def check(name: str, step: Any, parts: list[Any], *, state: tuple[Any, ...] = (W,), **settings: Any) -> None:
    """`parts`: for each argument of the batch those of all ranks."""
    decorated = jaxdist.data_parallel(step, donate=False, **settings)
    alike(name, decorated(*state, *(p[ctx.rank] for p in parts)), jax.jit(step)(*state, *map(whole, parts)))


def arguments() -> None:
    check("state, x, y", lambda w, x, y: w - jax.grad(loss_of)(w, x, y), [X, Y])
    check("eval", loss_of, [X, Y])
    check("other sizes", lambda w, x, z: w - jax.grad(lambda w: loss_of(w, x) + loss_of(w, z))(w), [X, Z])
    mask = [np.ones(ROWS)] * ctx.size
    check("a mask of ones", lambda w, x, mask: jnp.sum((x @ w) ** 2 * mask) / mask.sum(), [X, mask])
    check("metrics", lambda a, b: jnp.sum((a - b) ** 2), [Y, [y * 2 for y in Y]], state=())
    step = jaxdist.data_parallel(lambda w, *, x, lr=0.1: w - lr * jax.grad(loss_of)(w, x), donate=False)
    alike("keywords", step(W, lr=0.5, x=X[ctx.rank]), W - 0.5 * jax.grad(loss_of)(W, whole(X)))
    power = jaxdist.data_parallel(lambda w, x, n: jnp.mean((x @ w) ** n), static_argnames="n", donate=False)
    alike("static", [power(W, X[ctx.rank], n) for n in (2, 4)], [jnp.mean((whole(X) @ W) ** n) for n in (2, 4)])
    centred = jax.vmap(lambda x: x - jax.lax.pmean(x, "rows") * jax.lax.pmax(x, "rows"), axis_name="rows")
    alike("axes of vmap", jaxdist.data_parallel(lambda w, x: (centred(x) @ w).mean(), donate=False)(W, X[ctx.rank]),
          (centred(whole(X)) @ W).mean())  # fmt: skip
    own = jnp.asarray(np.random.default_rng(ctx.rank).normal(size=3))  # the root's seed is 0
    first = jnp.asarray(np.random.default_rng(0).normal(size=3))
    step = jaxdist.data_parallel(lambda w, x: w - jax.grad(loss_of)(w, x), donate=False)
    alike("weights of an own seed", step(own, X[ctx.rank]), first - jax.grad(loss_of)(first, whole(X)))
    read = jaxdist.data_parallel(loss_of, donate=False)
    refused(
        "read-only weights of an own seed", lambda: read(own, X[ctx.rank]), "w is not the same on rank 0 and rank 1"
    )
    queue = jnp.ones((5, 3))
    enqueue = jaxdist.data_parallel(lambda w, queue, x: (loss_of(w, x), queue.sum()), donate=False)
    alike("a queue", enqueue(W, queue, X[ctx.rank]), (loss_of(W, whole(X)), queue.sum()))
    later = jnp.full((5, 3), float(ctx.rank))
    refused(
        "a static value of each rank", lambda: power(W, X[ctx.rank], 2 + 2 * (ctx.rank == 1)), "constant n is int 2 on"
    )
    within = jax.grad(lambda w: jaxdist.data_parallel(loss_of)(w, X[ctx.rank]))
    refused("the gradient of a step", lambda: within(W), "inside a decorated function")
    key = jax.random.key(3)
    noisy = lambda x: (x + jax.random.normal(key, x.shape)).sum()
    alike("a key that the step closes over", jaxdist.data_parallel(noisy)(X[ctx.rank]), noisy(whole(X)))
    drawn = jaxdist.data_parallel(lambda key, x: x + jax.random.normal(key, x.shape))
    refused("a key of each rank", lambda: drawn(jax.random.key(ctx.rank), X[ctx.rank]), "Use one key on all ranks")
    refused("a queue that differs later", lambda: enqueue(W, later, X[ctx.rank]), "queue is not the same on rank 0")
    only = jaxdist.data_parallel(lambda x: x - 0.1 * x.mean(0), donate=False)
    refused("one argument", lambda: only(X[ctx.rank]), "batch_argnums='x'")
    alike("one argument, said", jaxdist.data_parallel(lambda x: x - 0.1 * x.mean(0), batch_argnums="x")(X[ctx.rank]),
          whole(X) - 0.1 * whole(X).mean(0))  # fmt: skip


def state_of_its_own_later() -> None:
    """State that a rank comes with in a later call is the root's, as in the first one; and it is said."""
    said: list[str] = []
    listen = logging.Handler()
    listen.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jaxdist").addHandler(listen)
    step = jaxdist.data_parallel(lambda w, lr, x: (w - lr * jax.grad(loss_of)(w, x), 0.9 * lr), donate=False)
    for lr in (0.1, 0.1, 0.1 + ctx.rank):
        w, after = step(W, np.float64(lr), X[ctx.rank])
        alike("state of a rank's own", (w, after), (W - 0.1 * jax.grad(loss_of)(W, whole(X)), 0.09))
    logging.getLogger("jaxdist").removeHandler(listen)
    told = [text for text in said if "state leaf lr is not the same on rank 0 and rank 1" in text]
    assert len(told) == ctx.is_root, said


def graph(rng: Any) -> dict[str, Any]:
    """A part of a batch of graphs: its edges count from its own first node."""
    ends = rng.integers(0, ROWS, (2, 2 * ROWS))
    return {"nodes": rng.normal(size=(ROWS, 3)), "from": ends[0], "to": ends[1], "y": rng.normal(size=2)}


def messages(w: Any, g: Any) -> Any:
    sent = jax.ops.segment_sum(jnp.tanh(g["nodes"] @ w)[g["from"]], g["to"], num_segments=g["nodes"].shape[0])
    return jnp.mean(sent**2) + g["y"].mean()


def leaves() -> None:
    """What of a batch is cut: arrays, each along its own length; what has no entry an example is one for all."""
    keys = [jax.random.split(jax.random.key(rank), ROWS) for rank in range(ctx.size)]
    all_keys = jnp.concatenate(keys)
    noise = lambda keys: jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
    one, mine, everyone = jax.random.key(3), {"x": X[ctx.rank]}, {"x": whole(X)}
    classes, table = {"y": np.arange(ROWS) % 4 + ctx.rank}, np.linspace(0.0, 1.0, 4 + ctx.size)
    all_classes = {"y": np.concatenate([np.arange(ROWS) % 4 + rank for rank in range(ctx.size)])}
    scaled = lambda w, b: w - b["s"] * jax.grad(loss_of)(w, b["x"])

    def run(name: str, f: Any, part: Any, all_of: Any, **settings: Any) -> None:
        step = jaxdist.data_parallel(f, donate=False, **settings)
        for _ in range(2):
            alike(name, step(W, part), jax.jit(f)(W, all_of))

    declared: list[dict[str, Any]] = [{}, {"batch_argnums": "b"}]
    for said in declared:
        for s in (2.0, np.float32(2), jnp.asarray(2.0), 2):
            run(f"a batch with {s!r} {said}", scaled, mine | {"s": s}, everyone | {"s": s}, **said)
        f = lambda w, b: loss_of(w, b["x"] + jax.random.normal(b["k"], b["x"].shape))
        run(f"a batch with a key {said}", f, mine | {"k": one}, everyone | {"k": one}, **said)
        old = jax.random.PRNGKey(3)
        run(f"a batch with an old key {said}", f, mine | {"k": old}, everyone | {"k": old}, **said)
        f = lambda w, b: loss_of(w, b["x"] + noise(b["k"]))
        run(f"a batch with keys {said}", f, mine | {"k": keys[ctx.rank]}, everyone | {"k": all_keys}, **said)
        raw = [np.asarray(jax.random.split(jax.random.PRNGKey(rank), ROWS)) for rank in range(ctx.size)]
        own, all_raw = mine | {"k": raw[ctx.rank]}, everyone | {"k": np.concatenate(raw)}
        run(f"a batch with old keys {said}", f, own, all_raw, **said)
        call = functools.partial(jaxdist.data_parallel(scaled, donate=False, **said), W, mine | {"s": 1.0 + ctx.rank})
        refused(f"a number of each rank {said}", call, "b['s'] is not the same")
        refused(f"a number of each rank, what to do {said}", call, "no entry an example, so it is one for all")
        f = lambda w, b: loss_of(w, b["x"]) * (1.0 if b["kind"] is None else 2.0)
        run(f"a batch with None {said}", f, mine | {"kind": None}, everyone | {"kind": None}, **said)
    f = lambda w, x, k: loss_of(w, x + noise(k))
    step = jaxdist.data_parallel(f, donate=False)
    alike("keys as an argument", step(W, X[ctx.rank], keys[ctx.rank]), f(W, whole(X), all_keys))
    text = lambda w, b: loss_of(w, b["x"]) if b["kind"] == "mean" else 0.0
    alike("a text", jaxdist.data_parallel(text, donate=False)(W, mine | {"kind": "mean"}), loss_of(W, whole(X)))

    # An array that is one for all examples, and one that happens to be the same on all ranks.
    weighted = lambda w, b: jnp.mean(b["x"] @ w * b["t"][b["y"]])
    full, all_full = mine | classes | {"t": table}, everyone | all_classes | {"t": table}
    step = jaxdist.data_parallel(weighted, donate=False, batch_argnums="b")
    refused("a table", lambda: step(W, full), "b['t'] (")
    words = """batch_argnums=("b['x']", "b['y']"): it is one for all"""
    refused("a table, what to write", lambda: step(W, full), words)
    run("a table, said", weighted, full, all_full, batch_argnums=("b['x']", "b['y']"))
    masked = lambda w, b: jnp.sum((b["x"] @ w) ** 2 * b["mask"]) / b["mask"].sum()
    ones, all_ones = {"mask": np.ones(ROWS)}, {"mask": np.ones(ROWS * ctx.size)}
    for said in declared:
        run(f"a mask of ones {said}", masked, mine | ones, everyone | all_ones, **said)
        counted = lambda w, b: loss_of(w, b["x"]) / b["mask"].sum()
        run(f"a count of ones {said}", counted, mine | ones, everyone | all_ones, **said)
        unused = {"id": np.zeros(ROWS, int)}
        run(f"an unused leaf {said}", lambda w, b: loss_of(w, b["x"]), mine | unused, everyone, **said)

    # Graphs: arrays of several lengths are the batch where it is said, and positions are the user's.
    part, parts = graph(np.random.default_rng(ctx.rank)), everyones(graph)
    call = functools.partial(jaxdist.data_parallel(messages, donate=False), W, part)
    refused("a graph, unsaid", call, "name its argument in batch_argnums")
    refused("a graph, and what its edges need", call, "edges + rank * nodes")
    moved = [g | {"from": g["from"] + rank * ROWS, "to": g["to"] + rank * ROWS} for rank, g in enumerate(parts)]
    run("a graph", messages, moved[ctx.rank], whole(moved), batch_argnums="g")


def graphs_of_the_page() -> None:
    """The example in docs/data.md: each rank has graphs with padding, and offsets their edges."""
    page = Path(__file__).parents[2] / "docs" / "data.md"
    (code,) = [b.code for b in run_docs.blocks(page.read_text()) if "def graph_step" in b.code]
    space: dict[str, Any] = {"ctx": ctx, "np": np, "jax": jax, "jnp": jnp, "jaxdist": jaxdist}
    exec(compile(code, str(page), "exec"), space)
    everyone = ctx.control.exchange("the graphs of all", space["part"])
    # One rank after the other, without padding: what a reader means. Places are those of all ranks' nodes.
    total, count = 0.0, 0
    for rank, part in enumerate(everyone):
        first, graphs = rank * len(part["nodes"]), rank * len(part["label"])
        h = np.tanh(part["nodes"] @ np.ones(3))
        sums = h.copy()
        np.add.at(sums, part["receivers"][:30] - first, h[part["senders"][:30] - first])
        for k, label in enumerate(part["label"][:3]):
            total, count = total + (sums[part["graph"] - graphs == k].sum() - label) ** 2, count + 1
    np.testing.assert_allclose(float(space["loss"]), total / count, rtol=1e-5)


def forgotten_split() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jaxdist").addHandler(handler)
    step = jaxdist.data_parallel(lambda w, x: w - jax.grad(loss_of)(w, x), donate=False)
    step(W, X[0])
    if ctx.is_root:
        assert any("pass the same batch" in text for text in said), said


def modules(level: Any) -> None:
    def train(decorate: Any, tx: Any, batches: list[Any]) -> Any:
        model = nnx.Sequential(
            nnx.Linear(3, 4, rngs=nnx.Rngs(0), param_dtype=jnp.float64, use_bias=False),
            nnx.BatchNorm(4, rngs=nnx.Rngs(1), param_dtype=jnp.float64),
            nnx.Dropout(0.5, rngs=nnx.Rngs(2)),
            nnx.Linear(4, 1, rngs=nnx.Rngs(3), param_dtype=jnp.float64),
        )
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

        @decorate
        def step(model: Any, optimizer: Any, metrics: Any, x: Any, y: Any) -> Any:
            loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x)[:, 0] - y) ** 2))(model)
            optimizer.update(model, grads)
            metrics.update(loss=loss)
            return loss

        losses = [step(model, optimizer, metrics, *batch) for batch in batches]
        return losses, nnx.state(model), metrics.compute(), optimizer.step.get_value()

    mine = [(X[ctx.rank] * k, Y[ctx.rank]) for k in (1.0, 2.0, 3.0)]
    all_of = [(whole(X) * k, whole(Y)) for k in (1.0, 2.0, 3.0)]
    tx = optax.adam(0.1)
    sharded = jaxdist.zero(tx, level) if level else tx
    expected = jax.tree.leaves(train(nnx.jit, tx, all_of))
    found = jax.tree.leaves(jax.tree.map(lambda x: x, train(jaxdist.data_parallel, sharded, mine)))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in expected]
    data = [[jax.random.key_data(x) if k else x for x, k in zip(xs, keys, strict=True)] for xs in (found, expected)]
    alike(f"nnx, level {level}", *data)


def keys_of_their_own() -> None:
    """A key in the state, and one for each example in the batch: the same with jit, without it, and on the mesh."""

    def noisy(w: Any, key: Any, batch: Any) -> Any:
        key, own = jax.random.split(key)
        noise = jax.vmap(lambda k: jax.random.normal(k, (3,)))(batch["k"]) + jax.random.normal(own, batch["x"].shape)
        return w - jnp.mean(batch["x"] + noise, 0), key, batch["k"]

    keys = jax.random.split(jax.random.key(1), ROWS * ctx.size)
    mine = {"x": X[ctx.rank], "k": keys[ROWS * ctx.rank : ROWS * (ctx.rank + 1)]}
    step = jaxdist.data_parallel(noisy, donate=False)
    expected = noisy(W, jax.random.key(0), {"x": whole(X), "k": keys})
    data = lambda out: [out[0], jax.random.key_data(jaxdist.unshard(out[1]))]
    alike("keys", data(on_mesh := step(W, jax.random.key(0), mine)), data(expected))
    with jax.disable_jit():
        alike("keys without jit", data(step(W, jax.random.key(0), mine)), data(expected))
        again = step(on_mesh[0], on_mesh[1], mine)
    alike("keys on the mesh", data(again), data(noisy(expected[0], expected[1], {"x": whole(X), "k": keys})))


def debugging() -> None:
    step = jaxdist.data_parallel(lambda w, x, y: (w - jax.grad(loss_of)(w, x, y), loss_of(w, x, y)), donate=False)
    expected = W - jax.grad(loss_of)(W, whole(X), whole(Y)), loss_of(W, whole(X), whole(Y))
    with jax.disable_jit():
        alike("disable_jit", step(W, X[ctx.rank], Y[ctx.rank]), expected)
    bad = X[ctx.rank] * (np.nan if ctx.rank == 1 else 1.0)
    with jax.debug_nans(True):
        alike("debug_nans, none", step(W, X[ctx.rank], Y[ctx.rank]), expected)
        refused("debug_nans", lambda: step(W, bad, Y[ctx.rank]), "nan")
    alike("after it", step(W, X[ctx.rank], Y[ctx.rank]), expected)


def threads_that_take_turns() -> None:
    """And collectives between their calls."""
    descend = lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
    step = jaxdist.data_parallel(descend)
    batches = np.random.default_rng(0).normal(size=(30, 12, 300))
    ws = [jnp.full(300, 0.01), jnp.full(300, -0.01)]
    want, turns = list(ws), [threading.Semaphore(1), threading.Semaphore(0)]
    for x in batches:
        want = [descend(w, x) for w in want]

    def train(k: int) -> None:
        for i, x in enumerate(batches):
            turns[k].acquire()
            ws[k] = step(ws[k], x[ctx.rank :: ctx.size])
            if i % 7 == 3:
                jaxdist.allreduce(np.ones(3))
            turns[1 - k].release()

    waited_for = ctx.only(Turns)
    jaxdist.data_parallel(descend, donate=False)(ws[0], batches[0][ctx.rank :: ctx.size])
    before = waited_for._output
    jaxdist.allreduce(np.ones(3))
    if ctx.communicator == "mpi":  # the collective is done, and that step may not be
        assert before is not None
        assert waited_for._output is before
    threads = [threading.Thread(target=train, args=(k,)) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jaxdist.check_sync(ws)
    alike("threads", ws, want)


def an_average_in_shards() -> None:
    def step(p: Any, e: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - 1) ** 2))(p)
        p = jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)
        return p, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, e, p), loss

    x = np.random.default_rng(0).normal(size=(24, 5))
    p: Any = {"in": jnp.ones((5, 7)), "out": jnp.ones(7)}
    want, average = p, p
    decorated, e = jaxdist.data_parallel(step), jaxdist.shard(jax.tree.map(jnp.copy, p))
    rows = len(x) // ctx.size
    for _ in range(3):
        p, e, _ = decorated(p, e, x[ctx.rank * rows :][:rows])
        want, average, _ = step(want, average, x)
    alike("an average in shards", e, average)


def an_array_that_is_typed_as_a_number() -> None:
    """It travels as an array of NumPy, which has no such type."""
    step = jaxdist.data_parallel(lambda w, x: (w * 2 + x.sum() * 0, x.sum()))
    w = jnp.broadcast_to(jnp.asarray(1.0), (6,))
    assert w.weak_type
    for _ in range(2):
        w, _ = step(w, np.full((4, 2), ctx.rank, np.float32))
    assert float(w[0]) == 4.0
