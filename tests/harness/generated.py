"""Random programs out of `catalogue.pieces`: each a step on one device and on a mesh, at random costs."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from catalogue.pieces import PIECES
from harness.check import compare, mesh

import jaxdist

MESHES: list[dict[str, int]] = [
    {"data": 4}, {"data": 6}, {"data": 2, "model": 2}, {"data": 2, "sequence": 2}, {"data": 2, "model": 3},
    {"data": 2, "model": 2, "sequence": 2},
]  # fmt: skip
TX: Any = optax.sgd(0.1, momentum=0.9)
LARGEST = 1500  # entries of a value
IS: dict[str, Callable[[Any], bool]] = {
    "f": lambda x: x.dtype == jnp.float64 and x.ndim > 0 and x.size > 0,
    "m": lambda x: x.dtype == jnp.float64 and x.ndim > 1 and x.size > 0,
    "i": lambda x: x.dtype == jnp.int32 and x.ndim > 0 and x.size > 0,
    "b": lambda x: x.dtype == bool and x.ndim > 0 and x.size > 0,
    "k": lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.ndim > 0 and x.size > 0,
    "s": lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.ndim == 0,
}
"""Whether a value can be an operand of a piece."""


def machine(rng: random.Random, kind: Any) -> Any:
    """The devices as they are, or such as do anything between next to nothing and all in a second."""
    if not rng.randrange(3):
        return kind
    scale = lambda low, high: 10 ** rng.uniform(low, high)
    return dataclasses.replace(
        kind, link=scale(5, 13), network=scale(5, 13), latency=scale(-9, 0), network_latency=scale(-9, 0),
        flops=scale(7, 17), bandwidth=scale(7, 14),
    )  # fmt: skip


COUNTS = (3, 5, 8)
"""Pieces of a program, by turns."""


def dealt(names: list[str], seed: int) -> list[str]:
    """The pieces of a seed: all are shuffled and dealt out to one seed after the other, and then again."""
    turns, turn = divmod(seed, len(COUNTS))
    first = turns * sum(COUNTS) + sum(COUNTS[:turn])
    shuffled = lambda pack: random.Random(pack).sample(names, len(names))
    return [shuffled(k // len(names))[k % len(names)] for k in range(first, first + COUNTS[turn])]


class Generated:
    """The program of a seed: what it takes, its pieces, its mesh."""

    def __init__(self, seed: int, only: str = ""):
        self.seed, rng = seed, random.Random(seed)
        self.level: Any
        self.sizes, self.level = rng.choice(MESHES), rng.choice([None, 0, 1, 2, 3])
        rows = rng.choice([4, 5, 7, 8, 12, 13])
        self.pieces = dealt([name for name in PIECES if only in name], seed)
        self.impl = rng.choice(["threefry2x32", "threefry2x32", "rbg", "unsafe_rbg"])
        numbers = np.random.default_rng(seed)
        uniform = lambda *shape: numbers.uniform(-1, 1, shape)
        key = jax.random.key(seed, impl=self.impl)
        self.w = {"w": jnp.asarray(uniform(6, 5)), "v": jnp.asarray(uniform(7)), "t": jnp.asarray(uniform(9, 3, 2))}
        self.state: dict[str, Any] = {"key": key, "n": jnp.asarray(numbers.integers(0, 9, 5), jnp.int32)}
        self.batch = {
            "x": uniform(rows, 6), "y": uniform(rows, 3, 2), "z": uniform(rows), "m": uniform(rows) > 0,
            "i": numbers.integers(-1, rows + 1, rows).astype(np.int32), "keys": jax.random.split(key, rows),
        }  # fmt: skip

    def outputs(self, w: Any, state: Any, batch: Any) -> list[Any]:
        """What the pieces make, some of each others' results."""
        r, pool = random.Random(self.seed), [*batch.values(), *w.values(), *state.values()]
        made: list[Any] = []
        for name in self.pieces:
            takes, piece = PIECES[name]
            found = [[x for x in pool if IS[kind](x)] for kind in takes]
            if not all(found):
                continue
            recent = lambda xs: r.choice(xs[-3:] if r.random() < 0.6 else xs)
            made.append(_bounded(piece(r, *map(recent, found))))
            pool.append(made[-1])
        return made

    def step(self, tx: Any) -> Callable[..., Any]:
        """The step, which descends if its pieces can be differentiated."""

        def loss(w: Any, state: Any, batch: Any) -> tuple[Any, Any]:
            outs = self.outputs(w, state, batch)
            return sum((jnp.sum(x) for x in outs if x.dtype == jnp.float64), start=jnp.zeros(())), outs

        def step(w: Any, opt: Any, state: Any, batch: Any) -> Any:
            grads, outs = jax.grad(loss, has_aux=True)(w, state, batch)
            updates, opt = tx.update(grads, opt, w)
            return optax.apply_updates(w, updates), opt, outs

        def plain(w: Any, opt: Any, state: Any, batch: Any) -> Any:
            return w, opt, loss(w, state, batch)[1]

        try:
            jax.eval_shape(lambda w, state, batch: jax.grad(loss, has_aux=True)(w, state, batch), *self.given)
        except (NotImplementedError, ValueError, TypeError):
            return plain
        return step

    @property
    def given(self) -> tuple[Any, Any, Any]:
        return self.w, self.state, self.batch

    def jaxpr(self) -> Any:
        """The step on one device."""
        return jax.make_jaxpr(self.step(TX))(self.w, TX.init(self.w), self.state, self.batch)

    def run(self) -> None:
        """Compare; at random costs every option of an operation is taken sooner or later."""
        from jaxdist.placements.search import options  # private: that each option is exact shows if prices are random

        rng, context = random.Random(self.seed), jaxdist.get_context()
        kind, cost = context.kind, options.cost
        w, state, batch = self.given
        want = jax.jit(self.step(TX))(w, TX.init(w), state, batch)
        context.kind = machine(rng, kind)
        if rng.randrange(2):
            options.cost = lambda *_, **__: rng.random()
        try:
            tz: Any = TX if self.level is None else jaxdist.zero(TX, self.level)
            one = tuple(self.sizes) == ("data",)
            over: Any = jaxdist.data_parallel if one else jaxdist.parallel
            step = over(self.step(tz), batch_argnums="batch", mesh=mesh(self.sizes))
            got = jaxdist.unshard(step(w, tz.init(w), state, batch))
        finally:
            context.kind, options.cost = kind, cost
        compare(got, want, 1e-6)  # attention multiplies in float32

    def __str__(self) -> str:
        rows = len(self.batch["z"])
        return f"{self.seed}: {self.sizes}, level {self.level}, {rows} rows, {self.impl}: {', '.join(self.pieces)}"


def _bounded(x: Any) -> Any:
    """A value that another piece can take: small, and its numbers between -1 and 1."""
    x = x[0] if isinstance(x, tuple | list) else x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == bool:
        return x
    while x.size > LARGEST:
        x = x[: -(-x.shape[0] // 2)] if x.shape[0] > 1 else x[0]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = x.real + x.imag
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x % 64).astype(jnp.int32)
    return jnp.sin(x.astype(jnp.float64))
