"""Where a batch is small beside a weight in slices, the batch travels: `jaxdist.placements.products`.

That the numbers stay those of one device is also in `test_idioms` and `test_oracle` (``few_examples``).
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import optimizers
from harness import parity
from harness.steps import train_step
from jax import lax

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
    loss = lambda params, batch: jnp.mean((apply(params, *batch) - batch[-1]) ** 2)
    return train_step(loss, tx, jaxdist.value_and_grad, microbatches=microbatches)


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


def convolution(params: Any, x: Any, *_: Any) -> Any:
    (w,) = params
    return jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def layers(width: int) -> Any:
    return [(jnp.zeros((width, width), "f"), jnp.zeros(width, "f")) for _ in range(3)]


def examples(rows: int, width: int) -> Any:
    return (jnp.zeros((rows, width), "f"),) * 2


WIDE_AND_TALL = [(array(*WIDE), array(768)), (array(*TALL), array(96))]
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "wide and tall": (mlp, WIDE_AND_TALL, (array(ROWS, 96),) * 2),
    "tall and wide": (mlp, WIDE_AND_TALL[::-1], (array(ROWS, 768),) * 2),
    "many examples": (mlp, WIDE_AND_TALL, examples(4096, 96)),
    "heads": (heads, [array(96, 8, 128), array(128, 8, 96)], (array(8, 96), array(8, 96))),
    "table": (table, [array(4096, 96), array(*WIDE)], (jnp.zeros((ROWS, 2), int), array(ROWS, 768))),
    "tied": (tied, [array(*WIDE)], (array(ROWS, 96), array(ROWS, 96))),
    "convolution": (convolution, [array(3, 3, 32, 96)], (array(8, 4, 4, 32), array(8, 4, 4, 96))),
}
# What each device has whole of rows that travel is no more than its slice: else the memory of slices would be lost.
MODELS |= {f"{rows} rows": (mlp, layers(512), examples(rows, 512)) for rows in (64, 128)}
Found = list[tuple[str, tuple[int, ...], str]]


def emitted(apply: Any, params: Any, batch: Any, level: Any, devices: int, microbatches: int = 1) -> Found:
    tx = jaxdist.zero(optax.sgd(0.1), level) if level else optax.sgd(0.1)
    step = step_of(tx, apply, microbatches)
    return parity.collectives(parity.program(step, params, tx.init(params), batch, devices=devices))


def sizes(found: Found, kind: str) -> list[int]:
    """Entries of the values that travel so."""
    return [math.prod(shape) for one, shape, _ in found if one == kind]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch travels wherever it can."""
    few = lambda placed, *_, **__: -sum(move.why == IN_PLACE for move in placed.moves)
    monkeypatch.setattr(options, "cost", few)


# --- numbers


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "devices", "within", "level"),
    [("convolution", 8, None, 3), ("tied", 4, 2, 3), ("wide and tall", 4, 2, 2), ("heads", 8, 2, 1)],
)
def test_as_on_one_device(name: str, devices: int, within: int | None, level: Any) -> None:
    """By an optimizer that a gradient of twice the size would not escape."""
    apply, params, batch = MODELS[name]
    tx = optax.sgd(0.1, momentum=0.9)
    sharded = jaxdist.zero(tx, level, within)
    want = jax.jit(step_of(tx, apply))(params, tx.init(params), batch)
    step = jaxdist.data_parallel(step_of(sharded, apply), mesh=parity.mesh(devices), donate=False)
    assert optimizers.gap(want, step(params, sharded.init(params), batch)) < 1e-10


@pytest.mark.usefixtures("always")
def test_summands_of_16_bits_are_added_up_in_32() -> None:
    """They may overflow where the sum does not."""
    w = np.repeat([800, -800], TALL[0] // 2)[:, None].repeat(TALL[1], 1).astype("float16")
    product = jaxdist.data_parallel(lambda w, x: x @ w, donate=False)
    np.testing.assert_array_equal(product(jaxdist.shard(w), np.ones((ROWS, TALL[0]), "float16")), 0)


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

ANY, NONE = (1, ROWS * 768), (0, 0)
EXAMPLES = {"all-gather": ANY, "all-to-all": ANY, "all-reduce": (0, ROWS * 768), "reduce-scatter": (0, ROWS * 192)}
FEW = (0, 4096 * 96 // 8 - 1)


@pytest.mark.parametrize(
    ("name", "level", "devices", "weights", "largest"),
    [
        ("wide and tall", 3, 4, 0, EXAMPLES),
        ("tall and wide", 3, 4, 0, EXAMPLES),
        ("heads", 3, 4, 0, EXAMPLES),
        # New parameters, as ever; no gradient of a weight is reduced, but made in slices.
        ("wide and tall", 1, 4, 2, {"reduce-scatter": (0, 768)}),
        ("wide and tall", 2, 4, 2, {"reduce-scatter": (0, 768)}),
        # Without slices gradients are gathered, each as it is wanted next: XLA transposes a part of the product.
        ("wide and tall", 0, 4, 2, {"all-reduce": (0, 768 + 96 + 1), "reduce-scatter": NONE}),
        # Those that are added up first, of a weight with many uses, are reduced once.
        ("tied", 0, 4, 0, {"all-reduce": (96 * 768, 10**6), "all-gather": NONE, "all-to-all": NONE}),
        ("table", 3, 8, 0, {"all-gather": FEW, "reduce-scatter": FEW, "all-reduce": FEW, "all-to-all": (3 * 768,) * 2}),
        ("many examples", 3, 4, 3, {"all-to-all": NONE}),
        ("64 rows", 3, 8, 0, {"all-to-all": (1, 64 * 512)}),
        ("128 rows", 3, 8, 0, {"all-to-all": NONE}),
    ],
)
def test_what_travels(name: str, level: Any, devices: int, weights: int, largest: dict[str, tuple[int, int]]) -> None:
    """How many weights are gathered, and the least and most entries of the largest value that travels in other ways."""
    found = emitted(*MODELS[name], level, devices)
    assert sizes(found, "all-gather").count(96 * 768) == weights
    for kind, (low, high) in largest.items():
        assert low <= max(sizes(found, kind), default=0) <= high, kind


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_dense_layer_and_its_twin_as_a_convolution_send_the_same(level: int) -> None:
    dense = lambda w, x, *_: jnp.tanh(x @ w)
    twin = lambda w, x, *_: convolution([w], x)
    w, x, y = jnp.zeros((512, 1024), "f"), jnp.zeros((32, 512), "f"), jnp.zeros((32, 1024), "f")
    one = emitted(dense, w, (x, y), level, 8)
    other = emitted(twin, w[None, None], (x[:, None, None], y[:, None, None]), level, 8)
    ways = [sorted((kind, math.prod(shape)) for kind, shape, _ in found) for found in (one, other)]
    assert ways[0] == ways[1]
    assert max(sizes(other, "all-reduce") + sizes(other, "reduce-scatter")) < 32 * 1024


def test_a_weight_that_is_not_gathered_twice_is_not_gathered_once() -> None:
    """Where it is a product's, and transposed another one's."""
    both, once = (
        sum(math.prod(shape) for _, shape, _ in emitted(apply, [jnp.zeros((512, 512), "f")], examples(32, 512), 3, 8))
        for apply in (tied, lambda params, x, *_: jnp.tanh(x @ params[0]) @ params[0])
    )
    assert both <= once < 512 * 512


def test_gradients_of_microbatches_are_added_up_first() -> None:
    found = emitted(mlp, WIDE_AND_TALL, (array(32, 96),) * 2, 0, 4, microbatches=4)
    assert sizes(found, "all-gather") + sizes(found, "all-to-all") == []


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


def in_groups(step: Any, *args: Any, devices: int) -> list[tuple[str, Any, int]]:
    """(kind, axes, entries of the result) of each collective."""
    return [
        (parity.COLLECTIVES[eqn.primitive.name], axes_of(eqn), math.prod(eqn.outvars[0].aval.shape))
        for eqn in parity.program(step, *args, devices=devices).eqns
        if eqn.primitive.name in parity.COLLECTIVES
    ]


def of_three_layers(rows: int, level: Any, width: int) -> list[tuple[str, Any, int]]:
    tx, params = jaxdist.zero(optax.sgd(0.1), level, within=2), layers(width)
    return in_groups(step_of(tx, mlp), params, tx.init(params), examples(rows, width), devices=4)


@pytest.mark.parametrize(
    ("rows", "width", "level", "few"),
    [(64, 512, 2, True), (64, 512, 3, True), (256, 2048, 2, True), (1024, 2048, 2, False)],
)
def test_within_groups_few_rows_cross_them(rows: int, width: int, level: Any, few: bool) -> None:
    """Each group computes the gradients from the rows of all, unless that takes long: their slices are not added up. At
    level 3 no weight travels within them either."""
    found = of_three_layers(rows, level, width)
    crossing = [(kind, size) for kind, who, size in found if who != ("data",) and size > 3 * width]
    assert {kind for kind, _ in crossing} == {"all-gather" if few else "all-reduce"}
    if few:
        assert len(crossing) == 6, "of three layers, in and out"
        assert max(size for _, size in crossing) <= rows * width
    if level == 3:
        assert max(size for kind, who, size in found if who == ("data",) and kind == "all-gather") <= rows // 2 * width


def test_within_groups_no_more_crosses_them_than_slices_would() -> None:
    """Where what a product makes is larger than the weight."""
    params, rows = jnp.zeros((64, 16384), "f"), 176
    tx = jaxdist.zero(optax.sgd(0.1), 3, within=4)

    step = train_step(lambda w, x: jnp.mean(jnp.sin(x @ w)), tx)
    found = in_groups(step, params, tx.init(params), jnp.zeros((rows, 64), "f"), devices=8)
    assert sum(size for _, who, size in found if size > 1 and who != ("data",)) <= 64 * 16384 // 4


@pytest.mark.parametrize("level", [2, 3])
def test_a_table_that_is_multiplied_as_well_is_reduced_once(level: Any) -> None:
    """Its gradient is the sum of few rows and of a product of all words."""
    table = jnp.zeros((16384, 64), "f")
    tx = jaxdist.zero(optax.sgd(0.1), level)

    step = train_step(lambda w, ids: jnp.mean(jax.nn.logsumexp(jnp.tanh(w[ids]) @ w.T, -1)), tx)
    found = parity.collectives(parity.program(step, table, tx.init(table), jnp.zeros((256, 2), "i"), devices=4))
    # At level 3 rows are taken of the table that is gathered for the product.
    assert [kind for kind, shape, _ in found if kind != "all-gather" and shape] == ["reduce-scatter"]
    assert sizes(found, "all-gather").count(16384 * 64) == level - 1


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
