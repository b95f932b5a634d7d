"""Which arguments are the batch: by what they are, by what the step returns, by what the ranks come with."""

from __future__ import annotations

import collections
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.step import signature, signing
from jaxdist.step.batch import AmbiguousError, Argument, length, pieces, sizes, which

RNG = np.random.default_rng(0)
X, Y, Z = RNG.normal(size=(16, 4)), RNG.normal(size=16), RNG.normal(size=(24, 4))
W = jnp.asarray(RNG.normal(size=4))
PARAMS = {"w": W, "b": jnp.zeros(())}
KEY = jax.random.key(0)
Pair = collections.namedtuple("Pair", "x y")


def batch_of(decorated: Any) -> list[str]:
    """Names of the leaves that are taken for the batch."""
    (program,) = decorated._cache.programs.values()
    return [program.signature.names[i] for i in program.signature.batch]


def read(step: Any, *args: Any, **options: Any) -> list[str]:
    decorated: Any = jaxdist.data_parallel(step, donate=False, **options)
    decorated.lower(*args)
    return batch_of(decorated)


def loss_of(w: Any, x: Any, y: Any = 0.0) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def test_what_of_an_argument_can_be_cut() -> None:
    assert sizes([X, Y]) == [16, 16]
    assert sizes([]) == []
    assert sizes([X, np.ones(3)]) == [16, 3]
    assert sizes([X, np.float32(1), 3, jnp.asarray(2.0), KEY, True]) == [16, *[None] * 5]
    assert sizes([X, jax.random.split(KEY, 16)]) == [16, 16]
    assert sizes([X, np.ones((0, 2))]) == [16, None]
    assert sizes([np.ones((0, 2))]) == [0]  # an error will come
    assert sizes([jax.random.PRNGKey(0)]) == [None]
    assert sizes([X, jax.random.PRNGKey(0)]) == [16, None]
    assert sizes([X[:2], np.zeros(2, np.uint32)]) == [2, 2]  # labels, of two examples
    assert sizes([X, Y], lambda x: x is Y) == [16, None]
    assert [length(of) for of in ([16, 16], [16, None], [16, 3], [None], [])] == [16, 16, None, None, None]


def noise(keys: Any) -> Any:
    return jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)


def descent(loss: Any) -> Any:
    return lambda w, *batch: (w - 0.1 * jax.grad(loss)(w, *batch), loss(w, *batch))


def graph_loss(w: Any, g: Any) -> Any:
    sent = jax.ops.segment_sum(jnp.tanh(g["nodes"] @ w)[g["from"]], g["to"], num_segments=g["nodes"].shape[0])
    return jnp.mean(sent**2) * jnp.mean(g["y"])


GRAPH = {"from": RNG.integers(0, 24, 17), "nodes": Z, "to": RNG.integers(0, 24, 17), "y": RNG.normal(size=3)}
scaled: Any = lambda w, b: loss_of(w, b["x"]) * b["s"]
TEACHER = {"w": W, "b": jnp.ones(3)}


@pytest.mark.parametrize(
    ("step", "args", "batch"),
    [
        (lambda state, batch: jax.tree.map(lambda p: p - loss_of(W, batch), state), (PARAMS, X), ["batch"]),
        (lambda w, x: w - jax.grad(loss_of)(w, x), (W, X), ["x"]),
        (lambda w, x, y: w - jax.grad(loss_of)(w, x, y), (W, X, Y), ["x", "y"]),
        (lambda p, x, y: loss_of(p["w"], x, y), (PARAMS, X, Y), ["x", "y"]),
        (lambda w, x, y: loss_of(w, x, y), (W, X, Y), ["x", "y"]),
        (lambda x, w: w - jax.grad(loss_of)(w, x), (X, W), ["x"]),
        (lambda w, x, key: w - loss_of(w, x + jax.random.normal(key, x.shape)), (W, X, KEY), ["x"]),
        (lambda w, x, key: w - loss_of(w, x + jax.random.normal(key, x.shape)), (W, X, jax.random.PRNGKey(0)), ["x"]),
        (lambda w, real, z: w - jax.grad(lambda w: loss_of(w, real) + loss_of(w, z))(w), (W, X, Z), ["real", "z"]),
        (lambda p, scale, x: loss_of(p["w"], x) * scale.sum(), (PARAMS, jnp.ones(3), X), ["scale", "x"]),
        (lambda p, stats, x: loss_of(p["w"], x / stats), (PARAMS, jnp.ones(4), X), ["x"]),
        (lambda w, lr, x: w - lr * jax.grad(loss_of)(w, x), (W, 0.1, X), ["x"]),
        (lambda w, b: loss_of(w, b.x, b.y), (W, Pair(X, Y)), ["b.x", "b.y"]),
        (lambda predictions, labels: jnp.mean((predictions - labels) ** 2), (Y, 2 * Y), ["predictions", "labels"]),
        (lambda x: jnp.mean(x, 0), (X,), ["x"]),
        (lambda w: w - jax.grad(lambda w: (w**2).sum())(w), (W,), []),
        (lambda key: jax.random.normal(key, (3,)), (KEY,), []),
        (lambda p: jax.tree.map(jnp.zeros_like, p), (PARAMS | {"b": jnp.ones(3)},), []),
        (lambda p: jax.tree.map(jnp.zeros_like, p), (PARAMS | {"c": Y},), []),
        # Leaves of the batch: numbers and single keys are whole; of several lengths is split what can be twice as long.
        (descent(scaled), (W, {"x": X, "s": 2.0}), ["x"]),
        (descent(scaled), (W, {"x": X[:5], "s": np.float32(2)}), ["x"]),
        (scaled, (W, {"x": X, "s": jnp.asarray(2.0)}), ["x"]),
        (lambda b, p: scaled(p["w"], b), ({"x": X, "s": 2.0}, PARAMS), ["x"]),
        (lambda x, p: x @ p["w"] + p["b"], (X, PARAMS), ["x"]),
        (descent(lambda w, b: sum(loss_of(w, b["x"]) for _ in range(b["n"]))), (W, {"x": X, "n": 2}), ["x"]),
        (descent(lambda w, b: loss_of(w, b["x"]) if b["kind"] == "mean" else 0.0), (W, {"x": X, "kind": "mean"}),
         ["x"]),
        (descent(lambda w, b: loss_of(w, b["x"] + noise(b["k"]))), (W, {"x": X, "k": jax.random.split(KEY, 16)}),
         ["k", "x"]),
        (descent(lambda w, x, k: loss_of(w, x + noise(k))), (W, X, jax.random.split(KEY, 16)),
         ["batch[0]", "batch[1]"]),
        (descent(lambda w, b: loss_of(w, b["x"] + noise(b["k"][None])[0])), (W, {"x": X, "k": KEY}), ["x"]),
        (descent(lambda w, b: loss_of(w, b[0]) + loss_of(w, b[1])), (W, [X, Z[:7]]), ["batch[0][0]", "batch[0][1]"]),
        (graph_loss, (W, GRAPH), ["from", "nodes", "to", "y"]),
        (descent(lambda w, g, y: graph_loss(w, g) + y.mean()), (W, GRAPH, Y), ["from", "nodes", "to", "y", "batch[1]"]),
        (descent(lambda w, b: jnp.mean(b["y"] * (b["x"] @ jnp.outer(w, b["c"]) * np.arange(3)).sum(1))),
         (W, {"c": np.ones(3), "x": X, "y": Y}), ["x", "y"]),
        (descent(lambda w, b: loss_of(w, b["x"] * b["one"])), (W, {"one": np.ones((1, 4)), "x": X}), ["x"]),
        (descent(lambda w, b: loss_of(w, b["x"]) + b["none"].sum()), (W, {"none": np.ones((0, 2)), "x": X}), ["x"]),
        (descent(lambda w, t, x: loss_of(w + t["w"], x) * t["b"].sum()), (W, TEACHER, X), ["batch[1]"]),
        (lambda s, b: ({"w": s["w"] - scaled(s["w"], b), "k": jax.random.split(s["k"])[0]}, 0.0),
         ({"w": W, "k": KEY}, {"x": X, "s": 2.0}), ["x"]),
        (lambda w, x, k: (w - loss_of(w, x + noise(k)), jax.vmap(lambda k: jax.random.split(k)[0])(k)),
         (W, X, jax.random.split(KEY, 16)), ["x"]),
    ],
)  # fmt: skip
def test_what_is_the_batch(step: Any, args: Any, batch: list[str]) -> None:
    assert [name.rpartition("['")[2].removesuffix("']") for name in read(step, *args)] == batch


def test_what_earlier_calls_left_on_the_mesh() -> None:
    """What is whole there stays whole, inside of a batch too, and is none; what is of the examples is split."""
    centres = jaxdist.data_parallel(lambda c, x: c + x.mean(0), donate=False)(jnp.zeros((3, 4)), X)
    assert read(lambda w, b: loss_of(w, b["x"] - b["c"][0]), W, {"x": X, "c": centres}) == ["b['x']"]
    w, _ = jaxdist.data_parallel(lambda w, x: (w * 0.5, loss_of(w, x)), donate=False)(W, X)
    assert read(lambda w, x: loss_of(w, x), w, X[:4]) == ["x"]  # as long as the weights
    features = jaxdist.data_parallel(lambda w, x: jnp.tanh(x * w), donate=False)(W, X)
    step, batch = jaxdist.data_parallel(scaled, donate=False), {"x": features, "s": 2.0}
    np.testing.assert_allclose(step(W, batch), scaled(W, {"x": np.tanh(X * W), "s": 2.0}))
    assert batch_of(step) == ["b['x']"]


def test_an_argument_that_is_said_to_be_the_batch_has_leaves_that_are_one_for_all() -> None:
    step = jaxdist.data_parallel(scaled, batch_argnums="b", donate=False)
    for s in (2.0, np.float64(2), jnp.asarray(2.0)):
        np.testing.assert_allclose(step(W, {"x": X, "s": s}), scaled(W, {"x": X, "s": 2.0}))
    with pytest.raises(ValueError, match=r"b\['s'\] is a scalar"):
        jaxdist.data_parallel(scaled, batch_argnums="b['s']")(W, {"x": X, "s": jnp.asarray(2.0)})


def test_the_readings_that_are_tried_are_few() -> None:
    tried: list[Any] = []

    def traces(cut: Any) -> bool:
        tried.append(cut)
        return cut == {(2, 8), (2, 12)}

    arguments = [{4: [0]}, {64: [1], 32: [2]}, {8: [3], 12: [4]}]
    assert pieces(arguments, [], [0, 1, 2], traces) == {(2, 8), (2, 12)}
    assert len(tried) <= 7
    tried.clear()
    many = [{n: [n] for n in range(1, 99)} for _ in range(9)]
    assert pieces(many, [], range(9), traces) == set()
    assert len(tried) <= 2**5 + 9 * 8


M, N = RNG.normal(size=(64, 64)), RNG.normal(size=(128, 64))


def looped(m: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 9, lambda i, x: jnp.tanh(x @ m), x)


def variational(i: Any, state: Any) -> Any:
    """A step without a batch, on a state of arrays of one length: jax's examples/advi.py."""
    noise = jax.random.normal(jax.random.key(i), (4, 2))
    grads = jax.grad(lambda s: jnp.mean((s["mean"] + jnp.exp(s["log"]) * noise) ** 2) - s["log"].sum())(state)
    return jax.tree.map(lambda x, g: x - 0.1 * g, state, grads)


def variational_in_parts(i: Any, mean: Any, log: Any) -> Any:
    out = variational(i, {"mean": mean, "log": log})
    return out["mean"], out["log"]


MEANS = {"mean": np.ones(2), "log": np.zeros(2)}
# It can't be traced with more examples: x is 64 wide, and as long.
SQUARE: Any = lambda w, b: looped(w, b["x"] @ b["x"].T)


@pytest.mark.parametrize(
    ("step", "args", "options", "said"),
    [
        (SQUARE, (M, {"x": M, "s": 2.0}), {}, "no argument is taken for the batch, so each"),
        (SQUARE, (M, {"x": M, "s": 2.0}), {"batch_argnums": ()}, ""),
        (lambda key, m: (looped(m, m), m), (KEY, M), {}, "m is taken for the batch"),  # and is returned
        (lambda key: looped(jax.random.normal(key, (64, 64)), jnp.ones((64, 64))), (KEY,), {}, ""),
        (lambda p: jax.tree.map(lambda x: x * 2, p), ({"a": M, "b": N},), {}, ""),  # as much work as to make it
        (lambda w, x: looped(w, x), (M, N), {}, ""),
        (variational, (1, MEANS), {}, "state is taken for the batch and split over the devices"),
        (variational, (1, MEANS), {"batch_argnums": ()}, ""),
        (variational, (1, MEANS), {"batch_argnums": "state"}, ""),
        (variational_in_parts, (1, np.ones(2), np.zeros(2)), {}, "mean and log are taken for the batch"),
        (lambda w, x: x - 0.1 * jax.grad(lambda x: jnp.sum((x @ w) ** 2))(x), (W, X), {}, ""),  # w may be the state
        (lambda i, x: jnp.tanh(x) * i, (2, X), {}, ""),  # no next value
    ],
)
def test_that_nothing_is_split_or_what_may_be_state_is_said_once(
    step: Any, args: Any, options: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "jaxdist")
    decorated = jaxdist.data_parallel(step, donate=False, **options)
    for _ in range(2):
        decorated(*args)
    texts = [text for text in caplog.messages if "taken for the batch" in text]
    assert len(texts) == bool(said), texts
    assert all(said in text and "batch_argnums=() says that there is no batch" in text for text in texts)
    unsplit = "no argument is taken for the batch" in str(jaxdist.explain(decorated, *args))
    assert unsplit == (not any(p.signature.batch for p in decorated._cache.programs.values()))


def test_by_name_and_by_path() -> None:
    step = lambda state, data: {"w": state["w"] - loss_of(state["w"], state["x"], data["y"]), "x": 0}
    args = {"w": W, "x": X}, {"y": Y}

    def batch(argnums: Any) -> list[str]:
        return read(step, *args, batch_argnums=argnums)

    assert batch("data") == batch(1) == batch((-1,)) == ["data['y']"]
    assert batch(("data", "state['x']")) == ["state['x']", "data['y']"]
    assert batch(()) == []
    with pytest.raises(TypeError, match=r"no argument 'label', which batch_argnums names: there are state\['w'\], "):
        batch("label")
    with pytest.raises(TypeError, match=r"got 2 arguments, and batch_argnums=\(2,\)"):
        batch(2)


# --- what the ranks come with: the decision alone (tests/mpi/test_calls.py has the jobs)


def decide(*arguments: Argument, returned: Any = (), traces: Any = lambda reading: True) -> tuple[int, ...]:
    return which(arguments, lambda: returned, traces)


def own(name: str, length: int = 16) -> Argument:
    """That differs between the ranks."""
    return Argument(name, length, True)


def alike(name: str, length: int | None = 16) -> Argument:
    return Argument(name, length, None if length is None else False)


NUMBER = alike("state", None)


@pytest.mark.parametrize(
    ("arguments", "returned", "batch"),
    [
        # What differs is no state.
        ([alike("w", 4), own("x"), own("y")], [0], (1, 2)),
        ([alike("w", 4), own("x"), own("y")], [], (1, 2)),
        ([alike("w", 4), own("x"), own("z", 24)], [], (1, 2)),
        # What has its own length and is alike is state.
        ([NUMBER, alike("queue", 40), own("x")], [], (2,)),
        ([NUMBER, own("x"), alike("queue", 40)], [], (1,)),
        # Where all is alike, somebody forgot to split it.
        ([alike("w", 4), alike("x"), alike("y")], [], (1, 2)),
        # What is returned is state if it is alike: `update(i, opt_state)`, and with a batch as long as the weights.
        ([NUMBER, alike("opt_state")], [1], ()),
        ([NUMBER, alike("opt_state"), own("batch")], [1], (2,)),
        ([NUMBER, alike("opt_state"), alike("batch")], [1], (2,)),
    ],
)  # fmt: skip
def test_what_the_ranks_come_with(arguments: list[Argument], returned: list[int], batch: tuple[int, ...]) -> None:
    assert decide(*arguments, returned=returned) == batch


def test_what_is_in_doubt_is_tried() -> None:
    x, mask = own("x"), alike("mask")
    assert decide(NUMBER, x, mask, traces=lambda reading: reading == (1, 2)) == (1, 2)
    assert decide(NUMBER, mask, x, traces=lambda reading: reading == (2,)) == (2,)
    assert decide(NUMBER, x, mask, traces=lambda reading: False) == (1, 2), "an error of the step is not hidden"
    with pytest.raises(AmbiguousError) as error:
        decide(NUMBER, x, mask)
    text = str(error.value)
    assert "mask (16 entries) is the same on all ranks" in text
    assert "batch_argnums=('x', 'mask'): each rank has its own part of x and mask, and state is the same on all" in text
    assert "batch_argnums='x': each rank has its own part of x, and state and mask are the same on all" in text
    # Weights from a seed of each rank's own, which are returned.
    assert decide(own("w", 4), x, returned=[0], traces=lambda reading: reading == (1,)) == (1,)
    with pytest.raises(AmbiguousError, match=r"batch_argnums='x': .*there is no batch"):
        decide(x, returned=[0])


def test_describing_a_call_takes_time_in_proportion_to_its_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    first = signature.is_array

    def counted(x: Any) -> bool:
        nonlocal looks
        looks += 1
        return first(x)

    for module in (signature, signing):
        monkeypatch.setattr(module, "is_array", counted)

    def looks_at(leaves: int) -> int:
        nonlocal looks
        looks = 0
        step = jaxdist.data_parallel(lambda ws, x: jax.tree.map(lambda w: w + x.sum(), ws))
        step.eval_shape([W] * leaves, X)
        return looks

    assert looks_at(200) < 2 * looks_at(100) + 100
