"""Ranks that differ, and their places, on a mesh of several axes of 4 ranks."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import oracle
from jax.sharding import Mesh

import jaxdist

ctx = jaxdist.get_context()
said: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("jaxdist").addHandler(handler)

MESH = {"data": 2, "model": 2}
LAYOUTS = {"w": 1}
X = np.random.default_rng(0).normal(size=(8, 6))
W = {"w": np.ones((6, 4))}


def step(state: Any, x: Any) -> Any:
    jax.debug.print("PRINTED {}", x.sum())
    loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w["w"]) ** 2))(state)
    return jax.tree.map(lambda w, g: w - g, state, grads), loss


def new(mesh: Any = MESH, **options: Any) -> Any:
    def fresh(state: Any, x: Any) -> Any:
        return step(state, x)

    return jaxdist.parallel(fresh, mesh=mesh, layouts=LAYOUTS, **options)


def refused(call: Any, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert all(word in text for word in words), (words, text)
    assert len(set(ctx.control.exchange("refused", text))) == 1


def main() -> dict[str, float]:
    gaps: dict[str, float] = {}
    place = {"data": (ctx.rank // 2,), "model": (ctx.rank % 2,)}
    assert (ctx.places(MESH), ctx.parts(MESH), ctx.parts()) == (place, ((ctx.rank // 2,), 2), ((ctx.rank,), 4))
    part = X[4 * (ctx.rank // 2) :][:4]

    # Meshes that differ, rows of one place that do, sizes.
    refused(lambda: new(MESH if ctx.rank else {"model": 2, "data": 2})(W, part), "different meshes", "on rank 0")
    refused(lambda: new()(W, part + (ctx.rank == 3)), "batch leaf x", "rank 2 and rank 3", "ctx.parts(mesh)")
    refused(lambda: new({"data": 3, "model": 2})(W, part), "4 devices")
    refused(lambda: new(Mesh(np.array(ctx.devices[:2]).reshape(2, 1), ("data", "model")))(W, part), "runs on all of")
    refused(lambda: new()(W, part[: 4 - ctx.rank // 2]), "batch", "3", "4")

    want = jax.jit(step)(W, X)
    said.clear()
    twice = new()
    state, loss = twice(W, X[:4])
    state, loss = twice(state, X[:4])
    assert any("pass the same batch, so each example counts 2 times" in text for text in said) == ctx.is_root, said

    for mesh in (MESH, {"model": 2, "data": 2}, {"model": 4}, {"model": 4, "data": 1}):
        said.clear()
        (index,), parts = ctx.parts(mesh)
        state, loss = new(mesh)(W, X.reshape(parts, -1, 6)[index])
        whole = jaxdist.unshard(state)["w"]
        gaps[str(mesh)] = oracle.difference(want, ({"w": whole}, loss))
        assert state["w"].addressable_data(0).shape[1] == 4 // (4 if mesh["model"] == 4 else 2)
        assert not said, said

    # One axis whose devices stand in another order than the ranks: the parts are in the order of the mesh.
    turned = Mesh(np.array(ctx.devices)[[2, 0, 3, 1]], ("data",))
    index = [2, 0, 3, 1].index(ctx.rank)
    reverse = jaxdist.data_parallel(lambda w, x: (w, x[::-1] - jnp.arange(8)[:, None]), mesh=turned, donate=False)
    got = jaxdist.unshard(reverse(W, X[2 * index : 2 * index + 2])[1])
    np.testing.assert_allclose(got, X[::-1] - np.arange(8)[:, None], rtol=1e-6)

    if ctx.is_root:  # sends nothing, as the processes are connected
        assert "func.func" in new().lower(W, part).as_text()
    ctx.barrier()
    if ctx.is_root:
        print("PLACES ARE THROUGH", flush=True)
    return gaps
