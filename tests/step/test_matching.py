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
import pytest
from jax import lax

import jaxdist

X = np.random.default_rng(0).normal(size=(16, 3))
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2)))
KEY = jax.random.key(0)
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def sgd(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(loss_fn)(w, x)


def sources(f: Callable[..., Any], *args: Any) -> list[str | None]:
    """For each leaf of the result the name of the argument's leaf whose next value it is."""
    step = jaxdist.data_parallel(f)
    step.lower(*args)  # type: ignore[attr-defined]
    ((signature, _),) = step._cache.traces  # type: ignore[attr-defined]
    (trace,) = step._cache.traces.values()  # type: ignore[attr-defined]
    return [None if i is None else signature.names[i] for i in trace.sources]


def placed(x: Any) -> Any:
    """A copy that is on the mesh already, so that a step takes it as it is."""
    return jax.device_put(np.array(x), jax.NamedSharding(jaxdist.get_context().mesh, jax.P()))


def towards(target: Any, params: Any, x: Any) -> Any:
    """``step(target, params, batch) -> (params, loss)``: the target is not moved."""
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p - x @ target) ** 2))(params)
    return params - 0.1 * grads, loss


P = {"w": W, "b": jnp.zeros(2)}


def tree_loss(p: Any, x: Any) -> Any:
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


grad = jax.grad(tree_loss)


def both(f: Callable[..., Any], *trees: Any) -> Any:
    return jax.tree.map(f, *trees)


def leaf(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step that makes something of each parameter and its gradient."""
    return lambda p, x: both(f, p, grad(p, x))


moved = leaf(lambda p, g: p - 0.1 * g)


class State(NamedTuple):
    params: Any
    opt_state: Any


ADAM = optax.adam(0.1)


def adam(state: State, x: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
    updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state), loss


def gan(g: Any, d: Any, x: Any) -> Any:
    """Two networks that look alike: each is moved by its own gradient."""
    fake = lambda g: jnp.tanh(x @ g["a"]) @ g["b"]
    score = lambda d, y: jnp.tanh(y @ d["a"]) @ d["b"]
    loss = lambda g, d: jnp.mean(score(d, fake(g)) ** 2) - jnp.mean(score(d, x) ** 2)
    move = lambda p, u: both(lambda p, u: p - 0.1 * u, p, u)
    d_ = move(d, jax.grad(loss, 1)(g, d))
    return move(g, jax.grad(loss)(g, d_)), d_, loss(g, d)


NET = {"a": W, "b": W.T}
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str | None]]] = {
    "in order": (lambda w, m, x: (sgd(w, x), 0.9 * m + 0.1 * w), (W, W), ["w", "m"]),
    "swapped": (lambda w, m, x: (0.9 * m + sgd(W, x), w - sgd(W, x)), (W, W), ["m", "w"]),
    "an average of the new ones": (
        lambda w, average, x: (lambda n: (n, 0.9 * average + 0.1 * n))(sgd(w, x)), (W, W), ["w", "average"],
    ),
    "returned as it is": (lambda w, m, x: (sgd(w, x) + 0 * m, m), (W, W), ["w", "m"]),
    "a target that is read": (towards, (2 * W, W), ["params", None]),
    "only the second": (lambda a, b, x: (b + x.mean() + a.sum(), (a * b).sum()), (W, W), ["b", None]),
    "alike, and both returned": (lambda a, b, x: (a + b + x.mean(), b, x.sum()), (W, W), ["a", "b", None]),
    "a loss of a scalar's type": (lambda s, x: (s - x.mean(), (s * x).mean()), (jnp.zeros(()),), ["s", None]),
    "a loss alone": (lambda s, x: (s * x).mean(), (jnp.zeros(()),), [None]),
    "a rate that is read": (
        lambda w, lr, x: (w - lr * x.mean(), (w * lr).sum()), (W, jnp.ones(())), ["w", None],
    ),
    "numbers that are read": (lambda n, t, x: (jnp.sum(x > 0), jnp.mean(x / t)), (3, 2.0), [None, None]),
    "a counter and a key": (
        lambda w, n, k, x: (sgd(w, x), n + 1, jax.random.split(k)[0], jax.random.normal(k, ())),
        (W, 0, KEY), ["w", "n", "k", None],
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
    "gradients and what they move": (lambda p, x: (grad(p, x), moved(p, x)), (P,), [None, None, "p['b']", "p['w']"]),
    "two networks": (gan, (NET, NET), ["g['a']", "g['b']", "d['a']", "d['b']", None]),
    "an optimizer": (
        adam, (State(W, ADAM.init(W)),),
        ["state.params", *(f"state.opt_state[0].{name}" for name in ("count", "mu", "nu")), None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_next_value(name: str) -> None:
    f, state, expected = CASES[name]
    assert sources(f, *state, X) == expected


def test_a_tie_is_an_error_that_shows_both_readings() -> None:
    with pytest.raises(jaxdist.StepError, match=r"the next value of a or b.*Return the other one too"):
        jaxdist.data_parallel(lambda a, b, x: (a + b + x.mean(), x.sum()))(W, W, X)


def test_only_what_is_returned_is_donated_and_who_took_it_is_told() -> None:
    @jaxdist.data_parallel
    def train(read: Any, w: Any, x: Any) -> Any:
        return w - jnp.tanh(read) * x.mean(), x.sum()

    evaluate = jaxdist.data_parallel(lambda p, x: loss_fn(p["w"], x))
    read, w = placed(W), placed(2 * W)
    new, _ = train(read, w, X)
    assert w.is_deleted()
    assert not read.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match=r"\bw\b.*(deleted|donat)"):
        train(read, w, X)
    said = (
        r"p\['w'\] was deleted: call \d+ of step '.*train', which returned its next value.*jax.numpy.copy.*donate=False"
    )
    with pytest.raises(RuntimeError, match=said):
        evaluate({"w": w}, X)
    train(read, new, X)
    with pytest.raises(RuntimeError, match="was deleted: an earlier call of a step, which"):
        evaluate({"w": w}, X)


# --- what takes the place of an argument in memory, and gradients, which do not

RATE = jnp.asarray(0.1, float)  # not of a weak type


def rated(f: Callable[[Any, Any, Any], Any], moves: bool = True) -> Callable[..., Any]:
    """The same with a number that is an argument, whose next value comes along."""

    def step(p: Any, rate: Any, x: Any) -> Any:
        out = both(lambda p, g: f(p, g, rate), p, grad(p, x))
        return (out, rate * 0.9) if moves else out

    return step


def ravelled(p: Any, x: Any) -> Any:
    flat, back = jax.flatten_util.ravel_pytree(p)
    return back(flat - 0.1 * jax.flatten_util.ravel_pytree(grad(p, x))[0])


def orthogonal(g: Any) -> Any:
    return g @ jnp.linalg.inv(g.T @ g + jnp.eye(2)) if g.ndim == 2 else g


def stepped(tx: Any) -> Case:
    def step(p: Any, s: Any, x: Any) -> Any:
        updates, s = tx.update(grad(p, x), s, p)
        return optax.apply_updates(p, updates), s

    return step, (P, tx.init(P))


NO_NEXT_VALUE: dict[str, Case] = {
    "gradients": (grad, (P,)),
    "a loss and gradients": (jax.value_and_grad(tree_loss), (P,)),
    "gradients, clipped": (lambda p, x: optax.clip_by_global_norm(0.5).update(grad(p, x), optax.EmptyState())[0], (P,)),
    "a direction": (
        lambda p, x: {"w": jnp.linalg.solve(x.T @ x + jnp.eye(3), grad(p, x)["w"]), "b": grad(p, x)["b"]}, (P,),
    ),
    "gradients with decay": (leaf(lambda p, g: g + 1e-2 * p), (P,)),
    "gradients with decay by an argument": (rated(lambda p, g, decay: g + decay * p, False), (P, RATE)),
    "the same the other way round": (rated(lambda p, g, decay: decay * p + g, False), (P, RATE)),
    "less the decay": (rated(lambda p, g, decay: g - decay * p, False), (P, RATE)),
    "clipped, with decay": (rated(lambda p, g, decay: jnp.clip(g + decay * p, -1, 1) * decay, False), (P, RATE)),
    "one gradient with decay": (lambda w, decay, x: jax.grad(loss_fn)(w, x) + decay * w, (W, RATE)),
    "what is to be added": (leaf(lambda p, g: -0.1 * (g + 0.1 * p)), (P,)),
    "what is to be added, by arguments": (rated(lambda p, g, rate: -rate * (g + rate * p), False), (P, RATE)),
    "a loss with decay": (jax.grad(lambda p, x: tree_loss(p, x) + 0.5 * optax.tree.norm(p, squared=True)), (P,)),
    "what changed": (lambda p, x: both(jnp.subtract, moved(p, x), p), (P,)),
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

NEXT_VALUE: dict[str, Case] = {
    "decayed": (leaf(lambda p, g: p * (1 - 0.1 * 0.01) - 0.1 * g), (P,)),
    "decayed by an argument": (rated(lambda p, g, rate: p * (1 - rate * 0.01) - rate * g), (P, RATE)),
    "decayed by an argument, and added": (rated(lambda p, g, rate: (1 - rate) * p + -rate * g), (P, RATE)),
    "shrunk by an argument": (rated(lambda p, g, rate: rate * p - 0.1 * g), (P, jnp.asarray(0.9))),
    "decay in the gradient": (rated(lambda p, g, rate: p - rate * (g + rate * p)), (P, RATE)),
    "momentum by an argument": (
        lambda p, m, rate, x: (
            both(lambda p, m: p - 0.1 * m, p, new := both(lambda m, g: rate * m + g, m, grad(p, x))), new, rate * 0.9,
        ),
        (P, P, RATE),
    ),
    "a target that the loss reads, by an argument": (
        lambda p, target, rate, x: (
            new := both(lambda p, g: p - 0.1 * g, p, jax.grad(lambda p: tree_loss(p, x) * tree_loss(target, x))(p)),
            both(lambda t, n: rate * t + (1 - rate) * n, target, new), rate * 0.9,
        ),
        (P, P, RATE),
    ),
    "a mean that moves by what is missing": (
        lambda p, mean, rate, x: (
            new := moved(p, x), both(lambda m, n: m - (1 - rate) * (m - n), mean, new), rate * 0.9,
        ),
        (P, P, RATE),
    ),
    "by orthogonal matrices": (leaf(lambda p, g: p - 0.1 * orthogonal(g)), (P,)),
    "projected": (lambda p, x: both(lambda p: p / jnp.linalg.norm(p), moved(p, x)), (P,)),
    "clipped": (lambda p, x: both(lambda p: jnp.clip(p, -1, 1), moved(p, x)), (P,)),
    "where finite": (lambda p, x: both(lambda n, p: jnp.where(jnp.isfinite(x).all(), n, p), moved(p, x), p), (P,)),
    "reflected at zero": (lambda p, x: both(lambda n: jnp.where(n < 0, -n, n), moved(p, x)), (P,)),
    "with casts": (lambda p, x: both(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), moved(p, x)), (P,)),
    "as one vector": (ravelled, (P,)),
    "rows written": (leaf(lambda p, g: p.at[:1].add(-0.1 * g[:1])), (P,)),
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
    "keys": (lambda p, k, x: (moved(p, x), jax.random.split(k)[1], jax.random.fold_in(k, 1)), (P, KEY)),
    "cocob": stepped(optax.contrib.cocob(0.1)),
    "momentum": stepped(optax.sgd(0.1, 0.9, nesterov=True)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        *(pytest.param(case, False, id=f"none: {name}") for name, case in NO_NEXT_VALUE.items()),
        *(pytest.param(case, True, id=f"next: {name}") for name, case in NEXT_VALUE.items()),
    ],
)
def test_a_next_value_takes_the_memory_of_the_old_one_and_a_gradient_does_not(case: Case, takes: bool) -> None:
    f, state = case
    step = jaxdist.data_parallel(f)
    step.lower(*state, X)  # type: ignore[attr-defined]
    (program,) = step._cache.programs.values()  # type: ignore[attr-defined]
    assert program.donated == (list(program.signature.state) if takes else [])


def test_gradients_beside_statistics_that_move_on() -> None:
    def step(p: Any, stats: Any, n: Any, x: Any) -> Any:
        return grad(p, x), {"mean": 0.9 * stats["mean"] + 0.1 * x.mean(0), "n": stats["n"] + 1}, n + 1

    p, stats, n = jax.tree.map(placed, (P, {"mean": np.zeros(3), "n": 0}, 0))
    want = jax.jit(step)(P, {"mean": np.zeros(3), "n": 0}, 0, X)
    got = jaxdist.data_parallel(step)(p, stats, n, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)
    assert not any(x.is_deleted() for x in jax.tree.leaves(p))
    assert all(x.is_deleted() for x in jax.tree.leaves((stats, n)))
