"""Steps with ``mesh="auto"`` between processes: each passes rows of its own, and all choose the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import oracle

import jaxdist


def mlp(w: Any, x: Any) -> Any:
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


def rows_too(w: Any, x: Any) -> Any:
    return mlp(w, x)[0], (jnp.tanh(x @ w["up"]) @ w["down"]).sum(1)


X = np.random.default_rng(1).normal(size=(11, 5))


def case(rows: int, width: int, hidden: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    w = {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5) for name, shape in shapes.items()}
    return w, rng.normal(size=(rows, width))


def said(call: Any) -> str:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> dict[str, float]:
    """How far steps on a mesh that was chosen are from one device."""
    ctx = jaxdist.get_context()
    gaps: dict[str, float] = {}
    models = {"model": ctx.size} if ctx.communicator == "xla" else {"data": ctx.size}
    for name, (rows, *sizes), mesh in (
        ("small", (512, 16, 16), {"data": ctx.size}),
        ("wide", (ctx.size, 64, 4096), models),
    ):
        w, x = case(rows, *sizes)
        (part,), parts = ctx.parts()
        step = jaxdist.parallel(mlp, mesh="auto")
        got, value = step(w, x[part * rows // parts :][: rows // parts])
        gaps[name] = oracle.difference(jax.jit(mlp)(w, x), (jaxdist.unshard(got), value))
        assert dict(step._mesh.shape) == mesh, (name, step.why)
        assert len(set(ctx.control.exchange("why", str(step.why)))) == 1

    w, _ = case(1, 5, 4096)
    want = got = w
    step, plain, of_batches = jaxdist.parallel(rows_too, mesh="auto"), jax.jit(rows_too), []
    for on_devices in (False, True):
        batches = jaxdist.loader(X, 4 // ctx.size, shuffle=False, tail="keep", on_devices=on_devices)
        for k, batch in enumerate(batches):
            want, one = plain(want, X[4 * k : 4 * k + 4])
            got, rows = step(got, batch)
            of_batches.append(oracle.difference(one, jaxdist.unshard(rows)))
    gaps["loader"] = max(of_batches)
    assert len(of_batches) == 6, "two epochs, whose last batches are shorter"

    def fails_on_one(w: Any, x: Any) -> Any:
        if ctx.rank == 1:
            raise ZeroDivisionError("on this rank")
        return mlp(w, x)

    w, x = case(8, 4, 8)
    if ctx.communicator == "xla":
        assert "data" not in step._mesh.shape
        assert "on this rank" in said(lambda: jaxdist.parallel(fails_on_one, mesh="auto")(w, x))
    assert "ValueError" in said(lambda: jaxdist.parallel(mlp, mesh="auto")(w, x[: 4 + 4 * (ctx.rank == 1)]))
    return gaps
