"""A whole run of an example's model in float64: `python whole_runs.py mnist|gpt PATH STEPS LEVEL`.

Through `loader`, whose last batch of an epoch is smaller, with dropout, BatchNorm (mnist), rematerialised scanned
layers (gpt), clipping and AdamW. It goes on from the last checkpoint in PATH, saves its own at the end, and prints the
losses and final weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxdist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import digits  # pyright: ignore[reportMissingImports]
import gallery
import gpt  # pyright: ignore[reportMissingImports]
import mnist  # pyright: ignore[reportMissingImports]


def of_mnist(level: int) -> tuple[Any, Any, Any]:
    """Step, state, examples."""
    train = digits.load(None)[0]
    model = mnist.LeNet(dropout=0.2, batchnorm=True)
    stats = dict(gallery.wide(model.init(jax.random.key(0), train.image_NxHxWxC[:1], train=False)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = mnist.State.create(
        apply_fn=model.apply, params=stats.pop("params"), tx=jaxdist.zero(tx, level),  # type: ignore[arg-type]
        stats=stats, key=jax.random.key(1),
    )  # fmt: skip
    return mnist.train_step, state, gallery.wide({"image": train.image_NxHxWxC[:83], "label": train.label_N[:83]})


def of_gpt(level: int) -> tuple[Any, Any, Any]:
    """Step, state, examples."""
    model = gpt.GPT(layers=2, heads=2, width=32, context=32, dtype=np.float64, dropout=0.2)  # type: ignore[arg-type]
    state = gpt.make_state(model, gpt.make_optimizer(1e-2, 14, False, level), 0)
    jax.nn.dot_product_attention = gallery.attention  # type: ignore[assignment]
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8)
    return jaxdist.data_parallel(gpt.make_train_step(1)), state, gpt.windows(text, 32)[:43]


def main(model: str, path: str, steps: int, level: int) -> None:
    """As a script."""
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init()
    step, state, examples = {"mnist": of_mnist, "gpt": of_gpt}[model](level)
    batches = jaxdist.loader(examples, 16, seed=0, tail="keep")
    first = jaxdist.latest_step(path) or 0
    if first:
        saved = jaxdist.restore(path, {"train": state, "data": batches.get_state()})
        state = saved["train"]
        batches.set_state(saved["data"])
    losses: list[float] = []
    while first + len(losses) < steps:
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            if first + len(losses) == steps:
                break
    jaxdist.save(path, {"train": state, "data": batches.get_state()}, steps)
    weights = [np.asarray(x).tolist() for x in jax.tree.leaves(jaxdist.unshard(state.params))]
    print("FOUND " + json.dumps({"devices": ctx.num_devices, "losses": losses, "weights": weights}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
