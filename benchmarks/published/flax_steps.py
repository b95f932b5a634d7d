"""flax's examples."""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

from published import Run, pmapped, published
from published.samples import (
    BATCH,
    STEPS,
    curve,
    float64,
    float64_module,
    images,
    in_shards,
    pairs,
    random,
    texts,
)  # fmt: skip
from published.source import grab, load, undecorated

TOYS = "flax/examples/nnx_toy_examples"
NNX = "nnx.jit: modules and optimizer changed in place"


@published(
    "flax/examples/mnist/train.py",
    "train_step",
    f"{NNX}; metrics, rngs",
    reference=nnx.jit,
    reason="The gradient of a bias before a BatchNorm is zero.",
)
def flax_mnist(run: Run) -> Iterator[Any]:
    m = load("flax/examples/mnist", "train")
    step = run.decorate(undecorated(m.train_step))
    model = float64_module(m.CNN(rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, run.zero(optax.sgd(0.1, 0.9)), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    rngs = nnx.Rngs(0)
    for batch in images((28, 28, 1), 10):
        step(model, optimizer, metrics, run.part(batch), rngs)
        yield model, optimizer, metrics, rngs


@published("flax/examples/vae/train.py", "train_step", "jax.jit, latents static by partial; (state, batch, key)")
def flax_vae(run: Run) -> Iterator[Any]:
    m = load("flax/examples/vae", "train")
    step = run.decorate(partial(m.train_step, latents=4))
    model, key = m.models.model(4), jax.random.key(0)
    params = float64(model.init(key, jnp.ones((BATCH, 784)), key)["params"])
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=run.zero(optax.adam(1e-3)))
    r = random()
    for i in range(STEPS):
        state = step(state, run.part((r.random((BATCH, 784)) > 0.5).astype(float)), jax.random.key(i + 1))
        yield state


def imagenet(run: Run, scaled: bool) -> Iterator[Any]:
    import ml_collections

    m = load("flax/examples/imagenet", "train")
    m.NUM_CLASSES = 10
    model = m.models._ResNet1(num_classes=10, dtype=jnp.float64, num_filters=8)
    config = ml_collections.ConfigDict({"warmup_epochs": 1, "num_epochs": 3, "half_precision": False, "momentum": 0.9})
    rate = m.create_learning_rate_fn(config, 0.1, 2)
    step = run.decorate(partial(m.train_step, learning_rate_fn=rate))
    state = in_shards(float64(m.create_train_state(jax.random.key(0), config, model, 32, rate)), run.zero)
    if scaled:
        state = state.replace(dynamic_scale=m.dynamic_scale_lib.DynamicScale(growth_interval=2))
    for batch in images((32, 32, 3), 10):
        state, metrics = step(state, run.part(batch))
        yield state, metrics


@published(
    "flax/examples/imagenet/train.py",
    "train_step",
    "jax.pmap, axis 'batch'; (state, batch)",
    reference=pmapped("batch"),
)
def flax_imagenet(run: Run) -> Iterator[Any]:
    return imagenet(run, scaled=False)


@published(
    "flax/examples/imagenet/train.py",
    "train_step with DynamicScale",
    "jax.pmap, axis 'batch'; (state, batch)",
    reference=pmapped("batch"),
)
def flax_imagenet_dynamic_scale(run: Run) -> Iterator[Any]:
    return imagenet(run, scaled=True)


def lm1b(run: Run, dropout: float, packed: bool = False) -> Iterator[Any]:
    m = load("flax/examples/lm1b", "train")
    config = m.models.TransformerConfig(
        vocab_size=13, output_vocab_size=13, dtype=jnp.float64, emb_dim=8, num_heads=2, num_layers=1, qkv_dim=8,
        mlp_dim=16, max_len=8, dropout_rate=dropout, attention_dropout_rate=dropout,
    )  # fmt: skip
    model = m.models.TransformerLM(config.replace(deterministic=True))
    params = float64(nn.meta.unbox(model.init(jax.random.key(0), jnp.ones((2, 8)))["params"]))
    rate = m.create_learning_rate_schedule(0.1, 2)
    tx = run.zero(optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    step = run.decorate(
        partial(m.train_step, config=config, learning_rate_fn=rate, label_smoothing=0.0, dropout_rng=jax.random.key(1))
    )
    for batch in texts(13, 8, packed=packed):
        state, metrics = step(state, run.part(batch))
        yield state, metrics


@published("flax/examples/lm1b/train.py", "train_step", "jax.jit, the rest by partial; (state, batch)")
def flax_lm1b(run: Run) -> Iterator[Any]:
    return lm1b(run, dropout=0.1)


@published("flax/examples/lm1b/train.py", "train_step, packed examples", "jax.jit, the rest by partial; (state, batch)")
def flax_lm1b_packed(run: Run) -> Iterator[Any]:
    return lm1b(run, dropout=0.0, packed=True)


@published(
    "flax/examples/ppo/ppo_lib.py",
    "train_step",
    "jax.jit, static and keyword arguments by partial; (state, trajectories)",
    float32=True,
    reason="The model computes in float32.",
)
def flax_ppo(run: Run) -> Iterator[Any]:
    m = load("flax/examples/ppo", "ppo_lib")
    model = m.models.ActorCritic(num_outputs=3)
    params = model.init(jax.random.key(0), jnp.ones((1, 84, 84, 4), jnp.float32))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=run.zero(optax.adam(2.5e-4)))
    step = run.decorate(
        partial(undecorated(m.train_step), batch_size=4, clip_param=0.1, vf_coeff=0.5, entropy_coeff=0.01)
    )
    r = random()
    for _ in range(STEPS):
        batch = (
            r.integers(0, 256, (BATCH, 84, 84, 4)).astype(np.float32), r.integers(0, 3, (BATCH,)),
            -1 - 0.1 * r.random((BATCH,)), r.standard_normal((BATCH,)), r.standard_normal((BATCH,)),
        )  # fmt: skip
        state, loss = step(state, run.part(batch))
        yield state, loss


@published(
    "flax/examples/seq2seq/train.py",
    "train_step",
    "jax.jit; (state, batch, key, number)",
    float32=True,
    reason="The decoder computes in float32.",
)
def flax_seq2seq(run: Run) -> Iterator[Any]:
    m = load("flax/examples/seq2seq", "train")
    m.FLAGS.hidden_size = 8
    table = m.CTable("0123456789+= ", 3)
    model = m.get_model(table, teacher_force=False)
    params = m.get_initial_params(model, jax.random.key(0), table)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=run.zero(optax.adam(0.003)))
    step = run.decorate(undecorated(m.train_step))
    python_random.seed(0)
    for _ in range(STEPS):
        state, metrics = step(state, run.part(table.get_batch(BATCH)), jax.random.key(1), table.eos_id)
        yield state, metrics


@published(
    "flax/examples/wmt/train.py",
    "train_step",
    "jax.pmap, axis 'batch', the rest by partial; (state, batch)",
    reference=pmapped("batch"),
)
def flax_wmt(run: Run) -> Iterator[Any]:
    m = load("flax/examples/wmt", "train")
    config = m.models.TransformerConfig(
        vocab_size=13, output_vocab_size=13, share_embeddings=True, logits_via_embedding=True, dtype=jnp.float64,
        emb_dim=8, num_heads=2, num_layers=1, qkv_dim=8, mlp_dim=16, max_len=8, dropout_rate=0.1,
        attention_dropout_rate=0.1,
    )  # fmt: skip
    model = m.models.Transformer(config.replace(deterministic=True))
    params = float64(model.init(jax.random.key(0), jnp.ones((2, 8)), jnp.ones((2, 8)))["params"])
    rate = m.create_learning_rate_schedule(0.1, 2)
    tx = run.zero(optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1))
    state = m.TrainState.create(apply_fn=model.apply, params=params, dynamic_scale=None, tx=tx)
    step = run.decorate(
        partial(m.train_step, config=config, learning_rate_fn=rate, label_smoothing=0.1, dropout_rng=jax.random.key(1))
    )
    for batch in texts(13, 8, keys=("inputs", "targets")):
        state, metrics = step(state, run.part(batch))
        yield state, metrics


@published(
    "flax/examples/sst2/train.py",
    "train_step",
    "jax.jit; (state, batch, dict of keys)",
    float32=True,
    reason="The LSTM computes in float32.",
)
def flax_sst2(run: Run) -> Iterator[Any]:
    import ml_collections

    m = load("flax/examples/sst2", "train")
    config = ml_collections.ConfigDict(
        {"embedding_size": 6, "hidden_size": 8, "vocab_size": 20, "output_size": 1, "dropout_rate": 0.5,
         "word_dropout_rate": 0.1, "unk_idx": 1, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 3e-6}
    )  # fmt: skip
    state = in_shards(m.create_train_state(jax.random.key(0), config, m.model_from_config(config)), run.zero)
    step = run.decorate(m.train_step)
    r = random()
    for _ in range(STEPS):
        batch = {"token_ids": r.integers(0, 20, (BATCH, 6)), "length": r.integers(2, 7, (BATCH,)),
                 "label": r.integers(0, 2, (BATCH,)).astype(np.float32)}  # fmt: skip
        state, metrics = step(state, run.part(batch), {"dropout": jax.random.key(1)})
        yield state, metrics


@published(f"{TOYS}/02_lifted_transforms.py", "train_step", NNX, reference=nnx.jit)
def flax_nnx_lifted(run: Run) -> Iterator[Any]:
    m = grab(f"{TOYS}/02_lifted_transforms.py", "Linear", "Count", "MLP", "train_step")
    step = run.decorate(undecorated(m.train_step))
    model = float64_module(m.MLP(din=1, dhidden=8, dout=1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, run.zero(optax.sgd(1e-3)), wrt=nnx.Param)
    for batch in curve():
        step(model, optimizer, run.part(batch))
        yield model, optimizer


@published(f"{TOYS}/03_train_state.py", "train_step", "jax.jit; (state, batch), the state with an nnx graph and counts")
def flax_nnx_train_state(run: Run) -> Iterator[Any]:
    m = grab(f"{TOYS}/03_train_state.py", "Linear", "Count", "MLP", "TrainState", "train_step")
    step = run.decorate(undecorated(m.train_step))
    graph, params, counts = nnx.split(m.MLP(din=1, dhidden=8, dout=1, rngs=nnx.Rngs(0)), nnx.Param, m.Count)
    tx = run.zero(optax.sgd(0.1))
    state = m.TrainState.create(apply_fn=None, graphdef=graph, params=float64(params), tx=tx, counts=counts)
    for batch in curve():
        state = step(state, run.part(batch))
        yield state


@published(f"{TOYS}/04_data_parallel_with_jit.py", "train_step", f"{NNX}; (model, optimizer, x, y)", reference=nnx.jit)
def flax_nnx_data_parallel(run: Run) -> Iterator[Any]:
    m = grab(f"{TOYS}/04_data_parallel_with_jit.py", "MLP", "train_step")
    step = run.decorate(undecorated(m.train_step))
    model = float64_module(m.MLP(1, 8, 1, rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, run.zero(optax.adamw(1e-2)), wrt=nnx.Param)
    for x, y in curve():
        loss = step(model, optimizer, run.part(x), run.part(y))
        yield model, optimizer, loss


@published(
    f"{TOYS}/05_vae.py", "train_step", f"{NNX}; rngs within the model, a loss variable taken out", reference=nnx.jit
)
def flax_nnx_vae(run: Run) -> Iterator[Any]:
    m = grab(f"{TOYS}/05_vae.py", "Loss", "Encoder", "Decoder", "VAE", "train_step")
    step = run.decorate(undecorated(m.train_step))
    model = float64_module(m.VAE(din=16, hidden_size=8, latent_size=3, output_shape=(4, 4), rngs=nnx.Rngs(0, noise=1)))
    optimizer = nnx.Optimizer(model, run.zero(optax.adam(1e-3)), wrt=nnx.Param)
    for x, _ in pairs((4, 4), 2):
        loss = step(model, optimizer, run.part((x > 0.5).astype(float)))
        yield model, optimizer, loss
