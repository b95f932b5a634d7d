"""Which part of a step's result is the next value of which argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import parity
import pytest
from jax import lax

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)))


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def sgd(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(loss_fn)(w, x)


def sources(f: Callable[..., Any], *args: Any, **settings: Any) -> list[str | None]:
    """For each leaf of the result the name of the argument's leaf whose next value it is."""
    step = jaxdist.data_parallel(f, **settings)
    step.lower(*args)  # type: ignore[attr-defined]
    ((signature, _),) = step._cache.traces  # type: ignore[attr-defined]
    (trace,) = step._cache.traces.values()  # type: ignore[attr-defined]
    return [None if i is None else signature.names[i] for i in trace.sources]


def placed(x: Any) -> Any:
    """A copy that is on the mesh already, so that a step takes it as it is."""
    return jax.device_put(np.array(x), jax.NamedSharding(jaxdist.get_context().mesh, jax.P()))


class State(NamedTuple):
    params: Any
    opt_state: Any


TX = optax.adam(0.1)


def test_a_target_that_is_only_read() -> None:
    """``step(target, params, batch) -> (params, loss)``: the target is not moved."""

    def step(target: Any, params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p - x @ target) ** 2))(params)
        return params - 0.1 * grads, loss

    assert sources(step, 2 * W, W, X) == ["params", None]
    decorated = jaxdist.data_parallel(step)
    target, params = placed(2 * W), placed(W)
    plain = W
    for _ in range(3):
        params, loss = decorated(target, params, X)
        plain, want = step(2 * W, plain, X)
        np.testing.assert_allclose(params, plain, rtol=1e-12)
        np.testing.assert_allclose(loss, want, rtol=1e-12)
    assert not target.is_deleted(), "it is not returned, so it is not donated"


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str | None]]] = {
    "in order": (lambda w, m, x: (sgd(w, x), 0.9 * m + 0.1 * w), (W, W), ["w", "m"]),
    "swapped": (lambda w, m, x: (0.9 * m + sgd(W, x), w - sgd(W, x)), (W, W), ["m", "w"]),
    "a moving average of the new ones": (
        lambda w, average, x: (lambda n: (n, 0.9 * average + 0.1 * n))(sgd(w, x)), (W, W), ["w", "average"],
    ),
    "returned as it is": (lambda w, m, x: (sgd(w, x) + 0 * m, m), (W, W), ["w", "m"]),
    "only the second": (lambda a, b, x: (b + x.mean() + a.sum(), (a * b).sum()), (W, W), ["b", None]),
    "a loss of a scalar's type": (lambda s, x: (s - x.mean(), (s * x).mean()), (jnp.zeros(()),), ["s", None]),
    "a loss alone": (lambda s, x: (s * x).mean(), (jnp.zeros(()),), [None]),
    "a learning rate that is read": (
        lambda w, lr, x: (w - lr * x.mean(), (w * lr).sum()), (W, jnp.ones(())), ["w", None],
    ),
    "a counter and a key": (
        lambda w, n, k, x: (sgd(w, x), n + 1, jax.random.split(k)[0], jax.random.normal(k, ())),
        (W, 0, jax.random.key(0)), ["w", "n", "k", None],
    ),
    "a count that is no counter": (lambda n, x: (n + 1, jnp.sum(x > 0)), (jnp.zeros((), int),), ["n", None]),
    "a clipped one": (lambda w, x: jnp.clip(sgd(w, x), -1, 1), (W,), ["w"]),
    "decayed and masked": (lambda w, x: jnp.where(x.mean() > 0, 0.9 * w, sgd(w, x)), (W,), ["w"]),
    "projected": (lambda w, x: (lambda n: n / jnp.linalg.norm(n))(sgd(w, x)), (W,), ["w"]),
    "moved in a loop": (lambda w, x: lax.fori_loop(0, 3, lambda i, w: sgd(w, x), w), (W,), ["w"]),
    "moved in a scan": (lambda w, x: lax.scan(lambda w, _: (sgd(w, x), x[0]), w, None, length=2), (W,), ["w", None]),
    "moved in a branch": (lambda w, x: lax.cond(x.mean() > 0, sgd, lambda w, x: w, w, x), (W,), ["w"]),
    "cast and cast back": (lambda w, x: (w.astype(jnp.float32) - 1).astype(w.dtype), (W,), ["w"]),
    "another type": (lambda w, x: (sgd(w, x).astype(jnp.float32), x.mean()), (W,), ["w", None]),
    "gradients for a caller": (lambda w, x: jax.grad(loss_fn)(w, x), (W,), [None]),
    "a list in a dict": (
        lambda s, x: ({"a": [sgd(s["a"][0], x)], "b": s["b"] + 1}, {"loss": x.mean()}), ({"a": [W], "b": 0},),
        ["s['a'][0]", "s['b']", None],
    ),
    "within the result": (lambda w, m, x: {"aux": x.mean(), "state": (sgd(w, x), m * 0.5)}, (W, W), [None, "w", "m"]),
    "twice the same": (lambda w, x: (lambda n: (n, n))(sgd(w, x)), (W,), ["w", None]),
    "nothing at all": (lambda w, x: x.sum(), (W,), [None]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_next_value(name: str) -> None:
    f, state, expected = CASES[name]
    assert sources(f, *state, X) == expected
    parity.check(f, *state, X, devices=8)


def test_optimizers_and_train_states() -> None:
    def step(state: State, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    found = sources(step, State(W, TX.init(W)), X)
    assert found[-1] is None
    assert all(name is not None and name.startswith("state") for name in found[:-1])


def test_two_networks_that_look_alike() -> None:
    """A GAN: each is moved by its own gradient."""

    def step(g: Any, d: Any, x: Any) -> Any:
        fake = lambda g: jnp.tanh(x @ g["a"]) @ g["b"]
        score = lambda d, y: jnp.tanh(y @ d["a"]) @ d["b"]
        loss = lambda g, d: jnp.mean(score(d, fake(g)) ** 2) - jnp.mean(score(d, x) ** 2)
        move = lambda p, u: jax.tree.map(lambda p, u: p - 0.1 * u, p, u)
        d_ = move(d, jax.grad(loss, 1)(g, d))
        return move(g, jax.grad(loss)(g, d_)), d_, loss(g, d)

    net = {"a": W, "b": W.T}
    other = jax.tree.map(lambda x: 2 * x, net)
    assert sources(step, net, other, X) == ["g['a']", "g['b']", "d['a']", "d['b']", None]
    parity.check(step, net, other, X, devices=8)


def test_a_tie_is_an_error_that_shows_both_readings() -> None:
    def step(a: Any, b: Any, x: Any) -> Any:
        return a + b + x.mean(), x.sum()

    with pytest.raises(jaxdist.StepError, match=r"the next value of a or b.*Return the other one too"):
        jaxdist.data_parallel(step)(W, W, X)
    both = lambda a, b, x: (a + b + x.mean(), b, x.sum())
    parity.check(both, W, W, X, devices=8)


def test_only_what_is_returned_is_donated() -> None:
    read, moved = placed(W), placed(2 * W)
    step = jaxdist.data_parallel(lambda a, b, x: (b - jnp.tanh(a) * x.mean(), x.sum()))
    step(read, moved, X)
    assert moved.is_deleted()
    assert not read.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"\bb\b.*(deleted|donat)"):
        step(read, moved, X)


def test_an_array_that_is_gone_tells_who_took_it() -> None:
    @jaxdist.data_parallel
    def train(w: Any, x: Any) -> Any:
        return sgd(w, x)

    evaluate = jaxdist.data_parallel(lambda p, x: loss_fn(p["w"], x))
    w = placed(W)
    new = train(w, X)
    said = (
        r"p\['w'\] was deleted: call \d+ of step '.*train', which returned its next value.*jax.numpy.copy.*donate=False"
    )
    with pytest.raises(RuntimeError, match=said):
        evaluate({"w": w}, X)
    train(new, X)
    with pytest.raises(RuntimeError, match="was deleted: an earlier call of a step, which"):
        evaluate({"w": w}, X)


P = {"w": W, "b": jnp.zeros(2)}


def tree_loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


grad = jax.grad(tree_loss)


def both(f: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(f, *trees)


def moved(p: Any, x: Any) -> Any:
    return both(lambda p, g: p - 0.1 * g, p, grad(p, x))


NO_NEXT_VALUE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "gradients": (grad, (P,)),
    "a loss and gradients": (jax.value_and_grad(tree_loss), (P,)),
    "gradients, clipped": (lambda p, x: optax.clip_by_global_norm(0.5).update(grad(p, x), optax.EmptyState())[0], (P,)),
    "a direction": (
        lambda p, x: {"w": jnp.linalg.solve(x.T @ x + jnp.eye(3), grad(p, x)["w"]), "b": grad(p, x)["b"]}, (P,),
    ),
    "gradients with decay": (lambda p, x: both(lambda p, g: g + 1e-2 * p, p, grad(p, x)), (P,)),
    "gradients with decay by an argument": (
        lambda p, decay, x: both(lambda p, g: g + decay * p, p, grad(p, x)), (P, jnp.asarray(1e-2)),
    ),
    "the same the other way round": (
        lambda p, decay, x: both(lambda p, g: decay * p + g, p, grad(p, x)), (P, jnp.asarray(1e-2)),
    ),
    "less the decay": (lambda p, decay, x: both(lambda p, g: g - decay * p, p, grad(p, x)), (P, jnp.asarray(1e-2))),
    "gradients with decay, clipped": (
        lambda p, decay, x: both(lambda p, g: jnp.clip(g + decay * p, -1, 1) * decay, p, grad(p, x)),
        (P, jnp.asarray(1e-2)),
    ),
    "gradients with decay by optax": (
        lambda p, decay, x: optax.add_decayed_weights(decay).update(grad(p, x), optax.EmptyState(), p)[0],
        (P, jnp.asarray(1e-2)),
    ),
    "one gradient with decay": (lambda w, decay, x: jax.grad(loss_fn)(w, x) + decay * w, (W, jnp.asarray(1e-2))),
    "what is to be added, by arguments": (
        lambda p, rate, x: both(lambda p, g: -rate * (g + rate * p), p, grad(p, x)), (P, jnp.asarray(1e-2)),
    ),
    "a loss with decay, differentiated": (
        jax.grad(lambda p, x: tree_loss(p, x) + 0.5 * optax.tree.norm(p, squared=True)), (P,),
    ),
    "what changed": (lambda p, x: both(jnp.subtract, moved(p, x), p), (P,)),
    "what is to be added": (lambda p, x: both(lambda p, g: -0.1 * (g + 0.1 * p), p, grad(p, x)), (P,)),
    "gradients of a loop": (
        lambda p, x: lax.scan(lambda g, x: (both(jnp.add, g, grad(p, x)), None), both(jnp.zeros_like, p),
                              x.reshape(2, 8, 3))[0], (P,),
    ),
    "gradients in a branch": (lambda p, x: lax.cond(x.mean() > 0, grad, lambda p, x: both(jnp.zeros_like, p), p, x),
                              (P,)),
    "a product with the Hessian": (lambda p, x: jax.jvp(lambda p: grad(p, x), (p,), (p,))[1], (P,)),
    "gradients by one of two alike": (lambda p, q, x: jax.grad(lambda p: tree_loss(p, x) * tree_loss(q, x))(p), (P, P)),
    "gradients by both": (
        lambda p, q, x: jax.grad(lambda p, q: tree_loss(p, x) * tree_loss(q, x), (0, 1))(p, q), (P, P),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_NEXT_VALUE)
def test_a_gradient_is_no_next_value(name: str) -> None:
    f, state = NO_NEXT_VALUE[name]
    state = jax.tree.map(placed, state)
    step, want = jaxdist.data_parallel(f), jax.jit(f)(*state, X)
    for _ in range(2):
        parity.compare(step(*state, X), want, 1e-10)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_gradients_beside_statistics_that_move_on() -> None:
    def step(p: Any, stats: Any, n: Any, x: Any) -> Any:
        return grad(p, x), {"mean": 0.9 * stats["mean"] + 0.1 * x.mean(0), "n": stats["n"] + 1}, n + 1

    p, stats, n = jax.tree.map(placed, (P, {"mean": np.zeros(3), "n": 0}, 0))
    jaxdist.data_parallel(step)(p, stats, n, X)
    assert not any(x.is_deleted() for x in jax.tree.leaves(p))
    assert all(x.is_deleted() for x in jax.tree.leaves((stats, n)))


def test_gradients_and_what_they_move() -> None:
    assert sources(lambda p, x: (grad(p, x), moved(p, x)), P, X) == [None, None, "p['b']", "p['w']"]


def ravelled(p: Any, x: Any) -> Any:
    flat, back = jax.flatten_util.ravel_pytree(p)
    return back(flat - 0.1 * jax.flatten_util.ravel_pytree(grad(p, x))[0])


def orthogonal(g: Any) -> Any:
    return g @ jnp.linalg.inv(g.T @ g + jnp.eye(2)) if g.ndim == 2 else g


def stepped(tx: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def step(p: Any, s: Any, x: Any) -> Any:
        updates, s = tx.update(grad(p, x), s, p)
        return optax.apply_updates(p, updates), s

    return step, (P, tx.init(P))


NEXT_VALUE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "decayed": (lambda p, x: both(lambda p, g: p * (1 - 0.1 * 0.01) - 0.1 * g, p, grad(p, x)), (P,)),
    "decayed by an argument": (
        lambda p, rate, x: (both(lambda p, g: p * (1 - rate * 0.01) - rate * g, p, grad(p, x)), rate * 0.9),
        (P, jnp.asarray(0.1)),
    ),
    "decayed by an argument, and added": (
        lambda p, rate, x: (both(lambda p, g: (1 - rate) * p + -rate * g, p, grad(p, x)), rate * 0.9),
        (P, jnp.asarray(0.1)),
    ),
    "shrunk by an argument": (
        lambda p, rate, x: (both(lambda p, g: rate * p - 0.1 * g, p, grad(p, x)), rate * 0.9), (P, jnp.asarray(0.9)),
    ),
    "decay in the gradient": (
        lambda p, rate, x: (both(lambda p, g: p - rate * (g + rate * p), p, grad(p, x)), rate * 0.9),
        (P, jnp.asarray(0.1)),
    ),
    "momentum by an argument": (
        lambda p, m, rate, x: (
            both(lambda p, m: p - 0.1 * m, p, new := both(lambda m, g: rate * m + g, m, grad(p, x))), new, rate * 0.9,
        ),
        (P, P, jnp.asarray(0.9)),
    ),
    "a target that the loss reads, by an argument": (
        lambda p, target, rate, x: (
            new := both(lambda p, g: p - 0.1 * g, p, jax.grad(lambda p: tree_loss(p, x) * tree_loss(target, x))(p)),
            both(lambda t, n: rate * t + (1 - rate) * n, target, new), rate * 0.9,
        ),
        (P, P, jnp.asarray(0.9)),
    ),
    "a mean that moves by what is missing": (
        lambda p, mean, rate, x: (
            new := moved(p, x), both(lambda m, n: m - (1 - rate) * (m - n), mean, new), rate * 0.9,
        ),
        (P, P, jnp.asarray(0.9)),
    ),
    "by signs": (lambda p, x: both(lambda p, g: p - 0.1 * jnp.sign(g), p, grad(p, x)), (P,)),
    "by orthogonal matrices": (lambda p, x: both(lambda p, g: p - 0.1 * orthogonal(g), p, grad(p, x)), (P,)),
    "projected": (lambda p, x: both(lambda p: p / jnp.linalg.norm(p), moved(p, x)), (P,)),
    "clipped": (lambda p, x: both(lambda p: jnp.clip(p, -1, 1), moved(p, x)), (P,)),
    "where finite": (
        lambda p, x: both(lambda new, p: jnp.where(jnp.isfinite(x).all(), new, p), moved(p, x), p), (P,),
    ),
    "reflected at zero": (lambda p, x: both(lambda n: jnp.where(n < 0, -n, n), moved(p, x)), (P,)),
    "with casts": (lambda p, x: both(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), moved(p, x)), (P,)),
    "as one vector": (ravelled, (P,)),
    "rows written": (lambda p, x: both(lambda p, g: p.at[:1].add(-0.1 * g[:1]), p, grad(p, x)), (P,)),
    "a running mean": (lambda p, n, x: (both(lambda p, g: p + (g - p) / (n + 1.0), p, grad(p, x)), n + 1), (P, 0)),
    "lookahead": (
        lambda fast, slow, x: (lambda s: (s, s))(both(lambda s, f: s + 0.5 * (f - s), slow, moved(fast, x))), (P, P),
    ),
    "estimated anew": (
        lambda p, x: {"w": (x.T @ jax.nn.softmax(x @ p["w"])), "b": jnp.tanh(p["b"] + x.mean())}, (P,),
    ),
    "the last gradients, and a count": (
        lambda s, p, x: ({"n": s["n"] * 0, "g": grad(p, x)}, moved(p, x)), ({"n": 0, "g": P}, P),
    ),
    "the last gradients": (lambda last, p, x: ([grad(p, x)], both(lambda p, u: p - 0.1 * u, p, last[0])), ([P], P)),
    "keys": (lambda p, k, x: (moved(p, x), jax.random.split(k)[1], jax.random.fold_in(k, 1)), (P, jax.random.key(0))),
    "adam": stepped(optax.adam(0.1)),
    "cocob": stepped(optax.contrib.cocob(0.1)),
    "momentum": stepped(optax.sgd(0.1, 0.9, nesterov=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", NEXT_VALUE)
def test_a_next_value_takes_the_memory_of_the_old_one(name: str) -> None:
    f, state = NEXT_VALUE[name]
    state = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else placed(x),
                         jax.tree.map(jnp.asarray, state))  # fmt: skip
    step = jaxdist.data_parallel(f)
    step.lower(*state, X)  # type: ignore[attr-defined]
    (program,) = step._cache.programs.values()  # type: ignore[attr-defined]
    assert program.donated == list(program.signature.state)
