"""LeNet on handwritten digits, on one device. mnist.py is the same on many: see the diff.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

import argparse
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from digits import load
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import track


class LeNet(nn.Module):
    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x_BxHxWxC = nn.relu(nn.Conv(6, (5, 5), padding="SAME")(x_BxHxWxC))
        x_BxHxWxC = nn.max_pool(x_BxHxWxC, (2, 2), (2, 2))
        x_BxHxWxC = nn.relu(nn.Conv(16, (5, 5), padding="VALID")(x_BxHxWxC))
        x_BxHxWxC = nn.max_pool(x_BxHxWxC, (2, 2), (2, 2))
        x_BxC = x_BxHxWxC.reshape(len(x_BxHxWxC), -1)
        x_BxC = nn.relu(nn.Dense(120)(x_BxC))
        x_BxC = nn.relu(nn.Dense(84)(x_BxC))
        return nn.Dense(10)(x_BxC)


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits_BxK = state.apply_fn(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxK, batch["label"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


@jax.jit
def eval_step(state, batch):
    guess_B = state.apply_fn(state.params, batch["image"]).argmax(axis=-1)
    return {"correct": jnp.sum((guess_B == batch["label"]) & batch["real"], dtype=jnp.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="MNIST's IDX files; else embedded digits")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=96, help="of all devices together")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float, help="if not given: 0.03 for sgd, 0.001 for adam")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    train, test = load(args.data_dir)
    lr = args.lr or {"sgd": 0.03, "adam": 1e-3}[args.optimizer]
    tx = optax.adam(lr) if args.optimizer == "adam" else optax.sgd(lr, momentum=0.9)
    model = LeNet()
    params = jax.jit(model.init)(jax.random.key(args.seed), train.image_NxHxWxC[:1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    console = Console(stderr=True)
    accuracy = 0.0
    for epoch in track(range(args.epochs), "training", console=console):
        losses = []
        for batch in train.batches(args.batch_size, seed=args.seed + epoch):
            state, metrics = train_step(state, batch)
            losses.append(metrics["loss"])
        correct = 0
        for batch in test.batches(args.batch_size):
            correct += int(eval_step(state, batch)["correct"])
        accuracy = correct / len(test)
        loss = sum(map(float, losses)) / len(losses)
        console.log(f"epoch {epoch + 1} loss {loss:.6f} test_accuracy {accuracy:.4f}")
    print(f"final test_accuracy={accuracy:.4f} epochs={args.epochs}")


if __name__ == "__main__":
    main()
