"""Steps with ``mesh="auto"`` in one MPI job, `python run_auto.py COMMUNICATOR`: JSON of what each rank found."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist


def mlp(w: Any, x: Any) -> Any:
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


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


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    report: dict[str, Any] = {"rank": ctx.rank, "communicator": ctx.communicator}
    for name, (rows, *sizes) in {"small": (512, 16, 16), "wide": (ctx.size, 64, 4096)}.items():
        w, x = case(rows, *sizes)
        part, parts = ctx.part()
        step = jaxdist.parallel(mlp, mesh="auto")
        want, loss = jax.jit(mlp)(w, x)
        got, value = step(w, x[part * rows // parts :][: rows // parts])
        ends = (jaxdist.unshard(got), value), (want, loss)
        gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), *ends)
        report[name] = {"mesh": dict(step._mesh.shape), "gap": max(jax.tree.leaves(gaps)), "why": step.why}

    def fails_on_one(w: Any, x: Any) -> Any:
        if ctx.rank == 1:
            raise ZeroDivisionError("on this rank")
        return mlp(w, x)

    w, x = case(8, 4, 8)
    if ctx.communicator == "xla":
        report["failed"] = said(lambda: jaxdist.parallel(fails_on_one, mesh="auto")(w, x))
    report["unlike"] = said(lambda: jaxdist.parallel(mlp, mesh="auto")(w, x[: 4 + 4 * (ctx.rank == 1)]))
    print("REPORT " + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
