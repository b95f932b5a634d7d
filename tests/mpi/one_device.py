"""How far what several processes compute is from what one device does: cases of `oracle`, idioms, meshes, optimizers.

Each function returns the largest difference by name, as this rank has it. What one device computes comes in a file.
"""

from __future__ import annotations

import dataclasses
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
from harness import meshes, oracle

import jaxdist
from jaxdist.machine import VIRTUAL, Machine
from jaxdist.step import program_cache

ROWS, STEPS = 24, 2
"""Examples in a batch of the idioms, and how many batches."""
X = np.random.default_rng(0).normal(size=(22, 5))
ctx = jaxdist.get_context()
APART = dataclasses.replace(ctx.kind, latency=0)
"""Devices on which no step is computed whole for its messages."""
ctx.kind = APART


@functools.cache
def expected(path: str) -> dict[str, Any]:
    return pickle.loads(Path(path).read_bytes())


def cases(path: str, names: list[str]) -> dict[str, float]:
    """Cases of `oracle`, some of them in shards."""
    found = {}
    for name in names:
        case = oracle.case(name, oracle.IN_SHARDS.get(name, 0))
        got = oracle.run_decorated(case, ctx.rank, ctx.size)
        found[name] = oracle.difference(expected(path)[name], got) / case.tolerance
    return found


def idioms(path: str, words: list[str], whole: bool) -> dict[str, float]:
    """Idioms, each ``NAME:LEVEL``; `whole`: as small steps, which every rank computes whole."""
    ctx.kind = VIRTUAL.kind if whole else APART
    found = {}
    for word in words:
        name, _, level = word.partition(":")
        case = oracle.idiom(name, ROWS, int(level))
        got = oracle.run_decorated(case, ctx.rank, ctx.size, steps=STEPS, rows=ROWS)
        found[word] = oracle.difference(expected(path)[name], got)
    return found


def mesh(path: str, folder: str, sizes: dict[str, int], words: list[str]) -> dict[str, float]:
    """Idioms on a mesh of several axes, and what is around a step."""
    found = {}
    (part,), parts = ctx.parts(sizes)
    for word in words:
        name, _, level = word.partition(":")
        case = oracle.idiom(name, ROWS, int(level))
        given = None
        if "model" in sizes:
            given = meshes.layouts(case.step, (*case.state, case.batch(0)), name, sizes["model"])
        got = oracle.run_decorated(case, part, parts, STEPS, ROWS, with_=jaxdist.parallel, mesh=sizes, layouts=given)
        found[word] = oracle.difference(expected(path)[name], got)
    return {**found, "around": around(sizes, Path(folder, *map(str, sizes.items())))}


def step(tx: Any) -> Any:
    def step(params: Any, opt: Any, batch: Any) -> Any:
        def loss(p: Any) -> Any:
            rows = (jnp.tanh(batch @ p["in"]) @ p["out"]) ** 2
            return rows.mean(), rows.sum(1)

        (value, rows), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value, rows

    return step


def around(sizes: dict[str, int], folder: Path) -> float:
    """How far a loader's batches, a checkpoint, `disable_jit`, and arrays on the mesh are from one device."""
    rng = np.random.default_rng(1)
    params = {"in": rng.normal(size=(5, 7)), "out": rng.normal(size=(7, 3))}
    tx, parts = optax.adam(1e-2), ctx.parts(sizes)[1]
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
    (part,), _ = ctx.parts(sizes)
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


def zero(path: str, names: list[str], shift: int, within: int | None) -> dict[str, float]:
    """Optimizers that one step trains, the first at level 1 + shift % 3 and so on."""
    ctx.kind = APART
    levels = [1 + (shift + i) % 3 for i in range(len(names))]
    got = optimizers.run_sharded(names, levels, ctx.rank, ctx.size, within=within, split="owners")
    want = expected(path)["optimizers"]
    found = {name: optimizers.gap(want[name], got[2 * i : 2 * i + 2]) for i, name in enumerate(names)}
    if within:  # few examples beside large weights: values of the batch travel within groups and across
        got = oracle.run_decorated(oracle.case("few_examples", 3, within), ctx.rank, ctx.size)
        found["few_examples"] = oracle.difference(expected(path)["few_examples"], got)
    return found


def offload(folder: str) -> dict[str, float]:
    """State in the host's memory and back, by way of a checkpoint; CPU devices say that their memory is apart."""
    rng = np.random.default_rng(0)
    params = {"in": rng.normal(size=(5, 24)), "out": rng.normal(size=(24, 9))}
    x = rng.normal(size=(12, 5))
    n = len(x) // ctx.size
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    want: Any
    want = state = params, tx.init(params)
    plain = jax.jit(step(tx))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "has_own_memory", True)
        patch.setattr(program_cache, "check_host_memory", lambda mesh: None)
        for i, (level, in_host) in enumerate([(2, False), (1, True), (3, True), (2, True), (1, False)]):
            *want, _, _ = plain(*want, x)
            decorated = jaxdist.data_parallel(step(jaxdist.zero(tx, level, offload=in_host)))  # type: ignore[arg-type]
            *state, _, _ = decorated(*state, x[ctx.rank * n : (ctx.rank + 1) * n])
            kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state) if leaf.ndim}
            assert kinds == ({"device", "pinned_host"} if i else {"device"}), kinds
            jaxdist.check_sync(state)
            jaxdist.save(folder, state, step=i, wait=False)
            state = jaxdist.restore(folder, state)
    return {"gap": oracle.difference(want, jaxdist.unshard(tuple(state)))}
