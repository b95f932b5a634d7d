"""Differentially private training (DP-SGD) on handwritten digits: each example's gradient is clipped, noise is added.

    jaxdist run -n 2 examples/dpsgd.py --level 1

The guarantee hangs on each example alone being clipped, and on noise that is added once, to the sum over the whole
batch: as on one device. `--single` trains under `jax.jit`, and the losses are the same.

Shape suffixes: B batch, H height, W width, C channels, D inputs, K classes.

References: Abadi et al., arXiv 1607.00133; Bun and Steinke, arXiv 1605.02065 (zero-concentrated privacy).
"""

import argparse
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from digits import load
from flax.training.train_state import TrainState
from rich.console import Console

import jaxdist


class Classifier(nn.Module):
    """Small: the noise of each parameter is the same, however many there are."""

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> jax.Array:
        x_BxHxWxC = nn.avg_pool(x_BxHxWxC, (3, 3), (3, 3))
        x_BxD = x_BxHxWxC.reshape(len(x_BxHxWxC), -1)
        return nn.Dense(10)(nn.tanh(nn.Dense(32)(x_BxD)))


class State(TrainState):
    """With the key of the noise."""

    key: jax.Array


def private_gradient(grads: Any, clip: float, noise: float, key: jax.Array) -> Any:
    """The mean of gradients (leading axis: examples), none of them longer than `clip`, with noise."""
    norm_B = jax.vmap(optax.global_norm)(grads)
    scale_B = jnp.minimum(1.0, clip / norm_B)
    leaves, tree = jax.tree.flatten(grads)
    keys = jax.random.split(key, len(leaves))
    noisy = [
        jnp.tensordot(scale_B, leaf, axes=1) + noise * clip * jax.random.normal(key, leaf.shape[1:], leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, [leaf / len(norm_B) for leaf in noisy])


def make_train_step(clip: float, noise: float):
    def train_step(state: State, batch) -> tuple[State, jax.Array]:
        key, noise_key = jax.random.split(state.key)

        def loss_fn(params, image_HxWxC, label):
            (logits_K,) = state.apply_fn(params, image_HxWxC[None])
            return optax.softmax_cross_entropy_with_integer_labels(logits_K, label)

        of_each = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0, 0))
        loss_B, grads = of_each(state.params, batch["image"], batch["label"])
        grads = private_gradient(grads, clip, noise, noise_key)
        return state.apply_gradients(grads=grads, key=key), loss_B.mean()

    return train_step


def eval_step(state: State, batch) -> jax.Array:
    right_B = state.apply_fn(state.params, batch["image"]).argmax(axis=-1) == batch["label"]
    return jnp.sum(right_B & batch["real"])


def epsilon(noise: float, epochs: int, delta: float) -> float:
    """Of (epsilon, delta)-privacy, each example being in one batch an epoch at most. (No gain by subsampling.)"""
    rho = epochs / (2 * noise**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=288, help="of all devices together")
    parser.add_argument("--clip", type=float, default=0.5, help="the most that one example adds to a gradient")
    parser.add_argument("--noise", type=float, default=4.0, help="of the sum's entries, as a multiple of --clip")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under jax.jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    if args.single and ctx.size > 1:
        raise SystemExit("--single is for one process")
    jit = jax.jit if args.single else jaxdist.data_parallel
    train, evaluate = jit(make_train_step(args.clip, args.noise)), jit(eval_step)

    train_set, test_set = load(None, ctx.rank, ctx.size)
    model = Classifier()
    params = jax.jit(model.init)(jax.random.key(args.seed), train_set.image_NxHxWxC[:1])
    tx = jaxdist.zero(optax.sgd(args.lr, momentum=0.9), args.level)
    state = State.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(args.seed + 1))

    console = Console(stderr=True, quiet=not ctx.is_root, log_path=False)
    accuracy = spent = 0.0
    for epoch in range(args.epochs):
        losses = []
        for batch in train_set.batches(args.batch_size, seed=args.seed + epoch):
            state, loss = train(state, batch)
            losses.append(loss)
        correct = sum(int(evaluate(state, batch)) for batch in test_set.batches(args.batch_size))
        accuracy, spent = correct / len(test_set), epsilon(args.noise, epoch + 1, 1e-4)
        loss = sum(map(float, losses)) / len(losses)
        console.log(f"epoch {epoch + 1} loss {loss:.6f} test_accuracy {accuracy:.4f} epsilon {spent:.2f}")
    devices = 1 if args.single else ctx.num_devices
    if ctx.is_root:
        print(f"final test_accuracy={accuracy:.4f} epsilon={spent:.2f} epochs={args.epochs} devices={devices}")


if __name__ == "__main__":
    main()
