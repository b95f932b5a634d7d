"""How far what several processes compute is from what one device does: cases of `oracle`, idioms, meshes, optimizers.

Each function returns the largest difference by name, as this rank has it. What one device computes comes in a file.
"""

import functools
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import optimizers
from harness import oracle
from harness.check import gap
from jax.sharding import Mesh

import jaxdist

ROWS, STEPS = 24, 2  # examples in a batch of the idioms, and batches
X = np.random.default_rng(0).normal(size=(22, 5))
ctx = jaxdist.get_context()
R, N = ctx.rank, ctx.size


@functools.cache
def expected(path: str) -> dict[str, Any]:
    return pickle.loads(Path(path).read_bytes())


def cases(path: str, names: list[str]) -> dict[str, float]:
    """Cases of `oracle`, some of them in shards, in parts of their tolerance."""
    found = {}
    for name in names:
        case = oracle.case(name, oracle.IN_SHARDS.get(name, 0))
        got = oracle.run_decorated(case)
        found[name] = 1e-10 * gap(expected(path)[name], got) / case.tolerance
    return found


def idioms(path: str, words: list[str], mesh: dict[str, int] | None = None) -> dict[str, float]:
    """Idioms, each ``NAME:LEVEL``, on a mesh of one axis or of several."""
    found = {}
    over: Any = {"with_": jaxdist.parallel, "mesh": mesh} if mesh else {}
    for word in words:
        name, _, level = word.partition(":")
        got = oracle.run_decorated(oracle.idiom(name, ROWS, int(level)), STEPS, ROWS, **over)
        found[word] = gap(expected(path)[name], got)
    return found


def optimizers_in_shards(path: str, names: list[str], shift: int, within: int | None) -> dict[str, float]:
    """Optimizers that one step trains, the first at level 1 + shift % 3 and so on."""
    levels = [1 + (shift + i) % 3 for i in range(len(names))]
    got = optimizers.run_sharded(names, levels, within=within, split="owners")
    want = expected(path)["optimizers"]
    found = {name: gap(want[name], got[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    if within:  # few examples beside large weights: values of the batch travel within groups and across
        got = oracle.run_decorated(oracle.case("few_examples", 3, within))
        found["few_examples"] = gap(expected(path)["few_examples"], got)
    return found


def step(tx: Any) -> Any:
    def step(params: Any, opt: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            rows = (jnp.tanh(batch @ p["in"]) @ p["out"]) ** 2
            return rows.mean(), rows.sum(1)

        (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value, rows

    return step


def around(folder: str, sizes: dict[str, int]) -> dict[str, float]:
    """How far a loader's batches, a checkpoint and arrays on the mesh are from one device."""
    rng = np.random.default_rng(1)
    params = {"in": rng.normal(size=(5, 7)), "out": rng.normal(size=(7, 3))}
    tx = optax.adam(1e-2)
    got = want = params, tx.init(params)
    plain = jax.jit(step(tx))
    layouts = {"in": 1, "out": 0}
    decorated = jaxdist.parallel(step(jaxdist.zero(tx, level=3)), mesh=sizes, layouts=layouts, check_every=2)
    gaps = []
    for k, batch in enumerate(jaxdist.loader(X, 8, shuffle=False, tail="keep", mesh=sizes)):
        *want, _, one = plain(*want, X[8 * k : 8 * k + 8])  # type: ignore[assignment]
        *got, _, per_example = decorated(*got, batch)  # type: ignore[assignment]
        gaps.append(gap(one, jaxdist.unshard(per_example)))
    gaps.append(gap(want, jaxdist.unshard(tuple(got))))
    jaxdist.check_sync(got)
    path = Path(folder, *map(str, sizes.items()))
    jaxdist.save(path, tuple(got), 1)
    flat = params, tx.init(params)
    gaps += [gap(want, jaxdist.unshard(jaxdist.restore(path, like))) for like in (flat, tuple(got))]
    # Each example once, though several ranks have it.
    same = jaxdist.parallel(lambda batch: batch, mesh=sizes, batch_argnums=0)
    batches = jaxdist.loader(X, 8, shuffle=False, tail="keep", mesh=sizes)
    gaps.append(gap(X, np.concatenate([jaxdist.data.gather_for_metrics(same(x)) for x in batches])))
    return {"gap": max(gaps)}


def between_axes(path: str, names: list[str]) -> dict[str, float]:
    """Sums over one of two axes, and those in 16 bits."""
    mesh, want = {"data": 2, "model": 2}, expected(path)[names[0]]
    run = functools.partial(
        oracle.run_decorated, oracle.case(names[0]), mesh=mesh, with_=jaxdist.parallel, donate=False
    )
    assert 1e-6 < gap(want, run(compress="bf16")) < 0.1
    return {"exact": gap(want, run())}


# --- meshes of several axes


def mlp(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grads), value


def chosen() -> dict[str, float]:
    """``mesh="auto"``: each passes rows of its own, and all choose the same; small steps, and wide ones."""
    gaps = {}
    for rows, width, hidden in ((512, 16, 16), (N, 64, 4096)):
        rng = np.random.default_rng(0)
        shapes = {"up": (width, hidden), "down": (hidden, width)}
        w = {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5) for name, shape in shapes.items()}
        x = rng.normal(size=(rows, width))
        decorated = jaxdist.parallel(mlp, mesh="auto")
        got, value = decorated(w, x[ctx.rows(rows)])
        gaps[str(width)] = gap(jax.jit(mlp)(w, x), (jaxdist.unshard(got), value))
    with pytest.raises(TypeError, match="dot_general"):  # the user's own
        jaxdist.parallel(mlp, mesh="auto")(w, np.ones((8, 3)))
    return gaps


def places() -> dict[str, float]:
    """Of 4 ranks on meshes of two axes: parts of the batch by place, arrays by the mesh's order."""
    mesh, w = {"data": 2, "model": 2}, {"up": np.ones((6, 4)), "down": np.ones((4, 6))}
    x, gaps = np.random.default_rng(0).normal(size=(8, 6)), {}
    assert (ctx.rows(8, mesh), ctx.rows(8)) == (slice(4 * (R // 2), 4 * (R // 2) + 4), slice(2 * R, 2 * R + 2))
    want = jax.jit(mlp)(w, x)
    for sizes in (mesh, {"model": 2, "data": 2}, {"model": 4}, {"model": 4, "data": 1}):
        layouts = {"up": 1, "down": 0}
        step = jaxdist.parallel(lambda w, x: mlp(w, x), mesh=sizes, layouts=layouts)
        state, loss = step(w, x[ctx.rows(8, sizes)])
        gaps[str(sizes)] = gap(want, (jaxdist.unshard(state), loss))
        assert state["up"].addressable_data(0).shape[1] == 4 // sizes["model"]
    turned = Mesh(np.array(ctx.devices)[[2, 0, 3, 1]], ("data",))
    reverse = jaxdist.data_parallel(lambda w, x: (w, x[::-1] - jnp.arange(8)[:, None]), mesh=turned)
    got = jaxdist.unshard(reverse(np.ones(3), x[ctx.rows(8, turned)])[1])
    return gaps | {"turned": gap(x[::-1] - np.arange(8)[:, None], got)}
