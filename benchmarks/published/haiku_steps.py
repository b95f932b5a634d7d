"""haiku's examples."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from published import Run, pmapped, published
from published.samples import BATCH, STEPS, float64, images, random, texts
from published.source import grab, load, undecorated

PLAIN = "jax.jit; (state, batch)"
IMAGENET = "haiku/examples/imagenet/train.py"


@published("haiku/examples/mnist.py", "update", PLAIN)
def haiku_mnist(run: Run) -> Iterator[Any]:
    m = grab("haiku/examples/mnist.py", "NUM_CLASSES", "Batch", "TrainingState", "net_fn", "network", "loss", "update")
    m.optimiser = run.zero(optax.adam(1e-3))
    batches = [m.Batch(d["image"], d["label"]) for d in images((6, 6, 1), 10, scale=255)]
    params = float64(m.network.init(jax.random.PRNGKey(0), batches[0].image))
    state = m.TrainingState(params, float64(params), m.optimiser.init(params))
    step = run.decorate(undecorated(m.update))
    for batch in batches:
        state = step(state, run.part(batch))
        yield state


def imagenet(run: Run, **flags: Any) -> Iterator[Any]:
    m = load("haiku", "examples.imagenet.train")
    for name, value in flags.items():
        setattr(m.FLAGS, name, value)
    m.FLAGS.train_device_batch_size = 4 * BATCH // jax.device_count()  # their learning rate asks for the product
    library = types.SimpleNamespace(**{k: v for k, v in vars(hk).items() if not k.startswith("__")})
    small = {"blocks_per_group": (1, 1, 0, 0), "channels_per_group": (8,) * 4, "use_projection": (True,) * 4}
    resnet = lambda classes, **rest: hk.nets.ResNet(num_classes=classes, bottleneck=False, **small, **rest)
    library.nets = types.SimpleNamespace(ResNet50=resnet)
    m.hk = library
    theirs = m.make_optimizer
    m.make_optimizer = lambda: run.zero(theirs())
    batches = [{"images": d["image"].astype(np.float32), "labels": d["label"]} for d in images((32, 32, 3), 1000)]
    state = m.initial_state(jax.random.PRNGKey(0), batches[0])
    narrow = lambda x: x if jnp.issubdtype(jnp.result_type(x), jnp.integer) else jnp.asarray(x, jnp.float32)
    state = jax.tree.map(narrow, state)
    step = run.decorate(undecorated(m.train_step))
    for batch in batches:
        state, rest = step(state, run.part(batch))
        yield state, rest


@published(
    IMAGENET,
    "train_step",
    "jax.pmap, axis 'i'; (state, batch)",
    reference=pmapped("i"),
    float32=True,
    reason="Its precision policy is float32.",
)
def haiku_imagenet(run: Run) -> Iterator[Any]:
    return imagenet(run)


@published(
    IMAGENET,
    "train_step, a dynamic loss scale",
    "jax.pmap, axis 'i'; (state, batch)",
    reference=pmapped("i"),
    float32=True,
    reason="Its precision policy is float32.",
)
def haiku_imagenet_dynamic_scale(run: Run) -> Iterator[Any]:
    return imagenet(run, mp_scale_type="Dynamic", mp_skip_nonfinite=True)


@published("haiku/examples/vae.py", "update", f"{PLAIN}, a key within the state")
def haiku_vae(run: Run) -> Iterator[Any]:
    m = grab(
        "haiku/examples/vae.py", "Batch", "Encoder", "Decoder", "VAEOutput", "VariationalAutoEncoder", "TrainingState",
        "model", "loss_fn", "update", optimizer=run.zero(optax.adam(1e-3)),
    )  # fmt: skip
    r = random()
    batches = [m.Batch((r.random((BATCH, 4, 4, 1)) > 0.5).astype(float)) for _ in range(STEPS)]
    params = float64(m.model.init(jax.random.PRNGKey(0), batches[0].image))
    state = m.TrainingState(params, m.optimizer.init(params), jax.random.PRNGKey(0))
    step = run.decorate(undecorated(m.update))
    for batch in batches:
        state = step(state, run.part(batch))
        yield state


@published(
    "haiku/examples/transformer/train.py",
    "update",
    f"{PLAIN}, a key within the state",
    reason="The gradient of the attention's key bias is zero, and Adam divides its rounding by its size.",
)
def haiku_transformer(run: Run) -> Iterator[Any]:
    m = load("haiku", "examples.transformer.train")
    m.NUM_LAYERS, m.NUM_HEADS, m.MODEL_SIZE, m.KEY_SIZE = 1, 2, 8, 4
    theirs = m.optimiser
    m.optimiser = lambda: run.zero(theirs())
    batches = [m.dataset.Batch(d["inputs"], np.roll(d["inputs"], -1, 1)) for d in texts(128, 8)]
    state = float64(undecorated(m.init)(jax.random.PRNGKey(0), batches[0]))
    step = run.decorate(undecorated(m.update))
    for batch in batches:
        state, metrics = step(state, run.part(batch))
        yield state, metrics


@published(
    "haiku/examples/rnn/train.py",
    "update",
    f"{PLAIN}; the batch's first axis is time: a process passes its part of the times",
)
def haiku_rnn(run: Run) -> Iterator[Any]:
    m = load("haiku", "examples.rnn.train")
    m.HIDDEN_SIZE.value = 6
    theirs = m.make_optimizer
    m.make_optimizer = lambda: run.zero(theirs())
    r = random()
    batches = [
        {"input": r.integers(0, 128, (8, BATCH)), "target": r.integers(0, 128, (8, BATCH))} for _ in range(STEPS)
    ]
    init, _ = hk.without_apply_rng(hk.transform(m.sequence_loss))
    params = float64(init(jax.random.PRNGKey(0), batches[0]))
    state = m.TrainingState(params, m.make_optimizer()[0](params))
    step = run.decorate(undecorated(m.update))
    for batch in batches:
        state = step(state, run.part(batch))
        yield state


@published("haiku/examples/mnist_gan.ipynb", "GAN.update", "jax.jit of a method, self static; (key, state, batch)")
def haiku_gan(run: Run) -> Iterator[Any]:
    m = grab(
        "haiku/examples/mnist_gan.ipynb", "Generator", "Discriminator", "tree_shape", "sparse_softmax_cross_entropy",
        "GANTuple", "GANState", "GAN", print=lambda *_: None,
    )  # fmt: skip
    gan = m.GAN(num_latents=4)
    gan.optimizers = m.GANTuple(*map(run.zero, gan.optimizers))
    r = random()
    batches = [r.random((BATCH, 28, 28, 1)) * 2 - 1 for _ in range(STEPS)]
    state = float64(undecorated(m.GAN.initial_state)(gan, jax.random.PRNGKey(0), batches[0]))
    key = jax.random.PRNGKey(1)
    step = run.decorate(types.MethodType(undecorated(m.GAN.update), gan))
    for batch in batches:
        key, state, *rest = step(key, state, run.part(batch))
        yield key, state, rest
