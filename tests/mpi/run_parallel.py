"""Steps on a mesh of several axes in one MPI job: `python run_parallel.py COMMUNICATOR EXPECTED.pickle FOLDER MESH…`.

A mesh is ``data=2,model=2:IDIOM=LEVEL+IDIOM=LEVEL``: JSON from the root, of how far each is from one device.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import meshes
import oracle

import jaxdist

ROWS, STEPS = 24, 2
X = np.random.default_rng(0).normal(size=(22, 5))


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=sys.argv[1])
    expected, folder = pickle.loads(Path(sys.argv[2]).read_bytes()), Path(sys.argv[3])
    gaps: dict[str, float] = {}

    for word in sys.argv[4:]:
        shape, _, names = word.partition(":")
        sizes = {name: int(size) for name, _, size in (one.partition("=") for one in shape.split(","))}
        for name, _, level in (one.partition("=") for one in names.split("+")):
            case = oracle.idiom(name, ROWS, int(level))
            given = None
            if "model" in sizes:
                given = meshes.layouts(case.step, (*case.state, case.batch(0)), name, sizes["model"])
            part, parts = ctx.part(sizes)
            got = oracle.run_decorated(
                case, part, parts, STEPS, ROWS, with_=jaxdist.parallel, mesh=sizes, layouts=given
            )
            gap = oracle.difference(expected[name], got)
            gaps[f"{shape} {name} {level}"] = max(ctx.control.exchange(name, gap))
        gaps[f"{shape} around it"] = max(ctx.control.exchange(shape, around(ctx, sizes, folder / shape)))
    if ctx.is_root:
        print("REPORT " + json.dumps({"communicator": ctx.communicator, "size": ctx.size, "gaps": gaps}), flush=True)


def step(tx: Any) -> Any:
    def step(params: Any, opt: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            rows = (jnp.tanh(batch @ p["in"]) @ p["out"]) ** 2
            return rows.mean(), rows.sum(1)

        (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value, rows

    return step


def around(ctx: Any, sizes: dict[str, int], folder: Path) -> float:
    """How far a loader's batches, a checkpoint, `disable_jit`, and arrays on the mesh are from one device."""
    rng = np.random.default_rng(1)
    params = {"in": rng.normal(size=(5, 7)), "out": rng.normal(size=(7, 3))}
    tx, parts = optax.adam(1e-2), ctx.part(sizes)[1]
    want = params, tx.init(params)
    plain = jax.jit(step(tx))
    got = want
    decorated = jaxdist.parallel(
        step(jaxdist.zero(tx, level=3)), mesh=sizes, layouts={"in": 1, "out": 0}, check_every=2
    )
    gaps = []
    for on_devices in (False, True):
        batches = jaxdist.loader(X, 8 // parts, shuffle=False, tail="keep", mesh=sizes, on_devices=on_devices)
        for k, batch in enumerate(batches):
            rows = X[8 * k : 8 * k + 8]
            *want, _, one = plain(*want, rows)  # type: ignore[assignment]
            *got, _, per_example = decorated(*got, batch)  # type: ignore[assignment]
            gaps.append(oracle.difference(one, jaxdist.unshard(per_example)))
    gaps.append(oracle.difference(want, jaxdist.unshard(tuple(got))))
    jaxdist.check_sync(got)

    jaxdist.save(folder, tuple(got), 1)
    flat = params, tx.init(params)
    read = [jaxdist.restore(folder, like) for like in (flat, tuple(got))]
    gaps += [oracle.difference(want, jaxdist.unshard(one)) for one in read]
    part = ctx.part(sizes)[0]
    own = X[:8].reshape(parts, -1, 5)[part]
    *later, _, _ = plain(*want, X[:8])
    with jax.disable_jit():
        *out, _, _ = decorated(*jaxdist.restore(folder, tuple(got)), own)
    gaps.append(oracle.difference(later, jaxdist.unshard(tuple(out))))
    # The weights of a tail: each example once, though several ranks have it.
    with_weights = jaxdist.loader(X, 8 // parts, shuffle=False, tail="pad", mesh=sizes)
    seen = [jaxdist.gather_for_metrics(batch, weight, sizes) for batch, weight in with_weights]
    gaps.append(oracle.difference(X, np.concatenate(seen)))
    return max(gaps)


if __name__ == "__main__":
    main()
