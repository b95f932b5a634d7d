"""Train steps as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax


def train_step(
    loss_fn: Callable[[Any, Any], Any], tx: Any, value_and_grad: Callable[..., Any] = jax.value_and_grad, **options: Any
) -> Callable[[Any, Any, Any], Any]:
    """``step(params, opt_state, batch) -> (params, opt_state, loss)``, with gradients by `value_and_grad`."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(loss_fn, **options)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step
