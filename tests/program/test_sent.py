"""What a device sends and computes for a step written for one: a table of steps, read from their lowered text."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from catalogue import flows
from harness import programs
from harness.check import check, decorated, train_step
from harness.errors import missing
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import jaxdist
from jaxdist import placements

RNG = np.random.default_rng(0)
W, X = jnp.asarray(RNG.normal(size=(6, 6))), RNG.normal(size=(16, 6))


def sent(step: Any, *args: Any, on: Any = 8, **settings: Any) -> list[tuple[str, int, int]]:
    """(kind, entries of the result, loops around it) of each collective."""
    found = programs.sent(decorated(step, on, **settings), *args)
    return [(kind, math.prod(shape), loops) for kind, shape, loops in found]


# --- gradients


@pytest.mark.parametrize("name", flows.REDUCED)
def test_where_gradients_are_reduced(name: str) -> None:
    """Once, after a loop that only adds them up; in each turn of one that uses the sum."""
    step, args, where = flows.REDUCED[name]
    found = sent(step, *args, bucket_bytes=0)
    size = args[0][0].size if where and args[0].ndim == 3 else args[0].size
    assert [one for one in found if one[0] == "all-reduce" and one[1] > 1] == [("all-reduce", size, where)]
    if args[0] is flows.W and not where:
        assert found.count(("all-reduce", 1, 0)) == 1, "so is the loss"


@pytest.mark.parametrize(
    ("model", "level"),
    [(flows.in_scan, 0), (flows.in_scan, 1), (flows.in_groups, 2), (flows.in_scan, 3), (flows.in_groups, 3)],
)
def test_microbatches_of_loops_over_layers_at_each_level(model: Any, level: Any) -> None:
    tx = jaxdist.zero(optax.sgd(0.1, momentum=0.9), level)
    step = train_step(model, tx, jaxdist.value_and_grad, microbatches=4)
    args = flows.STACK, tx.init(flows.STACK), flows.ROWS
    found = [one for one in sent(step, *args, bucket_bytes=0) if one[1] > 1]
    whole = flows.STACK.size
    gradients = ("reduce-scatter", whole // 8, 0) if level else ("all-reduce", whole, 0)
    assert [one for one in found if one[0] != "all-gather"] == [gradients]
    gathers = {one[1:] for one in found if one[0] == "all-gather"}
    if level < 3:
        assert gathers == ({(whole, 0)} if level else set())
    else:
        assert {size for size, _ in gathers} == {96 * 96}
    if model is flows.in_groups:
        check(step, *args, on=8)


OPTIMIZERS: dict[str, Any] = {
    "lion": optax.lion(0.1),
    "two averages": optax.chain(optax.trace(0.9), optax.trace(0.99)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_with_several_uses_is_reduced_once(name: str) -> None:
    tx, params = OPTIMIZERS[name], {"a": W, "b": jnp.ones(6)}
    step = train_step(lambda p, x: jnp.mean(jnp.tanh(x @ p["a"] + p["b"]) ** 2), tx)
    found = sent(step, params, tx.init(params), X, bucket_bytes=0)
    assert sorted(found) == [("all-reduce", 1, 0), ("all-reduce", 6, 0), ("all-reduce", 36, 0)]


def tied_and_penalised(w: Any, x: Any) -> Any:
    return w - jax.grad(lambda w: jnp.mean((x @ w @ w.T @ w) ** 2) + 0.1 * jnp.sum(w**2))(w)


def scalar_parameter(s: Any, x: Any) -> Any:
    """Broadcast to the length of the batch: its gradient does not travel as one."""
    scaled = jnp.ones((x.shape[0], 1)) * s
    return s - jax.grad(lambda s: jnp.mean(jnp.where(x > 0, x, s) * scaled * s))(s)


def normalized(w: Any, x: Any) -> Any:
    """Statistics of the batch over an axis that `jax.vmap` names, as Equinox and Haiku have them."""

    def of_one(x: Any) -> Any:
        h = jnp.tanh(x @ w)
        return (h - lax.pmean(h, "rows")) / (1 + lax.pmean(h**2, "rows"))

    return w - jax.grad(lambda w: jnp.mean(jax.vmap(of_one, axis_name="rows")(x) ** 3 @ w))(w)


def test_statistics_over_an_axis_that_vmap_names_are_all_that_is_sent() -> None:
    assert {one[0] for one in sent(normalized, W, X)} == {"all-reduce"}


def divided_weight(w: Any, x: Any) -> Any:
    """A parameter of 6 entries in a weight of 300, which is divided."""
    return w - jax.grad(lambda w: jnp.mean((x @ (w * np.ones((6, 50)) / np.arange(1.0, 51.0))) ** 2))(w)


@pytest.mark.parametrize(
    ("step", "args", "size"),
    [
        (tied_and_penalised, (W, X), 36),
        (scalar_parameter, (jnp.asarray(0.5), X), 1),
        (divided_weight, (jnp.ones((6, 1)), X), 6),
    ],
)
def test_a_step_of_your_own_reduces_its_gradient_once(step: Any, args: Any, size: int) -> None:
    assert sent(step, *args) == [("all-reduce", size, 0)]


# --- buckets


@pytest.mark.parametrize(
    ("counts", "messages"),
    [
        ([10, 10, 10], [30]),
        ([50, 50], [100]),
        ([50, 51], [50, 51]),  # one entry too many
        ([200, 10, 10], [20, 200]),  # one larger than a bucket
        ([60, 60, 10], [60, 70]),
        ([1] * 350, [50, 100, 100, 100]),
    ],
)
def test_gradients_share_buckets(counts: list[int], messages: list[int]) -> None:
    """Of at most 800 bytes, 100 entries; the loss rides along."""
    params = [jnp.ones(n) for n in counts]
    loss = lambda ps, x: sum(jnp.mean(jnp.sin(p * x[:, :1])) for p in ps)
    found = sent(lambda ps, x: jax.grad(loss)(ps, x), params, X, bucket_bytes=800)
    assert sorted(size for _, size, _ in found) == messages


def test_a_bucket_is_of_one_dtype() -> None:
    params = [jnp.ones(3, dtype) for dtype in ("float32", "float64", "float32", "float64")]

    def step(ps: Any, x: Any) -> Any:
        return jax.grad(
            lambda ps: sum(jnp.sum(jnp.sin(p * x[:, 0].astype(p.dtype)[:, None])).astype(float) for p in ps)
        )(ps)

    found = programs.of(decorated(step, 8), params, X)
    assert sorted((op.dtype, op.size) for op in found if op.name == "all-reduce") == [("f32", 6), ("f64", 6)]


@pytest.mark.parametrize("within", [None, 2])
def test_gradients_of_layers_with_statistics_share_a_bucket(within: Any) -> None:
    """Each follows from more statistics than the one before; within groups it is also added up across them."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = x @ w
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return jnp.sum(x[:, 0] ** 3)

    tx = jaxdist.zero(optax.sgd(0.1), 2, within)
    params = [jnp.asarray(np.random.default_rng(k).normal(size=(8, 8))) for k in range(4)]
    found = sent(train_step(loss, tx), params, tx.init(params), jnp.ones((64, 8)), on=4)
    assert [size for kind, size, _ in found if kind == "reduce-scatter"] == [4 * 64 // (within or 4)]
    assert [size for kind, size, _ in found if kind == "all-reduce"].count(4 * 64 // 2) == bool(within)


def test_shards_travel_together_and_are_fetched_again_for_the_backward_pass() -> None:
    """All biases in one message; six matrices, five of them twice."""
    params = [{"w": jnp.ones((64, 64)) / 64, "b": jnp.zeros(64)} for _ in range(6)]

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = jnp.tanh(x @ p["w"] + p["b"])
        return jnp.mean(x**2)

    tx = jaxdist.zero(optax.sgd(0.1), 3)
    found = sent(train_step(loss, tx), params, tx.init(params), np.ones((16, 64)), bucket_bytes=1 << 20)
    assert [kind for kind, *_ in found].count("all-gather") == 12


# --- work that stays cut

ROWS = 88  # a size that nothing else has


def info_nce(w: Any, x: Any) -> Any:
    z = jnp.tanh(jnp.concatenate([x, 1.1 * x]) @ w)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, 1))


CUT: dict[str, Callable[[Any, Any], Any]] = {
    "shuffled": lambda w, x: jnp.mean((x[jax.random.permutation(jax.random.key(0), len(x))] @ w) ** 2),
    "two views": info_nce,
    "halves": lambda w, x: jnp.mean((x[: len(x) // 2] @ w) * (x[len(x) // 2 :] @ w)),
    "time-major": lambda w, x: jnp.mean(
        jnp.tanh(jnp.swapaxes(jnp.stack([x, 2 * x, 3 * x], 1), 0, 1).reshape(-1, 6) @ w) ** 2
    ),
    "rolled": lambda w, x: jnp.mean((jnp.roll(x, 1, 0) @ w) * (x @ w)),
    "repeated": lambda w, x: jnp.mean((jnp.repeat(x, 2, 0) @ w) ** 2),
}


@pytest.mark.parametrize("name", CUT)
def test_one_gather_does_not_make_what_follows_n_fold(name: str) -> None:
    x = np.zeros((ROWS, 6))
    f = lambda w, x: jax.value_and_grad(CUT[name])(w, x)
    assert programs.flops(decorated(f, 8), W, x) <= 0.2 * programs.flops(jax.jit(f), W, x)  # an eighth, and padding


@pytest.mark.parametrize("equation", ["bd,dh->bh", "dh,bd->bh", "dh,bd->hb", "bd,dh->hb"])
def test_what_is_stored_moves_and_the_batch_does_not(equation: str) -> None:
    w, x = jaxdist.shard(jnp.ones((64, 48))), np.zeros((ROWS, 64))
    operands = (lambda w, x: (x, w)) if equation.startswith("bd") else (lambda w, x: (w, x))
    found = sent(lambda w, x: jnp.sum(jnp.einsum(equation, *operands(w, x)) ** 2), w, x)
    assert found == [("all-gather", 64 * 48, 0), ("all-reduce", 1, 0)]


def at_labels(w: Any, batch: Any) -> Any:
    def loss(w: Any) -> Any:
        logits = jax.nn.log_softmax(batch["x"] @ w)
        return -logits[jnp.arange(len(logits)), batch["y"]].mean()

    return jax.value_and_grad(loss)(w)


def recurrent(w: Any, x: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), jnp.zeros(x.shape[1:]), x)[0]


LABELLED = {"x": X, "y": RNG.integers(0, 6, 16)}
SEQUENCES = RNG.normal(size=(16, 8, 6))
MESSAGES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "a loop over examples": (lambda w, x: lax.map(lambda r: jnp.sort(r @ w), x), W, X, []),
    "a while of each example": (lambda w, x: jax.vmap(flows.newton)(x[:, 0]), W, X, []),
    "a random mask": (lambda k, x: x * jax.random.bernoulli(k, 0.5, x.shape), jax.random.key(0), X, []),
    "time-major": (lambda w, x: recurrent(w, jnp.swapaxes(x, 0, 1)), W, SEQUENCES, []),
    "a batch wanted in another dimension": (recurrent, W, SEQUENCES, ["all-to-all"]),
    "a step an example": (flows.FLOWS["a step an example"], W, X, ["all-gather"]),
    "an example's own place": (at_labels, W, LABELLED, ["all-reduce"]),
    "right-hand sides": (lambda w, x: jax.scipy.linalg.solve_triangular(w, x.T), W, X, []),
    "rows for right-hand sides": (lambda w, x: lax.linalg.triangular_solve(w, x), W, X, []),
    "the largest of each group": (lambda w, b: jax.ops.segment_max(b["x"], b["y"], 6), W, LABELLED, ["extreme"]),
    "few rows onto many": (
        lambda w, x: jnp.zeros((99, 6)).at[3].max(x[:, 0].sum()).at[jnp.arange(16)].max(x),
        W,
        X,
        ["all-reduce", "all-gather"],
    ),
    "statistics under vmap": (lambda w, x: x - x.mean(0), W, X, ["all-reduce"]),
}
"""A function, its arguments, and the kinds of messages."""


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    f, w, x, kinds = MESSAGES[name]
    found = sent(f, w, x)
    assert [kind for kind, *_ in found] == kinds
    assert {loops for *_, loops in found} <= {0}


def test_a_device_makes_its_own_random_bits() -> None:
    x = np.ones((64, 1024))
    step = decorated(lambda k, x: x * jax.random.bernoulli(k, 0.5, x.shape), 8)
    assert max(op.size for op in programs.of(step, jax.random.key(0), x)) <= 2 * x.size // 8


SLICED = [f"a mask, {loop}" for loop in flows.MASKED]
SLICED += [f"a mask, {loop}, gradient" for loop in flows.MASKED if loop not in ("while", "cond")]


@pytest.mark.parametrize("name", [*SLICED, "dropout in a loop over layers"])
def test_bodies_of_loops_are_given_slices_of_masks(name: str) -> None:
    """Else each device holds masks of the whole batch: of an attention, the largest arrays there are."""
    found = programs.of(decorated(flows.FLOWS[name], 8), flows.W, X)
    assert [op for op in found if op.loops and op.shape[-2:] == X.shape] == []


def test_a_checkpoint_stays_one() -> None:
    layer = jax.checkpoint(flows.layer, policy=jax.checkpoint_policies.nothing_saveable)
    step = lambda w, x: w - jax.grad(lambda w: jnp.mean(layer(w, x) ** 2))(w)
    found = programs.of(decorated(step, 8), W, X)
    assert sum(op.name == "tanh" for op in found) == 2, "computed again"
    assert [op.size for op in found if op.name == "all-reduce"] == [36]


# --- what is split, stays split


def test_results_are_split_where_the_devices_divide_them() -> None:
    more = lambda x: jnp.concatenate([x, x])
    f = lambda w, x: {"rows": x @ w, "columns": x.T, "gram": x @ x.T, "mean": x.mean(0), "more": more(x)}
    even = decorated(f, 4)(W, X)
    whole = {name: x.sharding.is_fully_replicated for name, x in even.items()}
    assert whole == {"rows": False, "columns": False, "gram": False, "mean": True, "more": True}
    assert {s.data.shape for s in even["rows"].addressable_shards} == {(4, 6)}
    odd = decorated(f, 4)(W, X[:13])
    assert all(x.sharding.is_fully_replicated for x in odd.values())


def test_what_is_computed_of_state_in_shards_comes_back_whole() -> None:
    w = jaxdist.shard(np.arange(16.0))
    f = lambda w, x: {"double": 2 * w[:, None], "reversed": w[::-1, None]}
    found = jaxdist.data_parallel(f, batch_argnums="x")(w, X)
    assert {name: x.sharding.is_fully_replicated for name, x in found.items()} == dict.fromkeys(found, True)


# --- few examples travel in place of large weights


def layers_of(params: Any, x: Any) -> Any:
    return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x) ** 2)


def tied(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params[0]) @ params[0].T) ** 2)


def looked_up(params: Any, ids: Any) -> Any:
    return jnp.mean(jnp.tanh(params[0][ids[:, 0]] @ params[1]) ** 2)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


WIDE = [zeros(96, 768), zeros(768, 96)]
TRAVELS: dict[str, tuple[Any, Any, Any, int, int | None]] = {
    "a large batch": (layers_of, WIDE, zeros(4096, 96), 3, 3),
    "few examples, level 3": (layers_of, WIDE, zeros(24, 96), 3, 0),
    "few examples, level 1": (layers_of, WIDE, zeros(24, 96), 1, 2),
    "64 rows beside 512 columns": (layers_of, [zeros(512, 512)] * 2, zeros(64, 512), 3, 0),
    "a weight used twice": (tied, [zeros(512, 512)], zeros(32, 512), 3, None),
    "rows of a table": (looked_up, [zeros(4096, 96), zeros(96, 768)], np.zeros((24, 2), np.int32), 3, 0),
}
"""A loss, its parameters and batch, the level, and how many weights are gathered."""


@pytest.mark.optimised
def test_a_gathered_gradient_is_not_turned_afterwards() -> None:
    """A whole weight that is transposed after the gather is a slow loop, of which the device does all."""

    def step(w: Any, x: Any) -> Any:
        loss = lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) ** 2)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    text = str(decorated(step, 2).lower([zeros(512, 512)] * 2, zeros(16, 512)).compile().as_text())
    assert "all_gather" in text
    assert re.findall(r"f32\[512,512\]\S* (?:transpose|copy)\(", text) == []


@pytest.mark.parametrize("name", TRAVELS)
def test_few_examples_travel_in_place_of_weights(name: str) -> None:
    loss, params, x, level, gathered = TRAVELS[name]
    tx = jaxdist.zero(optax.sgd(0.1), level)  # type: ignore[arg-type]
    found = sent(train_step(loss, tx), params, tx.init(params), x)
    sizes = {p.size for p in params}
    weights = [size for kind, size, _ in found if kind == "all-gather" and size in sizes]
    if gathered is None:  # what is not gathered twice is not gathered once
        assert sum(size for *_, size, _ in found) < 2 * params[0].size
    else:
        assert len(weights) == gathered
    if not gathered:
        assert "all-reduce" not in {kind for kind, size, _ in found if size in sizes}, "no gradient is reduced whole"


def test_explain_says_that_there_is_no_batch() -> None:
    step = decorated(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).mean(), 4, batch_argnums=())
    said = " ".join(str(jaxdist.explain(step, zeros(256, 256), zeros(512, 256))).split())
    assert missing(("100% of the FLOPs", "all of it", "no argument", "batch_argnums"), said) == []


# --- operations that jaxdist does not know


def test_an_error_in_a_rule_of_your_own_names_the_operation_and_its_line() -> None:
    own = Primitive("own_with_a_faulty_rule")
    own.def_abstract_eval(lambda x: x)
    placements.register(own, lambda params, operands, results: params["missing"])
    step = decorated(lambda w, x: w + own.bind(x * w).mean(0), 8)
    with pytest.raises(KeyError, match="missing") as caught:
        step(np.ones(3), np.ones((8, 3)))
    assert missing(("own_with_a_faulty_rule", "test_sent.py:"), " ".join(caught.value.__notes__)) == []


@pytest.mark.parametrize("known", ["vectorized", "described", "by a function", "refused", ""])
def test_an_operation_of_your_own(known: str, caplog: pytest.LogCaptureFixture) -> None:
    """What JAX registers as elementwise, or the user describes, runs on slices; others are computed whole, and said."""
    own = Primitive(f"own_{known}")
    own.def_impl(lambda x: x + 1)
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(lambda x: x + 1, multiple_results=False))
    if known == "vectorized":
        batching.defvectorized(own)
    elif known == "described":
        placements.register(own, "b... -> b...")
    elif known:
        described = "b... -> b..." if known == "by a function" else None
        placements.register(own.name, lambda params, operands, results: described)
    w, x = np.ones(3), np.arange(24.0).reshape(8, 3)
    step = decorated(lambda w, x: w + own.bind(x * w).mean(0), 8)
    np.testing.assert_allclose(step(w, x), w + (x + 1).mean(0))
    said = [m for m in caplog.messages if f"own_{known}" in m and "test_sent.py:" in m]
    assert len(said) == (known in ("refused", ""))
