"""Cases of test_choice: steps with ``mesh="auto"``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def chosen() -> dict[str, Any]:
    """Of some steps the mesh, and how far they are from one device."""
    ctx = jaxdist.get_context()
    report: dict[str, Any] = {}
    for name, (rows, *sizes) in {"small": (512, 16, 16), "wide": (ctx.size, 64, 4096)}.items():
        w, x = case(rows, *sizes)
        part, parts = ctx.part()
        step = jaxdist.parallel(mlp, mesh="auto")
        want, loss = jax.jit(mlp)(w, x)
        got, value = step(w, x[part * rows // parts :][: rows // parts])
        ends = (jaxdist.unshard(got), value), (want, loss)
        gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), *ends)
        report[name] = {"mesh": dict(step._mesh.shape), "gap": max(jax.tree.leaves(gaps)), "why": step.why}

    w, _ = case(1, 5, 4096)
    want = got = w
    step, plain = jaxdist.parallel(rows_too, mesh="auto"), jax.jit(rows_too)
    gaps = []
    for on_devices in (False, True):
        batches = jaxdist.loader(X, 4 // ctx.size, shuffle=False, tail="keep", on_devices=on_devices)
        for k, batch in enumerate(batches):
            want, one = plain(want, X[4 * k : 4 * k + 4])
            got, rows = step(got, batch)
            gap = np.abs(np.asarray(one) - np.asarray(jaxdist.unshard(rows))).max()
            gaps.append(gap / (1 + np.abs(one).max()))
    report["loader"] = {"mesh": dict(step._mesh.shape), "gap": float(max(gaps)), "calls": len(gaps)}

    def fails_on_one(w: Any, x: Any) -> Any:
        if ctx.rank == 1:
            raise ZeroDivisionError("on this rank")
        return mlp(w, x)

    w, x = case(8, 4, 8)
    if ctx.communicator == "xla":
        report["failed"] = said(lambda: jaxdist.parallel(fails_on_one, mesh="auto")(w, x))
    report["unlike"] = said(lambda: jaxdist.parallel(mlp, mesh="auto")(w, x[: 4 + 4 * (ctx.rank == 1)]))
    return report
