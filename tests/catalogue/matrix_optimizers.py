"""Optimizers that work on whole matrices, as third parties write them: each wants its matrices in another way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from harness.check import gap, mesh, train_step

import jaxdist


def shampoo(rate: float = 0.05, every: int = 2) -> optax.GradientTransformation:
    """Inverse fourth roots by eigenvalues, now and then: a ``cond`` for each leaf, with two matrices in it."""

    def root(x: Any) -> Any:
        values, vectors = jnp.linalg.eigh(x + 0.1 * jnp.eye(len(x), dtype=x.dtype))
        return (vectors * values**-0.25) @ vectors.T

    def init(params: Any) -> Any:
        def of(p: Any) -> Any:
            if p.ndim != 2:
                return ()
            return tuple(jnp.zeros((n, n), p.dtype) for n in p.shape), tuple(jnp.eye(n, dtype=p.dtype) for n in p.shape)

        return jnp.zeros((), jnp.int32), jax.tree.map(of, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, leaves = state

        def one(g: Any, leaf: Any) -> Any:
            if not leaf:
                return g, ()
            (left, right), roots = leaf
            left, right = 0.9 * left + g @ g.T, 0.9 * right + g.T @ g
            roots = jax.lax.cond(count % every == 0, lambda: (root(left), root(right)), lambda: roots)
            return roots[0] @ g @ roots[1], ((left, right), roots)

        flat, structure = jax.tree.flatten(updates)
        done = [one(g, leaf) for g, leaf in zip(flat, structure.flatten_up_to(leaves), strict=True)]
        new = [jax.tree.unflatten(structure, part) for part in zip(*done, strict=True)]
        return new[0], (count + 1, new[1])

    return optax.chain(optax.GradientTransformation(init, update), optax.scale(-rate))


def soap(rate: float = 0.02, every: int = 2) -> optax.GradientTransformation:
    """Adam in a basis of each matrix: all leaves in one ``cond``, the new bases of all in another one inside."""

    def of_matrices(f: Callable[..., Any], *trees: Any) -> Any:
        return jax.tree.map(lambda g, *rest: f(g, *rest) if g.ndim == 2 else (), *trees)

    def init(params: Any) -> Any:
        bases = of_matrices(lambda p: jnp.eye(p.shape[0], dtype=p.dtype), params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        sums = jax.tree.map(jnp.zeros_like, bases)
        return {"count": jnp.zeros((), jnp.int32), "second": zeros, "sums": sums, "bases": bases}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count = state["count"] + 1

        def first() -> Any:
            sums = of_matrices(lambda g: g @ g.T, updates)
            bases = jax.tree.map(lambda m: jnp.linalg.qr(m + jnp.eye(len(m)))[0], sums)
            return jax.tree.map(jnp.zeros_like, updates), {**state, "count": count, "sums": sums, "bases": bases}

        def later() -> Any:
            def turned(g: Any, second: Any, basis: Any) -> Any:
                if g.ndim != 2:
                    return g, second
                inside = basis.T @ g
                second = 0.9 * second + 0.1 * inside**2
                return basis @ (inside / (jnp.sqrt(second) + 0.1)), second

            flat, structure = jax.tree.flatten(updates)
            bases = structure.flatten_up_to(state["bases"])
            done = [turned(*leaf) for leaf in zip(flat, jax.tree.leaves(state["second"]), bases, strict=True)]
            turns, second = (jax.tree.unflatten(structure, part) for part in zip(*done, strict=True))
            sums = of_matrices(lambda g, m: 0.9 * m + g @ g.T, updates, state["sums"])
            bases = jax.lax.cond(
                count % every == 0,
                lambda: jax.tree.map(lambda m, b: jnp.linalg.qr((m + jnp.eye(len(m))) @ b)[0], sums, state["bases"]),
                lambda: state["bases"],
            )
            return turns, {"count": count, "second": second, "sums": sums, "bases": bases}

        return jax.lax.cond(count == 1, first, later)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale(-rate))


def together(rate: float = 0.05) -> optax.GradientTransformation:
    """Newton-Schulz on all matrices in one loop, each divided by the norm of all of them in every turn."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def turn(_: int, xs: Any) -> Any:
            norm = optax.global_norm(xs)
            xs = jax.tree.map(lambda x: x / norm, xs)
            return jax.tree.map(lambda x: 1.5 * x - 0.5 * x @ x.T @ x if x.ndim == 2 else x, xs)

        return jax.lax.fori_loop(0, 3, turn, updates), state

    return optax.chain(optax.GradientTransformation(lambda params: (), update), optax.scale(-rate))


def muon(rate: float = 0.05) -> optax.GradientTransformation:
    """Of optax; stacks of matrices too."""

    def dims(params: Any) -> Any:
        of = {2: optax.contrib.MuonDimensionNumbers(0, 1), 3: optax.contrib.MuonDimensionNumbers(1, 2)}
        return jax.tree.map(lambda p: of.get(p.ndim), params)

    return optax.contrib.muon(rate, weight_decay=0.1, muon_weight_dimension_numbers=dims)


MAKERS: dict[str, Callable[[], optax.GradientTransformation]] = {f.__name__: f for f in (muon, shampoo, soap, together)}


def chain(params: Any, x: Any) -> Any:
    """The loss of a chain of matrices."""
    for w in params:
        x = jnp.tanh(jnp.einsum("bi,...io->bo", x, w))
    return jnp.mean(x**2)


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    """Random ones, for a chain."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def trained(step: Any, params: Any, opt_state: Any, steps: int = 3) -> Any:
    """Parameters, optimizer's state and loss after some steps."""
    loss: Any = None
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(24, params[0].shape[-2]))
        params, opt_state, loss = step(params, opt_state, x)
    return params, opt_state, loss


def difference(
    tx: Any, shapes: Any, devices: int = 4, level: Any = 2, loss: Callable[..., Any] = chain, **asked: Any
) -> float:
    """The largest one between training on one device and on several, with what is asked of `jaxdist.zero`."""
    sharded, params = jaxdist.zero(tx, level, **asked), parameters(*shapes)
    want = trained(jax.jit(train_step(loss, tx)), params, tx.init(params))
    step = jaxdist.data_parallel(train_step(loss, sharded), mesh=mesh(devices))
    return gap(want, trained(step, params, sharded.init(params)))
