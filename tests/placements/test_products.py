"""Where a batch is small beside a weight in slices, the batch travels: `jaxdist.placements.products`."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import parity
import pytest

import jaxdist
from jaxdist.ir.interpreter import axes_of
from jaxdist.placements import options
from jaxdist.placements.strategy import IN_PLACE

RNG = np.random.default_rng(0)
ROWS = 24
WIDE, TALL = (96, 768), (768, 96)
"""Matrices that zero splits along their columns, and along their rows: of half a megabyte."""


def array(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape) / math.sqrt(shape[0]))


def step_of(tx: Any, apply: Any, microbatches: int = 1) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((apply(params, *batch) - batch[-1]) ** 2)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jaxdist.value_and_grad(loss, microbatches=microbatches)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def mlp(params: Any, x: Any, *_: Any) -> Any:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def heads(params: Any, x: Any, *_: Any) -> Any:
    """Products with weights of three dimensions, in both orders of the operands, and one of a batch in the middle."""
    query, out = params
    y = jnp.einsum("dhk,bd->hbk", query, x)
    return jnp.tanh(jnp.einsum("hbk,khd->bd", y, out))


def table(params: Any, ids: Any, *_: Any) -> Any:
    rows, w = params
    return jnp.tanh((rows[ids[:, 0]] + jnp.take(rows, ids[:, 1], axis=0)) @ w)


def tied(params: Any, x: Any, *_: Any) -> Any:
    (w,) = params
    return jnp.tanh(x @ w) @ w.T


MODELS: dict[str, tuple[Any, Any, Any]] = {
    "wide and tall": (mlp, [(array(*WIDE), array(768)), (array(*TALL), array(96))], (array(ROWS, 96),) * 2),
    "tall and wide": (mlp, [(array(*TALL), array(96)), (array(*WIDE), array(768))], (array(ROWS, 768),) * 2),
    "heads": (heads, [array(96, 8, 128), array(128, 8, 96)], (array(8, 96), array(8, 96))),
    "table": (
        table, [array(4096, 96), array(*WIDE)], (jnp.asarray(RNG.integers(0, 4096, (ROWS, 2))), array(ROWS, 768))
    ),
    "tied": (tied, [array(*WIDE)], (array(ROWS, 96), array(ROWS, 96))),
}  # fmt: skip


def trained(step: Any, params: Any, opt_state: Any, batch: Any, steps: int = 3) -> Any:
    loss = None
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state, batch)
    return params, opt_state, loss


def emitted(name: str, level: Any, devices: int, **settings: Any) -> list[tuple[str, tuple[int, ...], str]]:
    apply, params, batch = MODELS[name]
    tx = jaxdist.zero(optax.adam(1e-3), level) if level else optax.adam(1e-3)
    step = step_of(tx, apply)
    program = parity.program(step, params, tx.init(params), batch, devices=devices, **settings)
    return parity.collectives(program)


def moved(found: list[tuple[str, tuple[int, ...], str]], *kinds: str) -> int:
    """The largest value that travels so: its entries."""
    return max((math.prod(shape) for kind, shape, _ in found if kind in kinds), default=0)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch travels wherever it can."""
    few = lambda placed, *_, **__: -sum(move.why == IN_PLACE for move in placed.moves)
    monkeypatch.setattr(options, "cost", few)


# --- as on one device


@pytest.mark.parametrize(("devices", "level"), [(2, 3), (4, 2), (8, 0), (8, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_as_on_one_device(name: str, devices: int, level: Any) -> None:
    apply, params, batch = MODELS[name]
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    sharded = jaxdist.zero(tx, level) if level else tx
    want = trained(jax.jit(step_of(tx, apply)), params, tx.init(params), batch)
    step = jaxdist.data_parallel(step_of(sharded, apply), mesh=parity.mesh(devices), donate=False)
    got = trained(step, params, sharded.init(params), batch)
    assert optimizers.gap(want, got) < 1e-10


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("devices", "within", "level"), [(4, 2, 3), (8, 4, 2), (8, 2, 1), (8, 4, 3), (8, 1, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_within_groups_as_on_one_device(name: str, devices: int, within: int, level: Any) -> None:
    apply, params, batch = MODELS[name]
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1, eps=1e-3))
    sharded = jaxdist.zero(tx, level, within)
    want = trained(jax.jit(step_of(tx, apply)), params, tx.init(params), batch)
    step = jaxdist.data_parallel(step_of(sharded, apply), mesh=parity.mesh(devices), donate=False)
    got = trained(step, params, sharded.init(params), batch)
    assert optimizers.gap(want, got) < 1e-10


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("rows", [32, 20])
@pytest.mark.parametrize("within", [None, 2])
def test_with_other_settings(within: Any, rows: int, microbatches: int) -> None:
    """Microbatches; groups; and examples that the devices don't divide, which keep to their way."""
    apply, params, _ = MODELS["wide and tall"]
    batch = array(rows, 96), array(rows, 96)
    tx = optax.sgd(0.1)
    sharded = jaxdist.zero(tx, 3, within)
    want = trained(jax.jit(step_of(tx, apply)), params, tx.init(params), batch)
    decorated = jaxdist.data_parallel(step_of(sharded, apply, microbatches), mesh=parity.mesh(8), donate=False)
    assert optimizers.gap(want, trained(decorated, params, sharded.init(params), batch)) < 1e-10


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_types(dtype: Any) -> None:
    """Summands of 16-bit floats are added up in 32 bits."""
    apply, params, batch = jax.tree.map(lambda x: x if callable(x) else x.astype(dtype), MODELS["wide and tall"])
    tx = jaxdist.zero(optax.sgd(0.1), 3)
    want = jax.jit(step_of(tx, apply))(params, tx.init(params), batch)
    got = parity.decorated(step_of(tx, apply), 4)(params, tx.init(params), batch)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]
    parity.compare(got, want, 10 * float(jnp.finfo(dtype).eps))


@pytest.mark.usefixtures("always")
def test_state_that_was_sharded_within_groups() -> None:
    """What comes so is not of all devices' slices."""
    params, x = array(*WIDE), array(ROWS, 96)
    held = jaxdist.shard({"w": params}, within=2)
    evaluate = jaxdist.data_parallel(lambda held, x: jnp.mean(x @ held["w"]), mesh=parity.mesh(8), donate=False)
    assert abs(evaluate(held, x) - np.mean(np.asarray(x) @ np.asarray(params))) < 1e-12


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("within", [None, 2])
def test_entries_of_the_batch_at_places_that_a_parameter_says(within: Any) -> None:
    """Numbers, and random keys."""
    x, seeds = array(ROWS, 768), jnp.arange(ROWS, dtype=jnp.uint32)

    def step(params: Any, opt_state: Any, batch: Any, tx: Any) -> Any:
        w, places = params
        grad = jax.grad(lambda w: jnp.mean((batch[0][:, places] @ w) ** 2))(w)
        keys = jax.vmap(lambda s: jax.random.split(jax.random.key(s), 768))(batch[1])
        picked = jax.random.key_data(keys[:, places])
        updates, opt_state = tx.update((grad, jnp.zeros_like(places)), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, picked

    plain, sharded = optax.sgd(0.1), jaxdist.zero(optax.sgd(0.1), 3, within)
    params = array(*TALL), jnp.asarray(RNG.permutation(768))
    want = jax.jit(functools.partial(step, tx=plain))(params, plain.init(params), (x, seeds))
    decorated = jaxdist.data_parallel(functools.partial(step, tx=sharded), mesh=parity.mesh(4), donate=False)
    parity.compare(decorated(params, sharded.init(params), (x, seeds)), want, 1e-10)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kept", ["whole", "over all devices"])
def test_within_groups_a_leaf_that_is_kept_otherwise(kept: str) -> None:
    """One on every device has its gradient added up at once; of one over all devices no more than rows travel."""
    plain, sharded = optax.sgd(0.1), jaxdist.zero(optax.sgd(0.1), 3, within=2)
    w, v, x = array(*WIDE), array(*TALL), array(ROWS, 96)

    def step(w: Any, v: Any, opt_state: Any, x: Any, tx: Any) -> Any:
        loss, (dw, dv) = jax.value_and_grad(lambda w, v: jnp.mean(jnp.tanh(x @ w) @ v), (0, 1))(w, v)
        updates, opt_state = tx.update(dw, opt_state, w)
        return optax.apply_updates(w, updates), loss, dv if kept == "whole" else None

    ours = functools.partial(step, tx=sharded)
    args = w, v if kept == "whole" else jaxdist.shard(v), sharded.init(w), x
    want = jax.jit(functools.partial(step, tx=plain))(w, v, plain.init(w), x)
    parity.compare(jaxdist.data_parallel(ours, donate=False)(*args), want, 1e-10)
    found = parity.collectives(parity.program(ours, *args, devices=8))
    assert [kind for kind, shape, _ in found if shape == TALL] == (["all-reduce"] if kept == "whole" else [])


# --- what travels


@pytest.mark.parametrize("name", ["wide and tall", "tall and wide", "heads"])
def test_no_weight_travels_at_level_3(name: str) -> None:
    """Values of the batch do, in all-gathers, all-to-alls and reduce-scatters; of the weights biases."""
    found = emitted(name, 3, 4)
    assert moved(found, "all-gather", "all-reduce") <= ROWS * 768
    assert moved(found, "all-to-all") > 0
    assert moved(found, "reduce-scatter") <= ROWS * 768 // 4


@pytest.mark.parametrize("level", [1, 2])
def test_gradients_are_made_in_slices(level: Any) -> None:
    """The new parameters are gathered, as ever; no gradient of a weight is reduced."""
    found = emitted("wide and tall", level, 4)
    assert [shape for kind, shape, _ in found if kind == "all-gather"].count(WIDE) == 1
    assert moved(found, "reduce-scatter") <= 768


def test_without_slices_gradients_are_gathered_and_not_added_up() -> None:
    """Each as it is wanted next, so that XLA makes the transpose between a part of the product."""
    found = emitted("wide and tall", 0, 4)
    assert {WIDE[::-1], TALL} & {shape for kind, shape, _ in found if kind == "all-gather"}
    assert moved(found, "all-reduce", "reduce-scatter") <= 768 + 96 + 1


def test_gradients_that_are_added_up_first_are_reduced_once() -> None:
    """Of weights with many uses, and of microbatches."""
    found = emitted("tied", 0, 4)
    assert moved(found, "all-reduce") >= 96 * 768
    assert moved(found, "all-gather", "all-to-all") == 0
    apply, params, _ = MODELS["wide and tall"]
    batch = (array(32, 96),) * 2
    step = step_of(optax.sgd(0.1), apply, microbatches=4)
    assert not [k for k, *_ in parity.collectives(parity.program(step, params, optax.sgd(0.1).init(params), batch))
                if k in ("all-gather", "all-to-all")]  # fmt: skip


def test_a_table_is_not_gathered() -> None:
    found = emitted("table", 3, 8)
    assert moved(found, "all-gather", "reduce-scatter", "all-reduce") < 4096 * 96 // 8
    assert moved(found, "all-to-all") == ROWS // 8 * 768  # the other product


def test_a_large_batch_stays() -> None:
    apply, params, _ = MODELS["wide and tall"]
    tx = jaxdist.zero(optax.sgd(0.1), 3)
    batch = array(4096, 96), array(4096, 96)
    found = parity.collectives(parity.program(step_of(tx, apply), params, tx.init(params), batch, devices=4))
    assert "all-to-all" not in [kind for kind, *_ in found]
    assert [math.prod(shape) for kind, shape, _ in found if kind == "all-gather"].count(96 * 768) == 3


def test_what_each_device_holds_whole_is_no_more_than_its_slice() -> None:
    """Of rows that travel: else the memory that slices save would be lost."""
    apply, _, _ = MODELS["wide and tall"]
    params = [(array(512, 512), array(512)) for _ in range(3)]
    tx = jaxdist.zero(optax.sgd(0.1), 3)

    def kinds(rows: int) -> set[str]:
        batch = array(rows, 512), array(rows, 512)
        program = parity.program(step_of(tx, apply), params, tx.init(params), batch, devices=8)
        return {kind for kind, *_ in parity.collectives(program)}

    assert "all-to-all" in kinds(64)
    assert "all-to-all" not in kinds(128)


def test_within_groups_a_slice_is_of_all_devices_of_a_group() -> None:
    """So much of the rows may be on a device, and for the rest of them an all-to-all sends so much."""
    held = jaxdist.shard(jnp.zeros((512, 512), "f"), within=2)
    evaluate = lambda w, x: jnp.mean(x @ w)

    def kinds(rows_of_a_group: int) -> list[str]:
        batch = jnp.zeros((4 * rows_of_a_group, 512), "f")
        return [kind for kind, *_ in parity.collectives(parity.program(evaluate, held, batch, devices=8))]

    # Half of the columns of all rows of a group there, their products back, and two messages: no more than the weight.
    assert kinds(160) == ["all-to-all", "reduce-scatter", "all-reduce"]
    assert kinds(300) == ["all-gather", "all-reduce"]


def test_a_weight_that_many_share_is_gathered_once() -> None:
    """Of a recurrent network: twenty small messages there and back would be more than one."""
    tx = jaxdist.zero(optax.sgd(0.1), 3)

    def apply(w: Any, x: Any, *_: Any) -> Any:
        for _step in range(20):
            x = jnp.tanh(x @ w)
        return x

    program = parity.program(
        step_of(tx, apply), array(512, 512), tx.init(array(512, 512)), (array(8, 512), array(8, 512)), devices=2
    )
    gathered = [shape for kind, shape, _ in parity.collectives(program) if kind == "all-gather"]
    assert gathered.count((512, 512)) == 2  # for the forward and for the backward pass


def groups_of(name: str, rows: int, level: Any, width: int = 512) -> list[tuple[str, Any, int]]:
    """(kind, axes, entries of the result) of each collective of three layers on 4 devices, in groups of 2."""
    apply, _, _ = MODELS[name]
    params = [(jnp.zeros((width, width), "f"), jnp.zeros(width, "f")) for _ in range(3)]
    tx = jaxdist.zero(optax.sgd(0.1), level, within=2)
    batch = jnp.zeros((rows, width), "f"), jnp.zeros((rows, width), "f")
    program = parity.program(step_of(tx, apply), params, tx.init(params), batch, devices=4)
    return [
        (parity.COLLECTIVES[eqn.primitive.name], axes_of(eqn), math.prod(eqn.outvars[0].aval.shape))
        for eqn in program.eqns
        if eqn.primitive.name in parity.COLLECTIVES
    ]


@pytest.mark.parametrize("level", [2, 3])
def test_within_groups_only_rows_cross_them(level: Any) -> None:
    """Not the gradients' slices; at level 3 no weight travels within them either."""
    rows, width = 64, 512
    found = groups_of("wide and tall", rows, level, width)
    crossing = [(kind, size) for kind, who, size in found if who != ("data",)]
    assert max(size for _, size in crossing) <= rows * width
    assert [kind for kind, size in crossing if size > width * 3] == ["all-gather"] * 6  # of three layers, in and out
    if level == 3:
        assert max(size for kind, who, size in found if who == ("data",) and kind == "all-gather") <= rows // 2 * width


def test_within_groups_a_batch_that_takes_long_stays() -> None:
    """Each group computes the gradients from the rows of all."""
    few, many = (groups_of("wide and tall", rows, 2, 2048) for rows in (256, 1024))
    assert ("all-gather", ("group",)) in [(kind, who) for kind, who, _ in few]
    assert {kind for kind, who, _ in many if who == ("group",)} == {"all-reduce"}


def test_within_groups_no_more_crosses_them_than_slices_would() -> None:
    """Where what a product makes is larger than the weight."""
    params, rows = jnp.zeros((64, 16384), "f"), 176
    tx = jaxdist.zero(optax.sgd(0.1), 3, within=4)

    def step(w: Any, opt_state: Any, x: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    program = parity.program(step, params, tx.init(params), jnp.zeros((rows, 64), "f"), devices=8)
    crossing = [eqn for eqn in program.eqns if eqn.primitive.name in parity.COLLECTIVES and axes_of(eqn) != ("data",)]
    assert sum(math.prod(eqn.outvars[0].aval.shape) for eqn in crossing) <= 64 * 16384 // 4


@pytest.mark.parametrize("level", [2, 3])
def test_a_table_that_is_multiplied_as_well_is_reduced_once(level: Any) -> None:
    """Its gradient is the sum of few rows and of a product of all words."""
    table = jnp.zeros((16384, 64), "f")
    tx = jaxdist.zero(optax.sgd(0.1), level)

    def step(w: Any, opt_state: Any, ids: Any) -> Any:
        loss = lambda w: jnp.mean(jax.nn.logsumexp(jnp.tanh(w[ids]) @ w.T, -1))
        updates, opt_state = tx.update(jax.grad(loss)(w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    program = parity.program(step, table, tx.init(table), jnp.zeros((256, 2), "i"), devices=4)
    found = parity.collectives(program)
    kinds = [kind for kind, *_ in found if kind != "all-gather"]
    assert kinds == ["reduce-scatter"]  # at level 3 rows are taken of the table that is gathered for the product
    assert [math.prod(shape) for kind, shape, _ in found if kind == "all-gather"].count(16384 * 64) == level - 1


# --- what is said of it


def test_it_is_explained_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    apply, params, batch = MODELS["wide and tall"]
    tx = jaxdist.zero(optax.sgd(0.1), 3)
    step = parity.decorated(step_of(tx, apply), 4)
    args = params, tx.init(params), batch
    rows = [line for line in str(jaxdist.explain(step, *args)).splitlines() if IN_PLACE in line]
    assert {line.split(" of activations")[0] for line in rows} >= {"all-gather", "all-to-all"}
    with caplog.at_level(logging.WARNING, "jaxdist"):
        step(*args)
    assert not caplog.records
