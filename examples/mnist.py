"""LeNet on handwritten digits, on all devices of all processes.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

import argparse
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from digits import arrays
from flax.training.train_state import TrainState

import jaxdist


class LeNet(nn.Module):
    dropout: float = 0.0
    batchnorm: bool = False

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array, train: bool) -> jax.Array:
        def norm(x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)(x) if self.batchnorm else x

        x_BxHxWxC = nn.relu(norm(nn.Conv(6, (5, 5), padding="SAME")(x_BxHxWxC)))
        x_BxHxWxC = nn.max_pool(x_BxHxWxC, (2, 2), (2, 2))
        x_BxHxWxC = nn.relu(norm(nn.Conv(16, (5, 5), padding="VALID")(x_BxHxWxC)))
        x_BxHxWxC = nn.max_pool(x_BxHxWxC, (2, 2), (2, 2))
        x_BxC = x_BxHxWxC.reshape(len(x_BxHxWxC), -1)
        x_BxC = nn.relu(nn.Dense(120)(x_BxC))
        x_BxC = nn.Dropout(self.dropout, deterministic=not train)(x_BxC)
        x_BxC = nn.relu(nn.Dense(84)(x_BxC))
        return nn.Dense(10)(x_BxC)


class State(TrainState):
    """With the running statistics of BatchNorm, if there are any, and the key of dropout."""

    stats: Any
    key: jax.Array


@jaxdist.data_parallel
def train_step(state, batch):
    key, mask_key = jax.random.split(state.key)

    def loss_fn(params):
        logits_BxK, stats = state.apply_fn(
            {"params": params, **state.stats},
            batch["image"],
            train=True,
            rngs={"dropout": mask_key},
            mutable=["batch_stats"],
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxK, batch["label"]).mean(), stats

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, stats=stats, key=key), {"loss": loss}


@jaxdist.data_parallel
def eval_step(state, batch):
    logits_BxK = state.apply_fn({"params": state.params, **state.stats}, batch["image"], train=False)
    return jnp.sum(logits_BxK.argmax(axis=-1) == batch["label"])


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="MNIST's IDX files; else embedded digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=96, help="of all devices together")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float, help="if not given: 0.03 for sgd, 0.001 for adam")
    parser.add_argument("--dropout", type=float, default=0.0, help="the share of units to drop")
    parser.add_argument("--batchnorm", action="store_true", help="normalise after each convolution")
    parser.add_argument("--log-dir", type=Path, default="runs/mnist", help="of metrics.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    args = parser.parse_args()
    ctx = jaxdist.init()

    train, test = arrays(args.data_dir)
    batches = jaxdist.loader(train, args.batch_size, seed=args.seed)
    tests = jaxdist.loader(test, args.batch_size, shuffle=False, tail="keep")
    lr = args.lr or {"sgd": 0.03, "adam": 1e-3}[args.optimizer]
    tx = optax.adam(lr) if args.optimizer == "adam" else optax.sgd(lr, momentum=0.9)
    tx = jaxdist.zero(tx, args.level)
    model = LeNet(args.dropout, args.batchnorm)

    @jax.jit
    def create(seed):
        stats = dict(model.init(jax.random.key(seed), train["image"][:1], train=False))
        params, key = stats.pop("params"), jax.random.key(seed + 1)
        return State.create(apply_fn=model.apply, params=params, tx=tx, stats=stats, key=key)

    state = create(args.seed)
    accuracy, steps = 0.0, len(batches)
    with jaxdist.run_log(args.log_dir, total=args.epochs * steps, examples_per_step=args.batch_size) as log:
        for epoch in range(args.epochs):
            for step, batch in enumerate(batches, epoch * steps):
                state, metrics = train_step(state, batch)
                log(step, **metrics)
            accuracy = jaxdist.evaluate(eval_step, state, tests) / len(test["label"])
            log((epoch + 1) * steps - 1, test_accuracy=accuracy)
    final = f"final test_accuracy={accuracy:.4f} epochs={args.epochs}"
    if ctx.is_root:
        print(f"{final} devices={ctx.num_devices} communicator={ctx.communicator}")


if __name__ == "__main__":
    main()
