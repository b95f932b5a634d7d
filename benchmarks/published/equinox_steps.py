"""equinox's examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from published import Run, published
from published.samples import BATCH, STEPS, float64, random, regression
from published.source import grab, undecorated

EXAMPLES = "equinox/docs/examples"
FILTERED = "eqx.filter_jit"


def classes(r: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    return r.normal(size=(BATCH, *shape)), r.integers(0, 10, (BATCH,))


@published(
    f"{EXAMPLES}/mnist.ipynb",
    "make_step",
    f"{FILTERED}; (model, opt_state, x, y), functions in the model",
    reference=eqx.filter_jit,
)
def equinox_mnist(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/mnist.ipynb", "CNN", "cross_entropy", "loss", "make_step", optim=run.zero(optax.adamw(3e-4)))
    model = float64(m.CNN(jr.PRNGKey(0)))
    opt_state = m.optim.init(eqx.filter(model, eqx.is_array))
    step = run.decorate(undecorated(m.make_step))
    r = random()
    for _ in range(STEPS):
        x, y = run.part(classes(r, (1, 28, 28)))
        model, opt_state, loss = step(model, opt_state, x, y)
        yield model, opt_state, loss


@published(
    f"{EXAMPLES}/train_rnn.ipynb",
    "make_step",
    f"{FILTERED}; (model, x, y, opt_state), numbers in the model",
    reference=eqx.filter_jit,
)
def equinox_rnn(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/train_rnn.ipynb", "RNN", "get_data", "compute_loss", "make_step", optim=run.zero(optax.adam(3e-3))
    )
    model = float64(m.RNN(2, 1, 8, key=jr.PRNGKey(0)))
    opt_state = m.optim.init(eqx.filter(model, eqx.is_array))
    step = run.decorate(undecorated(m.make_step))
    for i in range(STEPS):
        x, y = run.part(m.get_data(BATCH, key=jr.PRNGKey(i)))
        loss, model, opt_state = step(model, x, y, opt_state)
        yield loss, model, opt_state


@published(
    f"{EXAMPLES}/frozen_layer.ipynb",
    "make_step",
    f"{FILTERED}; (model, x, y, opt_state), parts of the model are not trained",
    reference=eqx.filter_jit,
)
def equinox_frozen_layer(run: Run) -> Iterator[Any]:
    model = float64(eqx.nn.MLP(in_size=1, out_size=1, width_size=8, depth=1, key=jr.PRNGKey(0)))
    last = lambda tree: (tree.layers[-1].weight, tree.layers[-1].bias)
    trained = eqx.tree_at(last, jax.tree.map(lambda _: False, model), replace=(True, True))
    m = grab(
        f"{EXAMPLES}/frozen_layer.ipynb", "get_data", "make_step", optim=run.zero(optax.sgd(3e-3)), filter_spec=trained
    )
    opt_state = m.optim.init(eqx.filter(model, eqx.is_array))
    step = run.decorate(undecorated(m.make_step))
    for i in range(STEPS):
        x, y = run.part(m.get_data(BATCH, key=jr.PRNGKey(i)))
        model, opt_state = step(model, x, y, opt_state)
        yield model, opt_state


@published(
    f"{EXAMPLES}/stateful.ipynb",
    "make_step",
    f"{FILTERED}; (model, eqx.nn.State, opt_state, x, y)",
    reference=eqx.filter_jit,
)
def equinox_stateful(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/stateful.ipynb", "Model", "compute_loss", "make_step", optim=run.zero(optax.adam(3e-4)))
    model, state = float64(eqx.nn.make_with_state(m.Model)(jr.PRNGKey(0)))
    opt_state = m.optim.init(eqx.filter(model, eqx.is_inexact_array))
    step = run.decorate(undecorated(m.make_step))
    for x, _ in regression(3):
        model, state, opt_state = step(model, state, opt_state, run.part(x), run.part(np.sin(x) + 1))
        yield model, state, opt_state


@published(
    f"{EXAMPLES}/parallelism.ipynb",
    "train_step",
    f"{FILTERED}(donate='all'), its own mesh; (model, opt_state, x, y)",
    reference=eqx.filter_jit,
)
def equinox_parallelism(run: Run) -> Iterator[Any]:
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:1])
    split, whole = (jax.sharding.NamedSharding(mesh, jax.P(*axis)) for axis in (("batch",), ()))
    m = grab(
        f"{EXAMPLES}/parallelism.ipynb", "compute_loss", "train_step", optim=run.zero(optax.adam(3e-4)),
        data_sharding=split, model_sharding=whole,
    )  # fmt: skip
    model = float64(eqx.nn.MLP(4, 4, 8, 1, key=jr.PRNGKey(6789)))
    opt_state = m.optim.init(eqx.filter(model, eqx.is_inexact_array))
    step = run.decorate(undecorated(m.train_step))
    for x, _ in regression(4):
        model, opt_state = step(model, opt_state, run.part(x), run.part(np.sin(x)))
        yield model, opt_state


@published(
    f"{EXAMPLES}/score_based_diffusion.ipynb",
    "make_step",
    f"{FILTERED}; (model, two functions, batch, number, key, opt_state, a function)",
    reference=eqx.filter_jit,
)
def equinox_diffusion(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/score_based_diffusion.ipynb",
        "MixerBlock",
        "Mixer2d",
        "single_loss_fn",
        "batch_loss_fn",
        "make_step",
    )
    model = float64(m.Mixer2d((1, 8, 8), 4, 6, 8, 8, 1, 10.0, key=jr.PRNGKey(0)))
    tx = run.zero(optax.adabelief(3e-4))
    opt_state, key = tx.init(eqx.filter(model, eqx.is_inexact_array)), jr.PRNGKey(1)
    int_beta = lambda t: t
    weight = lambda t: 1 - jnp.exp(-int_beta(t))
    step = run.decorate(undecorated(m.make_step))
    r = random()
    for _ in range(STEPS):
        data = run.part(r.normal(size=(BATCH, 1, 8, 8)))
        loss, model, key, opt_state = step(model, weight, int_beta, data, 10.0, key, opt_state, tx.update)
        yield loss, model, key, opt_state


@published(
    f"{EXAMPLES}/vision_transformer.ipynb",
    "step_model",
    f"{FILTERED}; (model, the optimizer itself, its state, images, labels, a key an example)",
    reference=eqx.filter_jit,
)
def equinox_vision_transformer(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/vision_transformer.ipynb", "PatchEmbedding", "AttentionBlock", "VisionTransformer",
        "compute_grads", "step_model", channels=3,
    )  # fmt: skip
    model = float64(m.VisionTransformer(8, 16, 2, 1, 0.1, 4, 4, 10, jr.PRNGKey(2003)))
    tx = run.zero(optax.adamw(1e-4, b1=0.9, b2=0.999))
    state, key = tx.init(eqx.filter(model, eqx.is_inexact_array)), jr.PRNGKey(1)
    step = run.decorate(undecorated(m.step_model))
    r = random()
    for _ in range(STEPS):
        images, labels = run.part(classes(r, (3, 8, 8)))
        key, *keys = jr.split(key, num=BATCH + 1)
        model, state, loss = step(model, tx, state, images, labels, run.part(jnp.array(keys)))
        yield model, state, loss


def gan(run: Run) -> tuple[Any, ...]:
    m = grab(
        f"{EXAMPLES}/deep_convolutional_gan.ipynb", "Generator", "Discriminator", "compute_grads_discriminator",
        "compute_grads_generator", "step_discriminator", "step_generator", batch_size=BATCH, latent_size=3,
    )  # fmt: skip
    size = (64, 2, 1)  # the layers' widths are the image's
    generator, its_state = float64(eqx.nn.make_with_state(m.Generator)(3, size, key=jr.PRNGKey(0)))
    discriminator, state = float64(eqx.nn.make_with_state(m.Discriminator)(size, key=jr.PRNGKey(1)))
    txs = [run.zero(optax.adam(2e-4, b1=0.5, b2=0.999)) for _ in range(2)]
    opts = [tx.init(eqx.filter(model, eqx.is_array)) for tx, model in zip(txs, (generator, discriminator), strict=True)]
    return m, generator, its_state, discriminator, state, txs, opts


@published(
    f"{EXAMPLES}/deep_convolutional_gan.ipynb",
    "step_discriminator and step_generator",
    f"{FILTERED}; models, optimizers, states and a key; the second step has no batch",
    reference=eqx.filter_jit,
)
def equinox_gan(run: Run) -> Iterator[Any]:
    m, generator, its_state, discriminator, state, (g_tx, d_tx), (g_opt, d_opt) = gan(run)
    first = run.decorate(undecorated(m.step_discriminator))
    second = run.decorate(undecorated(m.step_generator))
    key, r = jr.PRNGKey(2), random()
    for _ in range(STEPS):
        real = run.part(r.normal(size=(BATCH, 1, 64, 64)))
        d_loss, discriminator, d_opt, its_state, state, key = first(
            discriminator, generator, real, d_tx, d_opt, its_state, state, key
        )
        g_loss, generator, g_opt, state, its_state, key = second(
            generator, discriminator, g_tx, g_opt, state, its_state, key
        )
        yield d_loss, discriminator, d_opt, g_loss, generator, g_opt, state, its_state, key
