"""The optimizer's state in the host's memory, ``zero(..., offload=True)``.

CPU devices have memories of these names too, which hold nothing apart; so that the way there is run as on GPUs, tests
with `apart` say that they do.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import matrix_optimizers, optimizers
from harness import oracle
from harness.parity import mesh
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxdist
from jaxdist.machine import Machine
from jaxdist.placements.layouts import HOST, check_host_memory, physical

WAYS = [(1, None, 1), (4, None, 2), (8, 2, 3)]
"""Devices, groups of them, level."""
CHAIN = ((6, 10), (10, 12), (12, 8))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "has_own_memory", True)
    monkeypatch.setattr("jaxdist.step.program_cache.check_host_memory", lambda mesh: None)


def mlp(level: Any = 1, offload: bool = True, within: Any = None, tx: Any = None) -> tuple[Any, Any, Any]:
    tx = jaxdist.zero(tx or optax.adamw(1e-2), level, within, offload=offload)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) * p["c"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(16, 24)), "b": rng.normal(size=(24, 9)), "c": rng.normal(size=9)}
    params = jax.tree.map(jnp.asarray, params)
    return step, (params, tx.init(params)), rng.normal(size=(16, 16))


@functools.cache
def expected(steps: int) -> Any:
    step, state, x = mlp(0, offload=False)
    step = jax.jit(step)
    for _ in range(steps):
        *state, _ = step(*state, x)
    return oracle.leaves(state)


def kinds(tree: Any) -> set[Any]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if x.ndim]


# --- as on one device


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("name", "way"), list(zip(["odd_parameters", "clip_adamw", "odd_parameters"], WAYS, strict=True)), ids=str
)
def test_as_on_one_device(name: str, way: tuple[int, int | None, int]) -> None:
    devices, within, level = way
    case = oracle.case(name, level, within, offload=True)
    got = oracle.run_decorated(case, mesh=mesh(devices))
    assert oracle.difference(oracle.expected(name), got) < case.tolerance


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_optimizers_as_on_one_device() -> None:
    """Moments of some parameters only; rows and columns of them; those of several steps; sums of gradients."""
    names = ["adafactor", "muon", "scale_by_lbfgs", "MultiSteps"]
    got = optimizers.run_sharded(names, [2] * 4, within=2, offload=True, mesh=mesh(4))
    assert optimizers.gap(optimizers.run_plain(names), got) < 1e-10
    assert HOST in kinds(got)


def test_on_cpus_it_says_nothing() -> None:
    texts, states = [], []
    for offload in (True, False):
        step, state, x = mlp(3, offload)
        decorated = jaxdist.data_parallel(step)
        texts.append(decorated.lower(*state, x).as_text())
        states.append(decorated(*state, x))
        assert kinds(states[-1]) == {"device"}
    assert texts[0] == texts[1]
    assert oracle.difference(*states) == 0


# --- where it lies


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_where_it_lies(way: tuple[int, int | None, int]) -> None:
    devices, within, level = way
    step, state, x = mlp(level, within=within)
    decorated = jaxdist.data_parallel(step, mesh=mesh(devices))
    params, opt_state, _ = first = decorated(*state, x)
    assert kinds(arrays(opt_state)) == {HOST}
    assert kinds([params, first[2], opt_state[0].count]) == {"device"}
    *again, _ = decorated(params, opt_state, x)
    assert kinds(arrays(again[1])) == {HOST}
    assert all(physical(x).is_deleted() for x in arrays(opt_state)), "its memory is the next state's"
    (program,) = decorated._cache.programs.values()
    jitted: Any = program._jitted
    assert jitted._cache_size() == 1
    step, state, x = mlp(level, offload=False, within=within)
    on_devices = jaxdist.data_parallel(step, mesh=mesh(devices))(*state, x)[1]
    row, flat = (jaxdist.memory({"s": s}).total for s in (again[1], on_devices))
    assert row.host == flat.device - 4  # the counter's bytes are on the device
    assert (row.device, row.whole, row.padding) == (4, flat.whole, flat.padding)
    table = str(jaxdist.memory(again[1]))
    assert "in host memory" in table
    assert "in host memory" not in str(jaxdist.memory(params))


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_it_can_move_on_the_way() -> None:
    """What comes in the host's memory stays there; what comes in shards is moved there."""
    found: Any = None
    for level, offload, kind in [(2, False, "device"), (1, True, HOST), (3, True, HOST), (1, False, HOST)]:
        step, state, x = mlp(level, offload)
        *found, _ = jaxdist.data_parallel(step, mesh=mesh(4))(*(found or state), x)
        assert kinds(arrays(found[1])) == {kind}, level
    assert oracle.difference(expected(4), jaxdist.unshard(found)) < 1e-10


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_what_takes_it() -> None:
    """`unshard`, `check_sync`, evaluating functions, steps without `jax.jit`; a step that must not take its memory."""
    step, state, x = mlp(2)
    where = mesh(4)
    *state, _ = jaxdist.data_parallel(step, mesh=where)(*state, x)
    whole = jaxdist.unshard(state)
    assert kinds(whole) == {"device"}
    jaxdist.check_sync(state)
    norm = jaxdist.data_parallel(lambda s, x: (optax.tree.norm(s[0].mu), x.sum()), donate=False, mesh=where)
    assert np.allclose(norm(state[1], x)[0], optax.tree.norm(whole[1][0].mu))
    kept = jaxdist.data_parallel(step, mesh=where, donate=False)
    once, twice = kept(*state, x), kept(*state, x)
    assert oracle.difference(once, twice) == 0
    with jax.disable_jit():
        assert oracle.difference(jaxdist.unshard(once), kept(*state, x)) < 1e-10
    assert oracle.difference(jaxdist.unshard(once)[:2], expected(2)) < 1e-10
    both = jaxdist.data_parallel(lambda a, b, x: ([p + 1 for p in a], [p + 2 for p in b], x.sum()), mesh=where)
    mu = [state[1][0].mu["a"]]
    a, b, _ = both(mu, mu, x)
    assert np.allclose(jaxdist.unshard(b)[0], jaxdist.unshard(a)[0] + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("way", [(1, None), (4, 2)], ids=str)
def test_checkpoints_from_and_to_it(way: tuple[int, int | None], tmp_path: Path) -> None:
    devices, within = way
    where, states = mesh(devices), []
    for offload in (True, False):
        step, state, x = mlp(2, offload, within)
        states.append(jaxdist.data_parallel(step, mesh=where)(*state, x)[:2])
    states.append(mlp()[1])  # on no mesh
    step, _, x = mlp(2, True, within)
    decorated = jaxdist.data_parallel(step, mesh=where)
    for i, saved in enumerate(states[:2]):
        jaxdist.save(tmp_path / f"{i}", saved, step=1, wait=bool(i))
        for like in states:
            back = jaxdist.restore(tmp_path / f"{i}", like)
            assert kinds(arrays(back[1])) == kinds(arrays(like[1]))
            *found, _ = decorated(*back, x)
            assert kinds(arrays(found[1])) == {HOST}
            assert oracle.difference(expected(2), jaxdist.unshard(found)) < 1e-10


# --- steps that do more with it


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("devices", [1, 4])
def test_state_that_is_used_elsewhere(devices: int) -> None:
    """Read before the update, in a branch, by `jax.jit`, and not at all; effects."""
    tx = jaxdist.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 1, offload=True)
    seen: list[float] = []

    def step(params: Any, opt_state: Any, spare: Any, x: Any) -> Any:
        before = optax.tree.norm(opt_state[1][0].nu)
        jax.debug.callback(lambda n: seen.append(float(n)), before)
        value, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(params)
        jax.debug.callback(lambda n: seen.append(float(n)), value)

        @jax.jit
        def update(params: Any, opt_state: Any) -> Any:
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = lax.cond(value > 0, update, lambda *state: state, params, opt_state)
        return params, opt_state, spare, before

    def start() -> Any:
        params = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)))
        return params, tx.init(params), tx.init(params)

    x = np.random.default_rng(0).normal(size=(16, 16))
    results, shown = [], []
    runs: tuple[Any, Any] = jax.jit(step), jaxdist.data_parallel(step, mesh=mesh(devices))
    state: Any = None
    for run in runs:
        state, aux = start(), None
        for _ in range(3):
            *state, aux = run(*state, x)
        jax.effects_barrier()
        results.append(jaxdist.unshard((state, aux)))
        shown.append(sorted(seen))
        seen.clear()
    assert kinds(arrays(state[1])) == {HOST}
    assert oracle.difference(*results) < 1e-10
    assert np.allclose(shown[0], shown[1])


@pytest.mark.usefixtures("apart")
def test_ordered_effects_are_refused() -> None:
    step, state, x = mlp()

    def printing(params: Any, opt_state: Any, x: Any) -> Any:
        jax.debug.callback(lambda n: None, jnp.sum(params["c"]), ordered=True)
        return step(params, opt_state, x)

    with pytest.raises(jaxdist.StepError, match="a callback with ordered=True: JAX can't compile"):
        jaxdist.data_parallel(printing, mesh=mesh(1))(state[0], state[1], x)


@pytest.mark.usefixtures("apart")
def test_state_made_in_a_step() -> None:
    step, (params, _), x = mlp(2)
    made = jaxdist.data_parallel(lambda p, x: jaxdist.zero(optax.adamw(1e-2), 2, offload=True).init(p), donate=False)
    state = params, made(params, x)
    *state, _ = jaxdist.data_parallel(step)(*state, x)
    assert kinds(arrays(state[1])) == {HOST}
    assert oracle.difference(expected(1), jaxdist.unshard(state)) < 1e-10


@pytest.mark.usefixtures("apart")
def test_arrays_of_ones_own_in_the_host() -> None:
    """Whole on several devices, or numbers: then they are put on the devices."""
    where = NamedSharding(mesh(4), PartitionSpec(), memory_kind=HOST)
    w, n = jax.device_put(jnp.ones(3), where), jax.device_put(jnp.ones(()), where)
    w, n = jaxdist.data_parallel(lambda w, n, x: (w + x.sum(), n + 1), mesh=mesh(4))(w, n, np.ones((4, 2)))
    assert kinds([w, n]) == {"device"}
    assert w.tolist() == [9.0] * 3


# --- for GPUs


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("devices", [1, 4])
def test_what_xla_is_told_for_gpus(devices: int) -> None:
    step, state, x = mlp(3)
    decorated = jaxdist.data_parallel(step, mesh=mesh(devices), bucket_bytes=0)
    *state, _ = decorated(*state, x)
    program = next(iter(decorated._cache.programs.values()))
    leaves = [physical(leaf) for leaf in jax.tree.leaves(state)]
    arguments = list(program._pick[0](leaves)), list(program._pick[1](leaves)), [x]
    text = program._jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    main = next(line for line in text.splitlines() if "@main" in line)
    taken, given = main.split(") -> (")
    offloaded = len(arrays(state[1]))
    assert taken.count('mhlo.memory_kind = "pinned_host"') == given.count('mhlo.memory_kind = "pinned_host"')
    assert taken.count('mhlo.memory_kind = "pinned_host"') == offloaded == 6
    moves = [line for line in text.splitlines() if "@annotate_device_placement" in line]
    assert sum('_xla_buffer_placement = "device"' in line for line in moves) == offloaded
    assert sum('_xla_buffer_placement = "pinned_host"' in line for line in moves) == offloaded
    assert text.count("stablehlo.optimization_barrier") == 2  # the large matrix, and the others


def test_devices_that_can_not_use_it() -> None:
    def devices(platform: str, *names: str) -> Any:
        memories = [SimpleNamespace(kind=name) for name in names]
        return SimpleNamespace(
            devices=np.array([SimpleNamespace(
                platform=platform, process_index=0, device_kind="X1", addressable_memories=lambda: memories
            )])
        )  # fmt: skip

    check_host_memory(devices("gpu", "device", HOST))
    with pytest.raises(ValueError, match=r"which metal devices \(X1\) can't use: they have device, other"):
        check_host_memory(devices("metal", "device", "other"))


def test_what_is_refused() -> None:
    for bad in ("host", 1):
        with pytest.raises(TypeError, match=f"offload={bad!r}"):
            jaxdist.zero(optax.sgd(0.1), 1, offload=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at level 0 each device has all of the optimizer's state"):
        jaxdist.zero(optax.sgd(0.1), 0, offload=True)


@pytest.mark.slow
@pytest.mark.usefixtures("apart")
def test_with_owners() -> None:
    """State in the host's memory whose matrices travel to owners."""
    assert matrix_optimizers.difference(matrix_optimizers.shampoo(), CHAIN, split="owners", offload=True) < 1e-10
