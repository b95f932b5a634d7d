"""JAX's own examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.example_libraries import optimizers, stax

from published import Run, published
from published.samples import BATCH, STEPS, float64, random
from published.source import grab, undecorated

EXAMPLES = "jax/examples"
PLAIN = "jax.jit; (step, opt_state, batch)"


def digits(run: Run, shape: tuple[int, ...] = (784,)) -> list[Any]:
    r = random()
    return [run.part((r.normal(size=(BATCH, *shape)), np.eye(10)[r.integers(0, 10, (BATCH,))])) for _ in range(STEPS)]


@published(f"{EXAMPLES}/mnist_classifier.py", "update", PLAIN)
def jax_mnist(run: Run) -> Iterator[Any]:
    init, predict = stax.serial(stax.Dense(16), stax.Relu, stax.Dense(10), stax.LogSoftmax)
    opt_init, opt_update, get_params = optimizers.momentum(0.001, mass=0.9)
    m = grab(
        f"{EXAMPLES}/mnist_classifier.py",
        "loss",
        "update",
        predict=predict,
        opt_update=opt_update,
        get_params=get_params,
    )
    opt_state = opt_init(float64(init(jax.random.key(0), (-1, 784))[1]))
    step = run.decorate(undecorated(m.update))
    for i, batch in enumerate(digits(run)):
        opt_state = step(i, opt_state, batch)
        yield opt_state


@published(f"{EXAMPLES}/mnist_classifier_fromscratch.py", "update", "jax.jit; (params, batch)")
def jax_mnist_from_scratch(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/mnist_classifier_fromscratch.py",
        "init_random_params",
        "predict",
        "loss",
        "update",
        step_size=0.001,
    )
    params = m.init_random_params(0.1, [784, 16, 10], np.random.RandomState(0))
    step = run.decorate(undecorated(m.update))
    for batch in digits(run):
        params = step(params, batch)
        yield params


@published(
    f"{EXAMPLES}/spmd_mnist_classifier_fromscratch.py",
    "train_step",
    "jax.jit(donate_argnums=0), written for a mesh; (params, batch)",
)
def jax_mnist_spmd(run: Run) -> Iterator[Any]:
    path = f"{EXAMPLES}/spmd_mnist_classifier_fromscratch.py"
    m = grab(path, "init_random_params", "predict", "loss", "train_step", step_size=0.001)
    params = m.init_random_params(0.1, [784, 16, 10], np.random.RandomState(0))
    step = run.decorate(undecorated(m.train_step))
    for batch in digits(run):
        params = step(params, batch)
        yield params


@published(
    f"{EXAMPLES}/mnist_vae.py",
    "the body of run_epoch",
    "jax.jit; (key, step, opt_state, batch); their step takes all data",
)
def jax_vae(run: Run) -> Iterator[Any]:
    small = lambda n: stax.serial(stax.Dense(8), stax.Relu, n)
    two = stax.serial(stax.FanOut(2), stax.parallel(stax.Dense(3), stax.serial(stax.Dense(3), stax.Softplus)))
    (encoder, encode), (decoder, decode) = small(two), small(stax.Dense(784))
    m = grab(
        f"{EXAMPLES}/mnist_vae.py", "gaussian_kl", "gaussian_sample", "bernoulli_logpdf", "elbo", encode=encode,
        decode=decode,
    )  # fmt: skip
    init, update, get_params = optimizers.momentum(0.001, mass=0.9)
    keys = jax.random.split(jax.random.key(2))
    state = init(float64((encoder(keys[0], (BATCH, 784))[1], decoder(keys[1], (BATCH, 3))[1])))

    @run.decorate
    def step(key: Any, i: Any, opt_state: Any, images: Any) -> Any:
        elbo_key, data_key = jax.random.split(jax.random.fold_in(key, i))
        batch = jax.random.bernoulli(data_key, images)
        loss = lambda params: -m.elbo(elbo_key, params, batch) / BATCH
        return update(i, jax.grad(loss)(get_params(opt_state)), opt_state)

    r = random()
    for i in range(STEPS):
        state = step(jax.random.key(1), i, state, run.part(r.random((BATCH, 784))))
        yield state


@published(f"{EXAMPLES}/differentially_private_sgd.py", "private_update", "jax.jit; (key, step, opt_state, batch)")
def jax_dpsgd(run: Run) -> Iterator[Any]:
    init, predict = stax.serial(
        stax.Conv(2, (8, 8), padding="SAME", strides=(4, 4)), stax.Relu, stax.MaxPool((2, 2), (1, 1)), stax.Flatten,
        stax.Dense(10),
    )  # fmt: skip
    opt_init, opt_update, get_params = optimizers.sgd(0.15)
    values = {"_L2_NORM_CLIP": 1.0, "_NOISE_MULTIPLIER": 1.1, "_BATCH_SIZE": BATCH}
    m = grab(
        f"{EXAMPLES}/differentially_private_sgd.py", "loss", "clipped_grad", "private_grad", "shape_as_image",
        "private_update", predict=predict, opt_update=opt_update, get_params=get_params,
        **{name: type("Flag", (), {"value": value}) for name, value in values.items()},
    )  # fmt: skip
    opt_state = opt_init(float64(init(jax.random.key(0), (-1, 28, 28, 1))[1]))
    step = run.decorate(undecorated(m.private_update))
    for i, (images, labels) in enumerate(digits(run)):
        opt_state = step(jax.random.key(0), i, opt_state, m.shape_as_image(images, labels, dummy_dim=True))
        yield opt_state


@published(f"{EXAMPLES}/advi.py", "update", "jax.jit; (step, opt_state), no batch", batch=())
def jax_advi(run: Run) -> Iterator[Any]:
    init, opt_update, get_params = optimizers.momentum(step_size=0.1, mass=0.9)
    m = grab(
        f"{EXAMPLES}/advi.py", "diag_gaussian_sample", "diag_gaussian_logpdf", "elbo", "batch_elbo",
        "funnel_log_density", "num_samples", "objective", "update", opt_update=opt_update, get_params=get_params,
    )  # fmt: skip
    opt_state = init((np.zeros(2), np.zeros(2)))
    step = run.decorate(undecorated(m.update))
    for i in range(STEPS):
        opt_state = step(i, opt_state)
        yield opt_state
