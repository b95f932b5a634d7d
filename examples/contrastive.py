"""Contrastive learning on handwritten digits, without their labels: two views of an image find each other.

    jaxdist run -n 2 examples/contrastive.py --level 1

Each image is told from all others of the whole batch, not of a device's part; the temperature is learned, as in CLIP.
`--single` trains under `jax.jit`, and the losses are the same.

Shape suffixes: B batch, H height, W width, C channels, D features.

References: Chen et al., arXiv 2002.05709 (SimCLR); Radford et al., arXiv 2103.00020 (CLIP).
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from digits import load
from flax.training.train_state import TrainState
from rich.console import Console

import jaxdist


class Encoder(nn.Module):
    """Images to features of length 1, and the logarithm of how sharply they are compared."""

    @nn.compact
    def __call__(self, x_BxHxWxC: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BxHxWxC = nn.gelu(nn.Conv(16, (5, 5), strides=2)(x_BxHxWxC))
        x_BxHxWxC = nn.gelu(nn.Conv(32, (3, 3), strides=2)(x_BxHxWxC))
        x_BxD = nn.gelu(nn.Dense(128)(x_BxHxWxC.reshape(len(x_BxHxWxC), -1)))
        x_BxD = nn.Dense(64)(x_BxD)
        sharpness = self.param("sharpness", nn.initializers.constant(jnp.log(10.0)), ())
        return x_BxD / jnp.linalg.norm(x_BxD, axis=1, keepdims=True), sharpness


class State(TrainState):
    """With the key of the views."""

    key: jax.Array


def view(key: jax.Array, image_HxWxC: jax.Array) -> jax.Array:
    """The image elsewhere, in another brightness, with a patch missing."""
    place, patch, light = jax.random.split(key, 3)
    padded = jnp.pad(image_HxWxC, ((3, 3), (3, 3), (0, 0)))
    moved = jax.lax.dynamic_slice(padded, (*jax.random.randint(place, (2,), 0, 7), 0), image_HxWxC.shape)
    from_patch_HxWx2 = jnp.indices(moved.shape[:2]).transpose(1, 2, 0) - jax.random.randint(patch, (2,), 0, 24)
    hidden_HxW = jnp.all((from_patch_HxWx2 >= 0) & (from_patch_HxWx2 < 4), axis=-1)
    return jnp.where(hidden_HxW[..., None], 0, moved) * jax.random.uniform(light, (), moved.dtype, 0.6, 1.4)


def views(key: jax.Array, image_BxHxWxC: jax.Array) -> jax.Array:
    return jax.vmap(view)(jax.random.split(key, len(image_BxHxWxC)), image_BxHxWxC)


def train_step(state: State, image_BxHxWxC) -> tuple[State, dict[str, jax.Array]]:
    key, a_key, b_key = jax.random.split(state.key, 3)
    a_BxHxWxC, b_BxHxWxC = views(a_key, image_BxHxWxC), views(b_key, image_BxHxWxC)

    def loss_fn(params):
        a_BxD, sharpness = state.apply_fn(params, a_BxHxWxC)
        b_BxD, _ = state.apply_fn(params, b_BxHxWxC)
        logits_BxB = jnp.exp(sharpness) * a_BxD @ b_BxD.T
        pairs_2xB = jnp.stack([nn.log_softmax(x).diagonal() for x in (logits_BxB, logits_BxB.T)])
        return -pairs_2xB.mean(), jnp.exp(-sharpness)

    (loss, temperature), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, key=key), {"loss": loss, "temperature": temperature}


def eval_step(state: State, batch) -> jax.Array:
    """The views of digits whose nearest other one, by features, shows the same digit."""
    feature_BxD, _ = state.apply_fn(state.params, views(jax.random.key(0), batch["image"]))
    other_BxB = batch["real"][None] & ~jnp.eye(len(feature_BxD), dtype=bool)
    nearest_B = jnp.where(other_BxB, feature_BxD @ feature_BxD.T, -jnp.inf).argmax(axis=1)
    return jnp.sum((batch["label"][nearest_B] == batch["label"]) & batch["real"])


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128, help="of all devices together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under jax.jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    if args.single and ctx.size > 1:
        raise SystemExit("--single is for one process")
    jit = jax.jit if args.single else jaxdist.data_parallel
    train, evaluate = jit(train_step), jit(eval_step)

    train_set, test_set = load(None, ctx.rank, ctx.size)
    model = Encoder()
    params = jax.jit(model.init)(jax.random.key(args.seed), train_set.image_NxHxWxC[:1])
    tx = jaxdist.zero(optax.adam(args.lr), args.level)
    state = State.create(apply_fn=model.apply, params=params, tx=tx, key=jax.random.key(args.seed + 1))

    console = Console(stderr=True, quiet=not ctx.is_root, log_path=False)
    accuracy = 0.0
    for epoch in range(args.epochs):
        losses, metrics = [], {}
        for batch in train_set.batches(args.batch_size, seed=args.seed + epoch):
            state, metrics = train(state, batch["image"])
            losses.append(metrics["loss"])
        # All of the test set as one batch, that each has all others to compare with.
        (whole,) = test_set.batches(len(test_set) + -len(test_set) % ctx.size)
        accuracy = int(evaluate(state, whole)) / len(test_set)
        loss, temperature = sum(map(float, losses)) / len(losses), float(metrics["temperature"])
        console.log(f"epoch {epoch + 1} loss {loss:.6f} temperature {temperature:.4f} neighbours {accuracy:.4f}")
    devices = 1 if args.single else ctx.num_devices
    if ctx.is_root:
        print(f"final neighbours={accuracy:.4f} epochs={args.epochs} devices={devices}")


if __name__ == "__main__":
    main()
