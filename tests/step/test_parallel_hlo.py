"""What `parallel` makes of the GPT of examples/: messages, FLOPs and memory of one device."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import parity
from harness.meshes import mesh

import jaxdist
from jaxdist.ir.wire import transfers
from jaxdist.mesh import axes_of_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from transformer import GPT

pytestmark = [pytest.mark.optimised, pytest.mark.usefixtures("messages_take_time")]

LAYERS, WIDTH = 3, 64
MEGATRON = {"params.*Dense_0": 2, "params.*Dense_1": 1, "params.*Dense_2": 1, "params.*Dense_3": 2}
"""Query, key and value by columns, their output by rows; the second matrix of the MLP, of which flax names the outer
one first, by rows, the first one by columns."""


@functools.cache
def model(rows: int, context: int, remat: bool) -> tuple[Any, Any, Any]:
    gpt = GPT(LAYERS, 4, WIDTH, context, remat=remat)
    params = jax.eval_shape(gpt.init, jax.random.key(0), jnp.zeros((1, context), jnp.uint8))
    tx = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(gpt.apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    x = np.random.default_rng(0).integers(0, 256, (rows, context)).astype(np.int32)
    return step, (params, jax.eval_shape(tx.init, params)), (x, np.roll(x, -1, 1))


@functools.cache
def made(sizes: tuple[tuple[str, int], ...], rows: int, context: int, vocabulary: bool, remat: bool) -> Any:
    """How many there are of each collective of a device, its FLOPs over an equal part of one alone, the program."""
    step, state, batch = model(rows, context, remat)
    on = mesh(dict(sizes))
    layouts = MEGATRON | ({"params.*embedding": 0} if vocabulary else {}) if "model" in on.shape else None
    decorated: Any = jaxdist.parallel(step, mesh=on, layouts=layouts, batch_argnums=(2, 3))
    found: list[Any] = []
    decorated._traced = lambda _, closed, __: found.append(closed)
    lowered = decorated.lower(*state, *batch)
    closed, plain = found[-1], jax.make_jaxpr(step)(*state, *batch)
    flops = on.size * parity.flops(closed.jaxpr) / parity.flops(plain.jaxpr)
    return dict(transfers(closed, axes_of_mesh(on))), flops, lowered


def test_megatron_with_remat() -> None:
    """Two and two all-reduces a layer, and the output of its attention again; nothing else, and of a weight none."""
    sent, _, _ = made((("model", 4),), 4, 64, vocabulary=False, remat=True)
    found = [(one.kind, one.elements) for one, count in sent.items() for _ in range(count)]
    assert found == [("all-reduce", 4 * 64 * WIDTH)] * 5
    assert all(one.place and one.times == LAYERS for one in sent)


def test_megatron_divides_the_work() -> None:
    """With the vocabulary too, of which each device has the logits of a part."""
    assert made((("model", 4),), 4, 64, vocabulary=True, remat=False)[1] <= 1.02


def test_sequence() -> None:
    """One example, whose tokens four devices share: keys and values travel, and of weights the gradients alone."""
    context = 1024
    sent, flops, lowered = made((("sequence", 4),), 1, context, vocabulary=False, remat=True)
    assert flops <= 1.02
    step, state, batch = model(1, context, remat=True)
    alone = jax.jit(step, donate_argnums=(0, 1)).lower(*state, *batch)
    on_four, whole = (one.compile().memory_analysis() for one in (lowered, alone))
    assert on_four.temp_size_in_bytes <= 1.3 / 4 * whole.temp_size_in_bytes  # type: ignore[union-attr]
    params = jax.tree.leaves(state[0])
    weights = {x.size // LAYERS if x.ndim == 3 else x.size for x in params} - {context * WIDTH}
    for one in sent:
        if one.elements in weights or one.elements > context * WIDTH:
            assert one.kind == "all-reduce"
