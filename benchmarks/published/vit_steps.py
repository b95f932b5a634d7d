"""vision_transformer's step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from published import Run, pmapped, published
from published.samples import BATCH, STEPS, float64, random
from published.source import load, undecorated

STYLE = "jax.pmap, axis 'batch', axis_index; (params, opt_state, batch, key)"
REASON = "Its attention computes in float32, and the gradient of the key's bias is zero: rounding over its own size."


def train(run: Run, dropout: float, accumulate: int) -> Iterator[Any]:
    import ml_collections

    m = load("vit", "vit_jax.train")
    transformer = {
        "mlp_dim": 16,
        "num_heads": 2,
        "num_layers": 1,
        "attention_dropout_rate": 0.0,
        "dropout_rate": dropout,
    }
    model = m.models.VisionTransformer(
        num_classes=5, patches=ml_collections.ConfigDict({"size": (4, 4)}), hidden_size=8,
        transformer=ml_collections.ConfigDict(transformer),
    )  # fmt: skip
    params = float64(model.init(jax.random.PRNGKey(0), jnp.ones((1, 8, 8, 3)), train=False)["params"])
    head = params["head"]["kernel"]  # of zeros, with which all other gradients are zero at first
    params["head"]["kernel"] = 0.1 * jax.random.normal(jax.random.PRNGKey(1), head.shape)
    tx = run.zero(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.03, momentum=0.9, accumulator_dtype=None)))
    opt_state, key = tx.init(params), jax.random.PRNGKey(3)
    step = run.decorate(undecorated(m.make_update_fn(apply_fn=model.apply, accum_steps=accumulate, tx=tx)))
    r = random()
    for _ in range(STEPS):
        batch = {"image": r.random((BATCH, 8, 8, 3)), "label": np.eye(5)[r.integers(0, 5, (BATCH,))]}
        params, opt_state, loss, key = step(params, opt_state, run.part(batch), key)
        yield params, opt_state, loss, key


@published("vit/vit_jax/train.py", "make_update_fn", STYLE, reference=pmapped("batch"), float32=True, reason=REASON)
def vit(run: Run) -> Iterator[Any]:
    return train(run, dropout=0.1, accumulate=1)


@published(
    "vit/vit_jax/train.py",
    "make_update_fn, accum_steps=2",
    STYLE,
    reference=pmapped("batch"),
    float32=True,
    reason=REASON,
)
def vit_accumulate(run: Run) -> Iterator[Any]:
    return train(run, dropout=0.0, accumulate=2)
