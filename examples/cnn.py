"""A CNN with BatchNorm and dropout on handwritten digits: flax nnx, whose objects change in place.

    jaxdist run -n 2 examples/cnn.py --level 1

BatchNorm sees the whole batch, and dropout's mask is that of one device: `--single` trains under `nnx.jit`, and the
losses are the same.

Shape suffixes: B batch, H height, W width, C channels, K classes.
"""

import argparse

import jax
import optax
from digits import load
from flax import nnx
from rich.console import Console

import jaxdist


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # BatchNorm has the bias.
        self.conv1 = nnx.Conv(1, 16, (5, 5), strides=2, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(7 * 7 * 32, 10, rngs=rngs)

    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x_BxHxWxC = nnx.relu(self.norm1(self.conv1(x_BxHxWxC)))
        x_BxHxWxC = nnx.relu(self.norm2(self.conv2(x_BxHxWxC)))
        return self.out(self.dropout(x_BxHxWxC.reshape(len(x_BxHxWxC), -1)))


def train_step(model: CNN, optimizer: nnx.Optimizer, batch) -> jax.Array:
    def loss_fn(model: CNN) -> jax.Array:
        logits_BxK = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BxK, batch["label"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def eval_step(model: CNN, accuracy: nnx.metrics.Accuracy, batch) -> None:
    accuracy.update(logits=model(batch["image"]), labels=batch["label"], mask=batch["real"])


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=96, help="of all devices together")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under nnx.jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    if args.single and ctx.size > 1:
        raise SystemExit("--single is for one process")
    jit = nnx.jit if args.single else jaxdist.data_parallel
    train, evaluate = jit(train_step), jit(eval_step)

    train_set, test_set = load(None, ctx.rank, ctx.size)
    model = CNN(nnx.Rngs(args.seed))
    optimizer = nnx.Optimizer(model, jaxdist.zero(optax.adamw(args.lr), args.level), wrt=nnx.Param)
    accuracy = nnx.metrics.Accuracy()

    console = Console(stderr=True, quiet=not ctx.is_root, log_path=False)
    for epoch in range(args.epochs):
        model.train()
        batches = train_set.batches(args.batch_size, seed=args.seed + epoch)
        losses = [train(model, optimizer, batch) for batch in batches]
        model.eval()
        accuracy.reset()
        for batch in test_set.batches(args.batch_size):
            evaluate(model, accuracy, batch)
        loss = sum(map(float, losses)) / len(losses)
        console.log(f"epoch {epoch + 1} loss {loss:.6f} test_accuracy {accuracy.compute():.4f}")
    devices = 1 if args.single else ctx.num_devices
    if ctx.is_root:
        print(f"final test_accuracy={accuracy.compute():.4f} epochs={args.epochs} devices={devices}")


if __name__ == "__main__":
    main()
