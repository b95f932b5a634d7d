"""Loops and branches: what they carry, how often they reduce, and that they are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parity
import pytest
from jax import lax
from jax._src.interpreters.partial_eval import dce_jaxpr

from jaxdist.ir.interpreter import subjaxprs

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(6, 6)) / 3)
WAYS = [(2, 8), (4, 5), (8, 16), (3, 8)]
"""Devices, examples."""


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(layer(w, x) ** 2)


def turns(x: Any, k: int = 4) -> Any:
    """As many parts, whatever the batch: its end is left out."""
    n = len(x) // k if len(x) >= k else 1
    return jnp.resize(x, (k, n, *x.shape[1:])) if len(x) < k else x[: k * n].reshape(k, n, *x.shape[1:])


def newton(x: Any) -> Any:
    """A root, in a number of turns that depends on the example."""
    start = (x, jnp.asarray(0))
    y, n = lax.while_loop(
        lambda s: (jnp.abs(s[0] ** 2 - x**2 - 2) > 1e-3) & (s[1] < 50),
        lambda s: ((s[0] + (x**2 + 2) / s[0]) / 2, s[1] + 1),
        (start[0] + 3, start[1]),
    )  # fmt: skip
    return y, n


def masked(w: Any, x: Any, loop: str) -> Any:
    """Layers that close over a mask and a filler as large as the batch, as an attention's under ``vmap``."""
    mask, filler = jnp.broadcast_to(jnp.tri(6, dtype=bool)[2], x.shape), jnp.full(x.shape, -0.5)
    hidden = lambda h, w: jnp.where(mask, layer(w, h), filler)
    if loop == "scan":
        return lax.scan(lambda h, w: (hidden(h, w), None), x, jnp.stack([w, w.T]))[0]
    if loop == "checkpoint in scan":
        return lax.scan(jax.checkpoint(lambda h, w: (hidden(h, w), None)), x, jnp.stack([w, w.T]))[0]
    if loop == "while":
        return lax.while_loop(lambda s: s[1] < 2, lambda s: (hidden(s[0], w), s[1] + 1), (x, 0))[0]
    if loop == "cond":
        return lax.cond(w[0, 0] > 0, lambda: hidden(x, w), lambda: jnp.where(mask, x, 1.0))
    assert loop == "checkpoint"
    return jax.checkpoint(hidden)(x, w)


def dropped(carry: Any, w: Any) -> Any:
    """A layer with dropout, for a scan."""
    h, key = carry
    key, own = jax.random.split(key)
    kept = jax.random.bernoulli(own, 0.7, h.shape)
    return (jnp.where(kept, layer(w, h) / 0.7, 0.0), key), None


MASKED = ["scan", "checkpoint in scan", "while", "cond", "checkpoint"]
FLOWS: dict[str, Callable[[Any, Any], Any]] = {
    **{f"a mask, {loop}": lambda w, x, loop=loop: masked(w, x, loop) for loop in MASKED},
    **{
        f"a mask, {loop}, gradient": lambda w, x, loop=loop: jax.grad(lambda w: jnp.mean(masked(w, x, loop) ** 2))(w)
        for loop in MASKED
        if loop != "while"
    },
    "dropout in a loop over layers, gradient": lambda w, x: jax.grad(
        lambda ws: jnp.mean(lax.scan(dropped, (x, jax.random.key(0)), ws)[0][0] ** 2)
    )(jnp.stack([w, 2 * w, w.T])),
    "dropout in a loop over layers, remat": lambda w, x: jax.grad(
        lambda ws: jnp.mean(lax.scan(jax.checkpoint(dropped), (x, jax.random.key(0)), ws)[0][0] ** 2)
    )(jnp.stack([w, 2 * w, w.T])),
    "a mask, whole and in slices": lambda w, x: lax.scan(
        lambda c, w: ((jnp.where(c[1], c[0] @ w, 0.0), c[1]), c[1].sum()),
        (x, jnp.ones(x.shape, bool)),
        jnp.stack([w] * 2),
    ),
    "a mask that a loop also returns": lambda w, x: (
        lambda m: lax.scan(lambda h, w: (jnp.where(m > 0, h @ w, 0), m), x, jnp.stack([w] * 2))
    )(jnp.ones(x.shape)),
    "scan over examples": lambda w, x: lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c.sum()), jnp.zeros(6), x),
    "scan over examples, added": lambda w, x: lax.scan(lambda c, r: (c + jnp.sin(r @ w), r.max()), w[0], x),
    "reverse": lambda w, x: lax.scan(lambda c, r: (c * 0.5 + r, c), jnp.zeros(6), x, reverse=True),
    "unrolled": lambda w, x: lax.scan(lambda h, w: (layer(w, h), None), x, jnp.stack([w] * 4), unroll=2),
    "a sum that each turn uses": lambda w, x: lax.scan(
        lambda c, p: (c + jax.grad(loss)(w - 0.1 * c, p), None), jnp.zeros_like(w), turns(x)
    ),
    "a clipped sum": lambda w, x: lax.scan(
        lambda c, p: (jnp.clip(c + jax.grad(loss)(w, p), -0.1, 0.1), None), jnp.zeros_like(w), turns(x)
    ),
    "a swap": lambda w, x: lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + x.sum(0)), (x.mean(0), w[0])),
    "nested": lambda w, x: lax.scan(
        lambda c, p: (lax.fori_loop(0, 2, lambda i, c: c + jax.grad(loss)(w, p) * i, c), None),
        jnp.zeros_like(w),
        turns(x),
    ),
    "lax.map": lambda w, x: [lax.map(lambda r: jnp.sort(r) @ w, x), lax.map(lambda r: r.sum(), x, batch_size=2)],
    "while of the batch": lambda w, x: lax.while_loop(
        lambda c: jnp.abs(c[0]).max() > 0.1, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0)
    ),
    "while of the state": lambda w, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x.sum(0)), (0, w[0])
    ),
    "while, the sum decides": lambda w, x: lax.while_loop(lambda c: c.sum() < 5, lambda c: c + jnp.abs(x).sum(0), w[0]),
    "power iteration": lambda w, x: lax.while_loop(
        lambda c: c[1] < 20,
        lambda c: ((lambda v: v / jnp.linalg.norm(v))(x.T @ (x @ c[0])), c[1] + 1),
        (jnp.ones(6), 0),
    )[0],
    "vmap of while, of two dimensions": lambda w, x: jax.vmap(jax.vmap(newton))(x),
    "vmap of cond": lambda w, x: jax.vmap(lambda r: lax.cond(r.sum() > 0, jnp.sin, jnp.cos, r))(x),
    "cond of the batch": lambda w, x: lax.cond(x.sum() > 0, lambda: x.mean(0), lambda: (x**2).mean(0)),
    "cond with nothing": lambda w, x: lax.cond(x.max() > 0, lambda: jax.grad(loss)(w, x), lambda: jnp.zeros_like(w)),
    "cond with a whole value": lambda w, x: [
        lax.cond(x.max() > c, lambda: (x.sum(0), x), lambda: (w[0], x * 2)) for c in (-100.0, 100.0)
    ],
    "cond of sums": lambda w, x: (lambda g: lax.cond(x.max() > 0, lambda g: g + 1, lambda g: -g, g))(x.sum(0)),
    "switch": lambda w, x: lax.switch(
        jnp.argmax(x.sum(0)) % 3, [lambda x: x.sum(0), lambda x: x.max(0), lambda x: x[0]], x
    ),
    "cond, gradient": lambda w, x: jax.grad(lambda w: lax.cond(w[0, 0] > 0, lambda: loss(w, x), lambda: jnp.zeros(())))(
        jnp.abs(w)
    ),
    "checkpoint": lambda w, x: jax.grad(lambda w: jnp.mean(jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, x)) ** 2))(
        w
    ),
    "an associative scan": lambda w, x: lax.associative_scan(lambda a, b: a + 0.5 * b, x),
    "carries of integers": lambda w, x: lax.scan(
        lambda c, r: (c + (r > 0).sum().astype(jnp.uint8), c), jnp.uint8(250), x
    ),
    "carries of 16 bits": lambda w, x: lax.scan(lambda c, p: (c + p.sum(0), None), w[0] * 0, turns(jnp.round(x)))[0],
    "the last gradient": lambda w, x: lax.scan(lambda c, p: (jax.grad(loss)(w, p), None), jnp.zeros_like(w), turns(x))[
        0
    ],
    "custom root": lambda w, x: jax.grad(
        lambda a: lax.custom_root(
            lambda y: y**3 - a * x.sum() ** 2,
            1.0,
            lambda f, y: lax.fori_loop(0, 60, lambda i, y: y - f(y) / (3 * y**2 + 1e-9), y),
            lambda g, y: y / g(1.0),
        )
    )(2.0),
    "a solver": lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: x.T @ (x @ v) + v, w[0], maxiter=8)[0],
}


@pytest.mark.parametrize("name", FLOWS)
def test_as_on_one_device(name: str) -> None:
    for i in (0, 1):
        devices, rows = WAYS[(2 * list(FLOWS).index(name) + i) % len(WAYS)]
        parity.check(FLOWS[name], W, RNG.normal(size=(rows, 6)), devices=devices)


# --- accumulation


def accumulate(loop: str, body: Callable[[Any, Any], Any], start: Any, parts: Any) -> Any:
    """``start`` and what `body` adds to it, as users write it."""
    k = len(jax.tree.leaves(parts)[0])
    part = lambda i: jax.tree.map(lambda x: x[i], parts)
    if loop == "scan":
        return lax.scan(lambda c, p: (body(c, p), None), start, parts)[0]
    if loop == "fori":
        return lax.fori_loop(0, k, lambda i, c: body(c, part(i)), start)
    if loop == "while":
        return lax.while_loop(lambda s: s[0] < k, lambda s: (s[0] + 1, body(s[1], part(s[0]))), (0, start))[1]
    assert loop == "python"
    for i in range(k):
        start = body(start, part(i))
    return start


X = RNG.normal(size=(32, 6))


@pytest.mark.parametrize(
    ("loop", "k"), [("scan", 2), ("scan", 16), ("fori", 4), ("fori", 8), ("while", 2), ("while", 4), ("python", 4)]
)
def test_accumulated_gradients_are_reduced_once_after_the_loop(loop: str, k: int) -> None:
    def step(w: Any, x: Any) -> Any:
        parts = x.reshape(k, -1, 6)
        add = lambda c, p: jax.tree.map(jnp.add, c, jax.value_and_grad(loss)(w, p))
        value, grad = accumulate(loop, add, (jnp.zeros(()), jnp.zeros_like(w)), parts)
        return w - grad / k, value / k

    parity.check(step, W, X, devices=8)
    if loop != "scan" and 32 // k < 8:
        return  # parts of fewer examples than there are devices, picked one by one: each device computes them whole
    found = parity.collectives(parity.program(step, W, X, bucket_bytes=0))
    reductions = [one for one in found if one[0] == "all-reduce"]
    assert sorted(reductions) == [("all-reduce", (), ""), ("all-reduce", (6, 6), "")]
    assert all(kind in ("all-gather", "all-to-all") and where == "" for kind, _, where in found if kind != "all-reduce")


@pytest.mark.parametrize("loop", ["scan", "fori"])
def test_a_penalty_on_the_weights_does_not_keep_the_reduction_in_the_loop(loop: str) -> None:
    def step(w: Any, x: Any) -> Any:
        penalised = lambda w, p: loss(w, p) + 0.1 * jnp.sum(w**2)
        return w - accumulate(loop, lambda c, p: c + jax.grad(penalised)(w, p), jnp.zeros_like(w), x.reshape(4, -1, 6))

    found = [one for one in parity.collectives(parity.program(step, W, X)) if one[0] == "all-reduce"]
    assert found == [("all-reduce", (6, 6), "")]
    parity.check(step, W, X, devices=8)


def test_the_sum_starts_where_the_user_says() -> None:
    def step(w: Any, x: Any) -> Any:
        return accumulate("scan", lambda c, p: c + jax.grad(loss)(w, p), w * 3, x.reshape(4, -1, 6))

    parity.check(step, W, X, devices=8)


@pytest.mark.parametrize("name", ["a sum that each turn uses", "a clipped sum"])
def test_a_sum_that_each_turn_uses_is_reduced_in_each(name: str) -> None:
    found = parity.collectives(parity.program(FLOWS[name], W, X))
    assert [where for kind, shape, where in found if kind == "all-reduce" and shape == (6, 6)] == ["scan 4/"]


def test_microbatches_on_each_device_are_its_own() -> None:
    """``i::k``: no device sends examples."""
    import jaxdist

    def step(w: Any, x: Any) -> Any:
        value, grads = jaxdist.value_and_grad(loss, microbatches=4)(w, x)
        return w - grads, value

    found = parity.collectives(parity.program(step, W, X, bucket_bytes=0))
    assert sorted(found) == [("all-reduce", (), ""), ("all-reduce", (6, 6), "")]
    parity.check(step, W, X, devices=8)
    parity.check(step, W, X[:28], devices=8)


# --- a model in a loop over its layers, whose gradients come out stacked up: here 74 kB of them, too many to wait


def in_scan(ws: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2)


def in_groups(ws: Any, x: Any) -> Any:
    """Of two layers, the activations of each group computed again."""
    group = jax.checkpoint(lambda h, ws: (lax.scan(lambda h, w: (layer(w, h), None), h, ws)[0], None))
    return jnp.mean(lax.scan(group, x, ws.reshape(2, 2, *ws.shape[1:]))[0] ** 2)


MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "scan": in_scan,
    "in groups": in_groups,
    "remat of the model": lambda ws, x: jax.checkpoint(in_scan)(ws, x),
    "twice": lambda ws, x: in_scan(ws, x) + in_scan(ws, -x[::-1]),
    "penalised": lambda ws, x: in_scan(ws, x) + 0.1 * jnp.sum(ws**2),
    "in a branch": lambda ws, x: lax.cond(x.sum() > -1e9, in_scan, lambda ws, x: jnp.zeros(()), ws, x),
}
STACK = jnp.asarray(RNG.normal(size=(4, 96, 96)) / 10)
ROWS = RNG.normal(size=(32, 96))


def parts_of(x: Any) -> Any:
    return jnp.moveaxis(x.reshape(-1, 4, x.shape[-1]), 1, 0)


@pytest.mark.parametrize(
    ("name", "loop"),
    [(name, ("scan", "fori", "while")[i % 3]) for i, name in enumerate(MODELS)] + [("scan", "fori"), ("scan", "while")],
)
def test_gradients_of_layers_in_a_loop_are_reduced_once_after_the_microbatches(name: str, loop: str) -> None:
    def step(ws: Any, x: Any) -> Any:
        add = lambda c, p: jax.tree.map(lambda a, b: a + b / 4, c, jax.value_and_grad(MODELS[name])(ws, p))
        value, grad = accumulate(loop, add, (jnp.zeros(()), jnp.zeros_like(ws)), parts_of(x))
        return ws - grad, value

    found = parity.collectives(parity.program(step, STACK, ROWS, bucket_bytes=0))
    reductions = sorted(one for one in found if one[0] == "all-reduce" and one[1])
    assert reductions == [("all-reduce", STACK.shape, "")]
    parity.check(step, STACK, ROWS, devices=8)


@pytest.mark.parametrize(("name", "level"), [("scan", 0), ("scan", 1), ("in groups", 2), ("scan", 3), ("in groups", 3)])
def test_at_each_level_of_zero(name: str, level: Any) -> None:
    """What is wanted in slices is reduced into them, once too; and parameters are gathered where they are used."""
    import jaxdist

    tx = jaxdist.zero(optax.sgd(0.1, momentum=0.9), level)

    def step(ws: Any, opt_state: Any, x: Any) -> Any:
        value, grads = jaxdist.value_and_grad(MODELS[name], microbatches=4)(ws, x)
        updates, opt_state = tx.update(grads, opt_state, ws)
        return optax.apply_updates(ws, updates), opt_state, value

    args = STACK, tx.init(STACK), ROWS
    found = [one for one in parity.collectives(parity.program(step, *args, bucket_bytes=0)) if one[1]]
    assert [one for one in found if one[0] != "all-gather"] == [
        ("reduce-scatter", (4, 12, 96), "") if level else ("all-reduce", STACK.shape, "")
    ]
    gathers = {one[1:] for one in found if one[0] == "all-gather"}
    if level < 3:
        assert gathers == ({(STACK.shape, "")} if level else set())
    else:
        assert {shape for shape, _ in gathers} == {(96, 96)}
    parity.check(step, *args, devices=8)


def test_a_stack_that_each_turn_uses_is_reduced_layer_by_layer() -> None:
    def step(ws: Any, x: Any) -> Any:
        add = lambda c, p: c + (lambda g: g / jnp.linalg.norm(g))(jax.grad(in_scan)(ws, p))
        return ws - accumulate("scan", add, jnp.zeros_like(ws), parts_of(x))

    found = [one for one in parity.collectives(parity.program(step, STACK, ROWS, bucket_bytes=0)) if one[1]]
    assert found == [("all-reduce", (96, 96), "scan 4/scan 4/")]
    parity.check(step, STACK, ROWS, devices=8)


def test_without_microbatches_layers_are_reduced_one_by_one() -> None:
    """While the next one's gradient is computed."""
    found = parity.collectives(parity.program(lambda ws, x: ws - jax.grad(in_scan)(ws, x), STACK, ROWS))
    assert found == [("all-reduce", (96, 96), "scan 4/")]


def test_16_bit_stacks_wait_in_32_bits() -> None:
    half = STACK.astype(jnp.bfloat16)

    def step(ws: Any, x: Any) -> Any:
        add = lambda c, p: c + jax.grad(in_scan)(ws, p).astype(jnp.float32)
        return accumulate("scan", add, jnp.zeros(ws.shape, jnp.float32), parts_of(x))

    big = jnp.asarray(np.tile(half, (1, 2, 2)))
    rows = jnp.asarray(np.tile(ROWS, (1, 2)), jnp.bfloat16)
    found = parity.collectives(parity.program(step, big, rows, bucket_bytes=0))
    assert found == [("all-reduce", big.shape, "")]
    parity.check(step, big, rows, devices=8, tolerance=2**-7)


def test_a_loop_over_examples_runs_a_devices_own_turns() -> None:
    program = parity.program(lambda w, x: lax.map(lambda r: jnp.sort(r @ w), x), W, X)
    assert parity.collectives(program) == []
    (length,) = [eqn.params["length"] for eqn in program.eqns if eqn.primitive.name == "scan"]
    assert length == 4


def test_a_while_over_examples_keeps_its_own_count() -> None:
    program = parity.program(lambda w, x: jax.vmap(newton)(x[:, 0]), W, X)
    assert parity.collectives(program) == []


def test_a_checkpoint_stays_one() -> None:
    policy = jax.checkpoint_policies.nothing_saveable

    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(jax.checkpoint(layer, policy=policy)(w, x) ** 2))(w)

    program = parity.program(step, W, X)
    (remat,) = [eqn for eqn in program.eqns if eqn.primitive.name in ("checkpoint", "remat", "remat2")]
    assert remat.params["policy"] is policy
    assert parity.collectives(program) == [("all-reduce", (6, 6), "")]


def test_what_is_made_of_a_mask_in_many_ways_is_looked_at_once() -> None:
    """Not by the power of their number."""

    def step(w: Any, x: Any) -> Any:
        mixed = jnp.broadcast_to(jnp.arange(6), x.shape)

        def body(h: Any, w: Any) -> Any:
            bits = mixed
            for _ in range(60):
                bits = (bits ^ (bits << 1)) + (bits >> 1)
            return jnp.where(bits > 0, layer(w, h), h), None

        return lax.scan(body, x, jnp.stack([w, w]))[0]

    parity.check(step, W, X, devices=4)


# A `while` has no gradient; that of a `cond` has the branch return the mask as a residual.
_SLICED = [(loop, False) for loop in MASKED] + [(loop, True) for loop in MASKED if loop not in ("while", "cond")]


@pytest.mark.parametrize(("loop", "gradient"), _SLICED)
def test_a_body_is_given_slices_of_what_it_uses_in_slices(loop: str, gradient: bool) -> None:
    """Else each device holds masks of the whole batch: of an attention, the largest arrays there are."""

    def step(w: Any, x: Any) -> Any:
        value = lambda w: jnp.mean(masked(w, x, loop) ** 2)
        return jax.grad(value)(w) if gradient else value(w)

    program = parity.program(step, W, X)
    used, _ = dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    whole = [v.aval for eqn in _all(used) for v in eqn.outvars if v.aval.shape == X.shape]
    assert whole == []


def test_the_masks_of_dropout_that_a_loop_stacks_up_are_slices() -> None:
    def step(w: Any, x: Any) -> Any:
        return FLOWS["dropout in a loop over layers, gradient"](w, x)

    used, _ = dce_jaxpr(parity.program(step, W, X), [True], instantiate=True)
    assert [v.aval for eqn in _all(used) for v in eqn.outvars if v.aval.shape[-2:] == X.shape] == []


def _all(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from _all(inner)


def test_nested_loops_are_traced_once() -> None:
    """And placed a few times at most: not by the power of their depth."""
    traced: list[int] = []

    def deep(w: Any, x: Any, depth: int) -> Any:
        if not depth:
            traced.append(1)
            return jax.grad(loss)(w, x)
        return lax.scan(lambda c, _: (c + deep(w - 0.1 * c, x, depth - 1), None), jnp.zeros_like(w), None, length=2)[0]

    from jaxdist.placements import walk

    walks: list[int] = []
    original = walk.Walk.__init__

    def counting(self: Any, *args: Any) -> None:
        walks.append(1)
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk.Walk, "__init__", counting)
        counts = []
        for depth in (1, 2, 3, 4):
            walks.clear()
            traced.clear()
            parity.program(lambda w, x, depth=depth: deep(w, x, depth), W, X)
            counts.append(len(walks))
            assert len(traced) <= 2 * depth  # jax's own
    assert counts[3] - counts[2] <= 2 * (counts[2] - counts[1]) + 4, counts


def test_the_last_turns_effects_and_order() -> None:
    """Loops whose collectives sit in branches: all devices take the same."""

    def step(w: Any, x: Any) -> Any:
        def turn(c: Any, p: Any) -> Any:
            up = lambda: c + jax.grad(loss)(w - c, p)
            return lax.cond(p.sum() > 0, up, lambda: c * 0.5), p.max()

        return lax.scan(turn, jnp.zeros_like(w), x.reshape(4, -1, 6))

    parity.check(step, W, X, devices=8)


@pytest.mark.parametrize("rows", [16, 13])
def test_a_loop_over_single_examples_sends_nothing_in_its_turns(rows: int) -> None:
    """Each turn needs the one before: the batch is gathered once, and the loop is every device's."""

    def step(w: Any, x: Any) -> Any:
        def turn(w: Any, row: Any) -> Any:
            loss, grad = jax.value_and_grad(lambda w: jnp.sum((row @ w) ** 2))(w)
            return w - 0.01 * grad, loss

        return lax.scan(turn, w, x)

    w, x = jnp.eye(6), np.random.default_rng(0).normal(size=(rows, 6))
    parity.check(step, w, x, devices=8)
    assert [where for *_, where in parity.collectives(parity.program(step, w, x))] == [""]
