"""A variational autoencoder of handwritten digits, in equinox.

    jaxdist run -n 2 examples/vae.py --level 1

The key is the same on all devices, and yet each example has its own noise: that which it has on one device. `--single`
trains under `eqx.filter_jit`, and the losses are the same.

Shape suffixes: B batch, P pixels, Z latents.

References: Kingma and Welling, arXiv 1312.6114.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from digits import load
from rich.console import Console

import jaxdist


class VAE(eqx.Module):
    encoder: eqx.nn.MLP
    decoder: eqx.nn.MLP
    latents: int

    def __init__(self, pixels: int, latents: int, key: jax.Array):
        encoder_key, decoder_key = jax.random.split(key)
        self.encoder = eqx.nn.MLP(pixels, 2 * latents, 256, 1, jax.nn.gelu, key=encoder_key)
        self.decoder = eqx.nn.MLP(latents, pixels, 256, 1, jax.nn.gelu, key=decoder_key)
        self.latents = latents

    def __call__(self, x_P: jax.Array, noise_Z: jax.Array) -> jax.Array:
        """The negative lower bound of the image's log-likelihood, in nats."""
        mean_Z, log_deviation_Z = jnp.split(self.encoder(x_P), 2)
        logit_P = self.decoder(mean_Z + jnp.exp(log_deviation_Z) * noise_Z)
        divergence = jnp.sum(0.5 * (mean_Z**2 + jnp.exp(2 * log_deviation_Z) - 1) - log_deviation_Z)
        return optax.sigmoid_binary_cross_entropy(logit_P, x_P).sum() + divergence


def nats(model: VAE, image_BxP: jax.Array, key: jax.Array) -> jax.Array:
    noise_BxZ = jax.random.normal(key, (len(image_BxP), model.latents), image_BxP.dtype)
    return jax.vmap(model)(image_BxP, noise_BxZ)


def make_train_step(tx: optax.GradientTransformation):
    def train_step(model: VAE, opt_state: optax.OptState, image_BxP, key: jax.Array):
        loss, grads = eqx.filter_value_and_grad(lambda model: nats(model, image_BxP, key).mean())(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def eval_step(model: VAE, batch, key: jax.Array) -> jax.Array:
    return jnp.sum(nats(model, batch["image"], key) * batch["real"])


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=96, help="of all devices together")
    parser.add_argument("--latents", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--level", type=int, default=0, choices=range(4), help="of ZeRO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="the same on one device, under eqx.filter_jit")
    args = parser.parse_args()

    ctx = jaxdist.init()
    if args.single and ctx.size > 1:
        raise SystemExit("--single is for one process")
    jit = eqx.filter_jit if args.single else jaxdist.data_parallel
    tx = jaxdist.zero(optax.adam(args.lr), args.level)
    train, evaluate = jit(make_train_step(tx)), jit(eval_step)

    train_set, test_set = load(None, ctx.rank, ctx.size)
    key, model_key, test_key = jax.random.split(jax.random.key(args.seed), 3)
    model = VAE(28 * 28, args.latents, model_key)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    console = Console(stderr=True, quiet=not ctx.is_root, log_path=False)
    test_nats = 0.0
    for epoch in range(args.epochs):
        losses = []
        for batch in train_set.batches(args.batch_size, seed=args.seed + epoch):
            key, step_key = jax.random.split(key)
            image_BxP = batch["image"].reshape(-1, 28 * 28)
            model, opt_state, loss = train(model, opt_state, image_BxP, step_key)
            losses.append(loss)
        test_nats = 0.0
        for batch in test_set.batches(args.batch_size):
            batch["image"] = batch["image"].reshape(-1, 28 * 28)
            test_nats += float(evaluate(model, batch, test_key)) / len(test_set)
        loss = sum(map(float, losses)) / len(losses)
        console.log(f"epoch {epoch + 1} loss {loss:.6f} test_nats {test_nats:.2f}")
    devices = 1 if args.single else ctx.num_devices
    if ctx.is_root:
        print(f"final test_nats={test_nats:.2f} epochs={args.epochs} devices={devices}")


if __name__ == "__main__":
    main()
