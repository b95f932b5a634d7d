"""nanodo's step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.training import train_state

from published import Run, published
from published.samples import float64, texts
from published.source import load

MIXED = "Its embedding and head compute in float32."
ROUNDING = MIXED + " One metric is the deviation of updates that are all equal: 1.5e-8 or 2.6e-8, by rounding."


def train(run: Run, accumulate: int, internal: bool) -> Iterator[Any]:
    m = load("nanodo", "nanodo.train")
    config = load("nanodo", "nanodo.configs.default").get_config()
    config.model.update({"D": 8, "H": 2, "L": 8, "N": 1, "F": 16, "dtype": "float64", "fsdp_enabled": False})
    config.opt.update({"num_train_steps": 10, "warmup_steps": 2})
    config.opt.grad_accumulation_steps = accumulate
    config.log_internal_metrics = internal
    model = m.model_factory.model.TransformerDo(m.model_factory.model.DoConfig(**config.model, V=13))
    params = float64(model.init(jax.random.PRNGKey(0), jnp.ones((1, 8), jnp.int32))["params"])
    tx = run.zero(m.optimizer.get_optimizer(config.opt))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    accumulated: Any = state.opt_state
    state = state.replace(step=accumulated.gradient_step)
    loss_fn = m.loss_lib.get_default_loss_fn
    step = run.decorate(partial(m._train_step, c=config, get_loss_fn=loss_fn, mesh=None))
    for batch in texts(13, 8):
        state, metrics = step(state, run.part(batch["inputs"]))
        yield state, metrics


@published(
    "nanodo/nanodo/train.py", "_train_step", "jax.jit, the rest by partial; (state, tokens)", float32=True, reason=MIXED
)
def nanodo(run: Run) -> Iterator[Any]:
    return train(run, accumulate=1, internal=False)


@published(
    "nanodo/nanodo/train.py",
    "_train_step, accumulation and all metrics",
    "jax.jit, the rest by partial; (state, tokens)",
    float32=True,
    reason=ROUNDING,
)
def nanodo_accumulate(run: Run) -> Iterator[Any]:
    return train(run, accumulate=2, internal=True)
