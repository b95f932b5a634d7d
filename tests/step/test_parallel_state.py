"""The state of one mesh on another one: passed on, saved and restored; and what it takes of a device."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import oracle
from harness.meshes import mesh

import jaxdist
from jaxdist.placements.layouts import physical

X = np.random.default_rng(0).normal(size=(3, 9, 6))
ADAM = optax.adam(1e-2, eps=1e-2)


class Way(NamedTuple):
    """How a state is kept."""

    sizes: dict[str, int]
    layouts: dict[str, int] = {}  # noqa: RUF012
    zero: dict[str, Any] = {}  # noqa: RUF012


WAYS = {
    "model": Way({"model": 4}, {"'a'": 1, "'b'": 0, "'d'": 0}),
    "level 3": Way({"data": 2, "model": 2}, {"'a'": 0, "'b'": 0, "'c'": 0, "'d'": 1}, {"level": 3}),
    "level 3 over 6": Way({"data": 2, "model": 3}, {"'a'": 0, "'b'": 0, "'c'": 0}, {"level": 3}),
    "within": Way({"data": 4, "model": 2}, {"'a'": 0, "'d'": 1}, {"level": 3, "within": 2}),
    "sequence": Way({"data": 2, "model": 2, "sequence": 2}, {"'a'": 1}, {"level": 1}),
    "offload": Way({"data": 2, "model": 2}, {"'a'": 0, "'d'": 1}, {"level": 3, "offload": True}),
}
PASSED_ON = [("model", "level 3"), ("level 3", "offload"), ("offload", "model"), ("within", "sequence")]
"""Over the same devices."""
PAIRS = [*PASSED_ON, ("sequence", "level 3 over 6"), ("level 3 over 6", "within")]


def step_of(tx: Any) -> Any:
    def loss_fn(p: Any, x: Any) -> Any:
        h = jnp.pad(x, ((0, 0), (0, 1))) @ p["a"] @ p["b"] + p["c"]
        return jnp.mean(h**2) + jnp.mean((x @ p["d"]) ** 2)

    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state["p"], x)
        updates, opt_state = tx.update(grads, state["o"], state["p"])
        key = jax.random.split(state["key"])[0]
        return {"p": optax.apply_updates(state["p"], updates), "o": opt_state, "key": key, "n": state["n"] + 1}, loss

    return step


def start() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    p = {"a": rng.normal(size=(7, 5)), "b": rng.normal(size=(5, 7)), "c": rng.normal(size=7),
         "d": rng.normal(size=(6, 10))}  # fmt: skip
    return {"p": p, "o": ADAM.init(p), "key": jax.random.key(1), "n": 0}


@functools.cache
def decorated(way: str) -> Any:
    sizes, layouts, zero = WAYS[way]
    tx = jaxdist.zero(ADAM, **zero) if zero else ADAM
    return jaxdist.parallel(step_of(tx), mesh=mesh(sizes), layouts=layouts, donate=False)


@functools.cache
def trained(way: str) -> Any:
    """After two steps."""
    state = start()
    for x in X[:2]:
        state, _ = decorated(way)(state, x)
    return state


@functools.cache
def expected(steps: int) -> Any:
    state, step = start(), jax.jit(step_of(ADAM))
    for x in X[:steps]:
        state, _ = step(state, x)
    return state


def digest(state: Any) -> str:
    """Of the bits of all leaves."""
    leaves = [oracle._host(x) for x in jax.tree.leaves(jaxdist.unshard(state))]
    return hashlib.sha256(b"".join(f"{x.shape}{x.dtype}".encode() + x.tobytes() for x in leaves)).hexdigest()


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_from_any_mesh_to_any_other(one: str, other: str, tmp_path: Path) -> None:
    """By way of a checkpoint: the bits are the same, on the devices of the other mesh, and training goes on."""
    state, like = trained(one), trained(other)
    assert oracle.difference(expected(2), jaxdist.unshard(state)) < 1e-10
    jaxdist.save(tmp_path, state, 1)
    restored = jaxdist.restore(tmp_path, like)
    assert digest(restored) == digest(state)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert type(x) is type(y)
        assert getattr(x, "sharding", None) == getattr(y, "sharding", None)
    assert digest(jaxdist.restore(tmp_path, start())) == digest(state)
    after, _ = decorated(other)(restored, X[2])
    assert oracle.difference(expected(3), jaxdist.unshard(after)) < 1e-10


@pytest.mark.parametrize(("one", "other"), PASSED_ON)
def test_passed_on_to_a_step_on_another_mesh(one: str, other: str) -> None:
    """Those in padded shards too, and what was passed on stays."""
    after, _ = decorated(other)(trained(one), X[2])
    assert oracle.difference(expected(3), jaxdist.unshard(after)) < 1e-10
    assert oracle.difference(expected(2), jaxdist.unshard(trained(one))) < 1e-10
    with pytest.raises(ValueError, match=r"is in shards over the devices 0 to \d, and this step runs on 0 to 5"):
        decorated("level 3 over 6")(trained(one), X[2])


def test_shards_over_all_devices_are_those_of_any_mesh() -> None:
    state = {**start(), "p": jaxdist.shard(start()["p"])}
    for x in X:
        state, _ = decorated("within")(state, x)
    assert oracle.difference(expected(3), jaxdist.unshard(state)) < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_bytes_on_a_device(way: str) -> None:
    """Those of its shards, of which padding is a part."""
    state = trained(way)
    total = jaxdist.memory(state).total
    shards = [physical(x).addressable_shards[0].data for x in jax.tree.leaves(state) if x.dtype != state["key"].dtype]
    assert total.device + total.host == sum(x.nbytes for x in shards) + 8  # and the key
    assert total.whole == sum(x.nbytes for x in jax.tree.leaves(expected(2)) if x.dtype != state["key"].dtype) + 8
    shape = {name: physical(x).addressable_shards[0].data.shape for name, x in state["p"].items()}
    found = {"level 3": {"a": (2, 5), "b": (3, 4), "c": (2,), "d": (3, 5)}, "model": {"a": (7, 2), "b": (2, 7)}}
    assert found.get(way, {}).items() <= shape.items()


@pytest.mark.parametrize("way", WAYS)
def test_copies_are_compared_along_each_axis(way: str) -> None:
    state = trained(way)
    jaxdist.check_sync(state)
    w = physical(state["p"]["d"])
    shards = [jax.device_put(np.array(s.data) + (s.device.id == 3), s.device) for s in w.addressable_shards]
    other = jax.make_array_from_single_device_arrays(w.shape, w.sharding, shards)
    (own,) = [s.index for s in w.addressable_shards if s.device.id == 3]
    if sum(s.index == own for s in w.addressable_shards) == 1:
        jaxdist.check_sync({"d": other})
        return
    with pytest.raises(jaxdist.SyncError, match=r"tree\['d'\] .* has other bits on rank 0 device .*cpu:3"):
        jaxdist.check_sync({"d": other})


def test_ahead_of_a_call() -> None:
    """Shapes, and a program that is compiled ahead, are those of the call; explain names the axis and the line."""
    step, state = decorated("level 3"), start()
    shapes = step.eval_shape(state, X[0])
    assert jax.tree.map(lambda x: x.shape, shapes[0]["p"]) == jax.tree.map(np.shape, state["p"])
    placed, _ = step(state, X[0])
    ahead = step.lower(placed, X[1]).compile()(placed, X[1])
    assert digest(ahead) == digest(step(placed, X[1]))
    rows = jaxdist.explain(step, state, X[0]).rows
    assert {row.axis for row in rows} == {"data", "model"}
    assert all(Path(row.line.rpartition(":")[0]).name == Path(__file__).name for row in rows if row.axis == "model")
    assert str(jaxdist.explain(step, state, X[0])).splitlines()[0].split()[:2] == ["axis", "what"]
