"""`jaxdist.loader` on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.data.loader import gather_for_metrics


def run_tail(ctx, report):
    """A smaller last batch, of which ranks hold copies of the last example: as on one device."""
    rows = np.random.default_rng(2).normal(size=(8 * ctx.size + 2 * ctx.size - 1, 3))

    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.std(x @ w) + jnp.max(x @ w))(w)
        return w - 0.1 * grads, (loss, len(x))

    decorated, one, many, counts, gap = jaxdist.data_parallel(step), jnp.ones(3), jnp.ones(3), [], 0.0
    for i, batch in enumerate(jaxdist.loader(rows, 8, shuffle=False, tail="keep")):
        one, (loss, _) = step(one, rows[8 * ctx.size * i :][: 8 * ctx.size])
        many, (got, count) = decorated(many, batch)
        counts.append(int(count))
        gap = max(gap, abs(float(loss) - float(got)), float(np.abs(np.asarray(one) - np.asarray(many)).max()))
    report["tail"] = {"counts": counts, "gap": gap}


def run_epochs(ctx, report):
    """Steps, losses and evaluation counts on an odd number of examples."""
    n = 101 + ctx.size
    x = np.random.default_rng(0).normal(size=(n, 3))

    def each_loss(w, x):
        return (x @ w - 1) ** 2

    @jaxdist.data_parallel
    def train(w, batch):
        def loss_fn(w, batch):
            x, weight = batch
            return jnp.sum(each_loss(w, x) * weight) / jnp.sum(weight)

        loss, grads = jax.value_and_grad(loss_fn)(w, batch)
        return w - 0.1 * grads, loss

    @jaxdist.data_parallel(donate=False)
    def evaluate(w, batch):
        (ids, _), weight = batch
        return {"count": jnp.sum(weight > 0, dtype=jnp.int32), "ids": ids, "weight": weight}

    steps, gap = {}, 0.0
    for on_devices in (False, True):
        w, plain, taken = jnp.ones(3), jnp.ones(3), 0
        batches = jaxdist.loader(x, 8, tail="pad", on_devices=on_devices)
        whole = jaxdist.loader(x, 8 * ctx.size, tail="drop")._sampling  # the order of the whole
        for g, batch in enumerate(batches):
            w, _ = train(w, batch)
            places = np.arange(g * whole.batch_size, min(n, (g + 1) * whole.batch_size))
            rows = x[whole.order(0, places)]
            plain = plain - 0.1 * jax.grad(lambda w, x: each_loss(w, x).mean())(plain, rows)
            taken += 1
        gap = max(gap, float(np.abs(np.asarray(w.addressable_data(0)) - np.asarray(plain)).max()))
        steps[str(on_devices)] = taken
    report["steps"], report["gap"] = steps, gap
    report["dropped"] = sum(1 for _ in jaxdist.loader(x, 8))

    for length in (n, 1):
        count, ids = 0, []
        for batch in jaxdist.loader((np.arange(length), x[:length]), 4, tail="pad"):
            out = evaluate(jnp.ones(()), batch)
            count += int(out["count"])
            ids += gather_for_metrics(out["ids"], out["weight"]).tolist()
            assert gather_for_metrics(batch[0][0], batch[1]).tolist() == ids[-int(out["count"]) :]
        report[f"evaluated {length}"] = [count, sorted(ids) == list(range(length))]

    # Worker processes under a launcher.
    if ctx.size == 2:
        got = [batch.tolist() for batch in jaxdist.loader(list(range(n)), 8, workers=1, shuffle=False)]
        assert got[0] == list(range(ctx.rank * 8, ctx.rank * 8 + 8))
        assert len(got) == n // 16


def errors_of(batches, ctx):
    """What this rank is told; no rank hangs."""
    x = np.ones((24, 3))
    errors = []
    for source, size in [(x, 0 if ctx.is_root else 4), (x[ctx.rank :], 4), (x + ctx.rank, 4), (x[:0], 4), (x[:1], 4)]:
        try:
            jaxdist.loader(source, size)
        except ValueError as error:
            errors.append(str(error))
    try:
        batches.set_state({**batches.get_state(), "position": ctx.rank})
    except ValueError as error:
        errors.append(str(error))
    return errors


def main(path: str, everything: bool) -> dict[str, object]:
    """What this rank found.

    Args:
      path: of a file with what jobs of other sizes have handed out of one epoch, and where they stopped: this one goes
        on.
      everything: not only that.
    """
    ctx, report = jaxdist.get_context(), dict[str, object]()
    if everything:
        run_tail(ctx, report)
        run_epochs(ctx, report)
        report["errors"] = errors_of(jaxdist.loader(np.arange(100), 5, tail="pad", prefetch=3), ctx)

    # Some steps of an epoch that jobs of other sizes have begun.
    file = Path(path)
    saved = ctx.broadcast(json.loads(file.read_text()) if file.exists() else {"seen": []})
    batches = jaxdist.loader(np.arange(100), 5, tail="pad", prefetch=3)
    if "state" in saved:
        batches.set_state(saved["state"])
    steps = 3 if everything else 100
    for _, (batch, weight) in zip(range(steps), batches, strict=False):
        saved["seen"] += gather_for_metrics(batch, weight).tolist()
    states = ctx.control.exchange("states", batches.get_state())
    report["same states"] = all(s == states[0] for s in states)
    if ctx.is_root:
        file.write_text(json.dumps({"seen": saved["seen"], "state": states[0]}))
    return report
