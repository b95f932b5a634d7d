"""Which arguments are the batch: by what they are, by what the step returns, by what the ranks come with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdist
from jaxdist.step import signature, signing
from jaxdist.step.batch import AmbiguousError, Argument, length, which

RNG = np.random.default_rng(0)
X, Y, Z = RNG.normal(size=(16, 4)), RNG.normal(size=16), RNG.normal(size=(24, 4))
W = jnp.asarray(RNG.normal(size=4))
PARAMS = {"w": W, "b": jnp.zeros(())}


def read(step: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Names of the leaves that are taken for the batch."""
    decorated = jaxdist.data_parallel(step, donate=False)
    jax.tree.map(np.testing.assert_allclose, decorated(*args, **kwargs), jax.jit(step)(*args, **kwargs))
    (program,) = decorated._cache.programs.values()
    return [program.signature.names[i] for i in program.signature.batch]


def loss_of(w: Any, x: Any, y: Any = 0.0) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def test_what_can_be_a_batch() -> None:
    never = lambda x: False
    assert length([X, Y], never) == 16
    assert length([], never) is None
    assert length([X, np.ones(3)], never) is None
    assert length([X, np.float32(1)], never) is None
    assert length([X, 3], never) is None
    assert length([jax.random.split(jax.random.key(0), 16)], never) is None
    assert length([jax.random.PRNGKey(0)], never) is None
    assert length([X], lambda x: True) is None


@pytest.mark.parametrize(
    ("step", "args", "batch"),
    [
        (lambda state, batch: jax.tree.map(lambda p: p - loss_of(W, batch), state), (PARAMS, X), ["batch"]),
        (lambda w, x: w - jax.grad(loss_of)(w, x), (W, X), ["x"]),
        (lambda w, x, y: w - jax.grad(loss_of)(w, x, y), (W, X, Y), ["x", "y"]),
        (lambda p, x, y: loss_of(p["w"], x, y), (PARAMS, X, Y), ["x", "y"]),
        (lambda w, x, y: loss_of(w, x, y), (W, X, Y), ["x", "y"]),
        (lambda x, w: w - jax.grad(loss_of)(w, x), (X, W), ["x"]),
        (lambda w, x, key: w - loss_of(w, x + jax.random.normal(key, x.shape)), (W, X, jax.random.key(0)), ["x"]),
        (lambda w, x, key: w - loss_of(w, x + jax.random.normal(key, x.shape)), (W, X, jax.random.PRNGKey(0)), ["x"]),
        (lambda w, real, z: w - jax.grad(lambda w: loss_of(w, real) + loss_of(w, z))(w), (W, X, Z), ["real", "z"]),
        (lambda p, scale, x: loss_of(p["w"], x) * scale.sum(), (PARAMS, jnp.ones(3), X), ["scale", "x"]),
        (lambda p, stats, x: loss_of(p["w"], x / stats), (PARAMS, jnp.ones(4), X), ["x"]),
        (lambda w, lr, x: w - lr * jax.grad(loss_of)(w, x), (W, 0.1, X), ["x"]),
        (lambda predictions, labels: jnp.mean((predictions - labels) ** 2), (Y, 2 * Y), ["predictions", "labels"]),
        (lambda x: jnp.mean(x, 0), (X,), ["x"]),
        (lambda w: w - jax.grad(lambda w: (w**2).sum())(w), (W,), []),
        (lambda key: jax.random.normal(key, (3,)), (jax.random.key(0),), []),
        (lambda p: jax.tree.map(jnp.zeros_like, p), ({"a": W, "b": jnp.ones(3)},), []),
    ],
)  # fmt: skip
def test_which_arguments_are_the_batch(step: Any, args: Any, batch: list[str]) -> None:
    assert read(step, *args) == batch


def test_a_state_that_an_earlier_call_returned_is_none() -> None:
    step = jaxdist.data_parallel(lambda w, x: (w * 0.5, loss_of(w, x)), donate=False)
    w, _ = step(W, X)
    look = jaxdist.data_parallel(lambda w, x: loss_of(w, x), donate=False)
    np.testing.assert_allclose(look(w, X[:4]), loss_of(0.5 * W, X[:4]))  # as long as the weights
    (program,) = look._cache.programs.values()
    assert [program.signature.names[i] for i in program.signature.batch] == ["x"]


def test_by_name_and_by_path() -> None:
    step = lambda state, data: {"w": state["w"] - loss_of(state["w"], state["x"], data["y"]), "x": 0}
    args = {"w": W, "x": X}, {"y": Y}

    def batch(argnums: Any) -> list[str]:
        decorated = jaxdist.data_parallel(step, batch_argnums=argnums, donate=False)
        jax.tree.map(np.testing.assert_allclose, decorated(*args), jax.jit(step)(*args))
        (program,) = decorated._cache.programs.values()
        return [program.signature.names[i] for i in program.signature.batch]

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


def test_what_differs_between_ranks_is_no_state() -> None:
    w, x, y = Argument("w", 4, False), Argument("x", 16, True), Argument("y", 16, True)
    assert decide(w, x, y, returned=[0]) == (1, 2)
    assert decide(w, x, y) == (1, 2)
    assert decide(w, x, Argument("z", 24, True)) == (1, 2)


def test_what_has_its_own_length_and_is_alike_is_state() -> None:
    state, queue, x = Argument("state", None), Argument("queue", 40, False), Argument("x", 16, True)
    assert decide(state, queue, x) == (2,)
    assert decide(state, x, queue) == (1,)


def test_all_alike_is_a_forgotten_split() -> None:
    assert decide(Argument("w", 4, False), Argument("x", 16, False), Argument("y", 16, False)) == (1, 2)


def test_what_is_returned_is_state_where_the_ranks_have_the_same() -> None:
    """`update(i, opt_state)` has no batch, and that of `update(i, opt_state, batch)` may be as long as the weights."""
    i, state = Argument("i", None), Argument("opt_state", 16, False)
    assert decide(i, state, returned=[1]) == ()
    assert decide(i, state, Argument("batch", 16, True), returned=[1]) == (2,)
    assert decide(i, state, Argument("batch", 16, False), returned=[1]) == (2,)


def test_what_is_alike_while_others_differ_is_tried() -> None:
    state, x, mask = Argument("state", None), Argument("x", 16, True), Argument("mask", 16, False)
    assert decide(state, x, mask, traces=lambda reading: reading == (1, 2)) == (1, 2)
    assert decide(state, mask, x, traces=lambda reading: reading == (2,)) == (2,)
    with pytest.raises(AmbiguousError) as error:
        decide(state, x, mask)
    text = str(error.value)
    assert "mask (16 entries) is the same on all ranks" in text
    assert "batch_argnums=('x', 'mask'): each rank has its own part of x and mask, and state is the same on all" in text
    assert "batch_argnums='x': each rank has its own part of x, and state and mask are the same on all" in text


def test_what_is_returned_and_differs_is_tried() -> None:
    w, x = Argument("w", 4, True), Argument("x", 16, True)  # weights from a seed of each rank's own
    assert decide(w, x, returned=[0], traces=lambda reading: reading == (1,)) == (1,)
    with pytest.raises(AmbiguousError, match=r"batch_argnums='x': .*there is no batch"):
        decide(Argument("x", 16, True), returned=[0])


def test_an_error_of_the_step_is_not_hidden() -> None:
    state, x, mask = Argument("state", None), Argument("x", 16, True), Argument("mask", 16, False)
    assert decide(state, x, mask, traces=lambda reading: False) == (1, 2)


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
