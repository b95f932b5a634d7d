"""The oracle: a decorated step on N devices computes what the plain step computes on one.

Each case is a step with its initial state and its batches. They run on virtual devices and between processes.
"""

import functools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from catalogue import idioms
from flax.training.train_state import TrainState
from harness.check import on_host, train_step

import jaxdist

BATCH = 96  # parts for 1, 2, 3, 4 and 8 devices, each in 4 microbatches
UNEVEN = 92  # 4 microbatches of 23: no number of devices divides these
STEPS = 5
Zero = Callable[[Any], Any]  # `jaxdist.zero` with its settings


@dataclass(frozen=True)
class Case:
    """A training problem."""

    name: str  # of the case
    step: Callable[..., Any]  # ``(*state, batch) -> (*new state, aux)``
    state: tuple[Any, ...]  # the initial state arguments
    batch: Callable[[int], Any]  # the whole batch of step i
    # the step to compare with, if it is not `step` itself (a step that names the mesh axis)
    plain: Callable[..., Any] | None = None
    tolerance: float = 1e-10  # of the largest difference, relative to 1 + the largest value


def run_plain(case: Case, steps: int = STEPS, rows: int = BATCH) -> Any:
    """Final state and the aux of each step, on one device, with the first `rows` of each batch."""
    step = jax.jit(case.plain or case.step)
    return _run(lambda state, i: step(*state, jax.tree.map(lambda x: x[:rows], case.batch(i))), case.state, steps)


def run_decorated(
    case: Case, steps: int = STEPS, rows: int = BATCH, with_: Callable[..., Any] = jaxdist.data_parallel,
    **settings: Any,
) -> Any:  # fmt: skip
    """The same, decorated; this process passes its rows of each batch."""
    step = with_(case.step, **{"donate": True, **settings})

    own = jaxdist.get_context().rows(rows, settings.get("mesh"))
    part = lambda x: x[own]
    state, losses = _run(lambda state, i: step(*state, jax.tree.map(part, case.batch(i))), case.state, steps)
    return jaxdist.unshard(state), losses


def _run(call: Callable[..., Any], state: tuple[Any, ...], steps: int) -> Any:
    losses = []
    for i in range(steps):
        *state, aux = call(state, i)  # type: ignore[assignment]
        losses.append(jax.tree.map(np.asarray, jaxdist.unshard(aux)))
    return state, losses


@functools.cache
def case(name: str, level: int = 0, within: int | str | None = None, offload: bool = False) -> Case:
    """A case by its name, its optimizer with these settings of `jaxdist.zero`; built once."""
    return CASES[name](lambda tx: jaxdist.zero(tx, level, within, offload=offload))  # type: ignore[arg-type]


@functools.cache
def expected(name: str, rows: int = BATCH) -> list[Any]:
    """The leaves of what one device computes, as host arrays; computed once."""
    return on_host(run_plain(case(name), rows=rows))


def layouts(state: Any, seed: str, parts: int) -> dict[str, int | None]:
    """A dimension of the leaves of a state, or None, at random, by the last part of their paths."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if len(path) == 1:  # an argument by itself
            continue
        is_key = jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.extended)
        shapes.setdefault(jax.tree_util.keystr(path[-1:]), []).append(() if is_key else np.shape(leaf))
    rng, found = random.Random(seed), dict[str, int | None]()
    for name, of_name in shapes.items():
        dims = [d for d in range(min(map(len, of_name))) if all(shape[d] >= parts for shape in of_name)]
        found[f"{re.escape(name)}$"] = rng.choice([None, *dims])
    return found


# --- models


def _rng(i: int) -> np.random.Generator:
    return np.random.default_rng(1000 + i)


def _vectors(i: int) -> dict[str, np.ndarray]:
    rng = _rng(i)
    return {"x": rng.normal(size=(BATCH, 7)), "y": rng.integers(0, 5, BATCH)}


def _dense(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]))


def _xent(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _mlp_params() -> dict[str, jax.Array]:
    rng = _rng(0)
    return {
        "w1": _dense(rng, 7, 13), "b1": jnp.zeros(13), "w2": _dense(rng, 13, 11), "b2": jnp.zeros(11),
        "w3": _dense(rng, 11, 5), "b3": jnp.zeros(5),
    }  # fmt: skip


def _mlp(p: Any, x: Any) -> Any:
    x = jax.nn.gelu(x @ p["w1"] + p["b1"])
    x = jax.nn.relu(x @ p["w2"] + p["b2"])
    return x @ p["w3"] + p["b3"]


def microbatches(zero: Zero) -> Case:
    tx, params = zero(optax.adam(1e-2)), _mlp_params()

    def loss_fn(p: Any, batch: Any) -> Any:
        logits = _mlp(p, batch["x"])
        return _xent(logits, batch["y"]), jnp.sum(logits.argmax(-1) == batch["y"])

    step = train_step(loss_fn, tx, jaxdist.value_and_grad, has_aux=True, microbatches=4)
    plain = train_step(loss_fn, tx, has_aux=True)
    return Case("microbatches", step, (params, tx.init(params)), _vectors, plain, tolerance=1e-12)


def clip_adamw(zero: Zero) -> Case:
    """In flax's TrainState."""
    tx = zero(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)))
    state = TrainState.create(apply_fn=_mlp, params=_mlp_params(), tx=tx)

    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn(params, batch["x"])
            return _xent(logits, batch["y"]), jnp.sum(logits.argmax(-1) == batch["y"])

        (loss, correct), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "correct": correct}

    return Case("MLP, clip+adamw, TrainState", step, (state,), _vectors)


@functools.cache
def idiom(name: str, rows: int, level: int = 0, within: int | None = None) -> Case:
    """A case of the catalogue of `idioms`, its optimizer as in `case`, for `rows` examples."""
    zero = lambda tx: jaxdist.zero(tx, level, within) if level else tx  # type: ignore[arg-type]
    step, state = idioms.IDIOMS[name](zero)
    return Case(name, step, state, lambda i: idioms.batch(i, rows))


def few_examples(zero: Zero) -> Case:
    """Beside large weights in slices, of which two are a table and three-dimensional: the examples travel."""
    rng = _rng(0)
    params = {
        "table": _dense(rng, 4001, 96), "w1": _dense(rng, 96, 1536), "b1": jnp.zeros(1536), "w2": _dense(rng, 1536, 96),
        "heads": _dense(rng, 96, 12, 192),
    }  # fmt: skip

    def loss_fn(p: Any, batch: Any) -> Any:
        x = p["table"][batch["y"] * 800]
        x = x + jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"]
        return jnp.mean(jnp.sin(jnp.einsum("bd,dhk->bhk", x, p["heads"])) ** 2)

    tx = zero(optax.adam(1e-3))
    return Case("few examples", train_step(loss_fn, tx), (params, tx.init(params)), _vectors)


CASES: dict[str, Callable[[Zero], Case]] = {
    "clip_adamw": clip_adamw, "microbatches": microbatches, "few_examples": few_examples,
}  # fmt: skip

IN_SHARDS = {"clip_adamw": 1, "microbatches": 2, "few_examples": 3}
"""Cases to run under `jaxdist.zero` between processes too, and their level."""
