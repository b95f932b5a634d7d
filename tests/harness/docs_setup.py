"""What the pieces of code in the pages take for granted: data, a small model, its state and a step.

``run_docs.py`` runs it before the pieces of each page; a page's own definitions come on top.
"""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jaxdist

__all__ = ["P", "TrainState", "json"]

ctx = jaxdist.init()
Path("train.txt").write_text("\n\n".join(f"Document {i}. " + "It goes on. " * (i % 7) for i in range(64)))
images = np.random.default_rng(0).normal(size=(512, 6)).astype(np.float32)
labels = np.arange(512) % 3
data = {"image": images, "label": labels}
test_data = {"image": images[:300], "label": labels[:300]}
batch = {"image": images[:8], "label": labels[:8]}
example = images[:1]
epochs, start, steps, step = 1, 0, 3, 2

model: Any = nn.Dense(3)
key = jax.random.key(0)
params = model.init(key, example)
tx = optax.adam(1e-2)
opt_state = tx.init(params)
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
schedule = optax.constant_schedule(1e-2)
batches = loader = jaxdist.loader(data, 64)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    each = optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["image"]), batch["label"])
    return jnp.mean(each)


@jaxdist.data_parallel
def train_step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), {"loss": loss}
