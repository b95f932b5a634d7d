"""optax's examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from jax.example_libraries import stax

from published import Run, published
from published.samples import BATCH, STEPS, float64, float64_module, images, pairs, random, regression
from published.source import grab, undecorated

EXAMPLES = "optax/examples"
MICRO = f"{EXAMPLES}/gradient_accumulation_and_microbatching.ipynb"
PLATEAU = f"{EXAMPLES}/contrib/reduce_on_plateau.ipynb"
PLAIN = "jax.jit; (params, opt_state, batch)"
NNX = "nnx.jit: model and optimizer changed in place"
KEY_BIAS = "The gradient of the attention's key bias is zero, so it is the rounding of float32 over its own size."


@published(
    f"{EXAMPLES}/adversarial_training.ipynb",
    "train_step",
    PLAIN,
    float32=True,
    reason="The images are float32, and what is added to them is the sign of a gradient.",
)
def optax_adversarial(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/adversarial_training.ipynb", "EPSILON", "L2_REG", "CNN", "loss_fun", "pgd_attack", "train_step"
    )
    m.net, m.optimizer = m.CNN(3), run.zero(optax.adam(1e-3))
    params = float64(m.net.init(jax.random.PRNGKey(0), jnp.zeros((1, 8, 8, 1)))["params"])
    opt_state = m.optimizer.init(params)
    step = run.decorate(undecorated(m.train_step))
    r = random()
    for _ in range(STEPS):
        batch = r.integers(0, 256, (BATCH, 8, 8, 1)).astype(np.uint8), r.integers(0, 3, (BATCH,))
        params, opt_state, *losses = step(params, opt_state, run.part(batch))
        yield params, opt_state, losses


def sam(run: Run, which: str) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/contrib/sam.ipynb", f"sam_mom{which}", f"Store{which}", f"make_step{which}")
    optimizer = run.zero(m.sam_mom(0.01, momentum=0.9))
    published_step = undecorated(m.make_step(optimizer))

    @run.decorate
    def step(store: Any, batch: Any) -> Any:
        x, y = batch
        m.loss = lambda p: jnp.mean((x @ p - y) ** 2)  # theirs has no data
        return published_step(store)

    params = jnp.array([-0.4, -0.4])
    store = m.Store(params=params, state=optimizer.init(params))
    for batch in regression(2):
        store, loss = step(store, run.part(batch))
        yield store, loss


@published(
    f"{EXAMPLES}/contrib/sam.ipynb", "make_step, transparent", "jax.jit; (store); a loss of ours, theirs has no data"
)
def optax_sam(run: Run) -> Iterator[Any]:
    return sam(run, "")


@published(
    f"{EXAMPLES}/contrib/sam.ipynb",
    "make_step, opaque",
    "jax.jit; (store); the optimizer calls the gradient's function",
)
def optax_sam_opaque(run: Run) -> Iterator[Any]:
    return sam(run, "#1")


@published(f"{EXAMPLES}/gradient_accumulation.ipynb", "build_train_step", NNX, reference=nnx.jit)
def optax_gradient_accumulation(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/gradient_accumulation.ipynb", "MLP", "loss_fn", "build_train_step")
    step = run.decorate(undecorated(m.build_train_step()))
    model = float64_module(m.MLP(nnx.Rngs(0)))
    tx = run.zero(optax.MultiSteps(optax.sgd(1e-4), every_k_schedule=3).gradient_transformation())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for batch in images((28, 28, 1), 10):
        loss = step(model, optimizer, run.part(batch))
        yield model, optimizer, loss


def micro(run: Run) -> tuple[Any, Any, list[Any]]:
    m = grab(
        MICRO, "TransformerBlock", "Transformer", "loss_fn", "update_fn", "add_gradient", "update_fn_v2",
        "update_fn_v3", adamw=run.zero(optax.adamw(0.01)), batch_size=2,
        multi_adam=run.zero(optax.MultiSteps(optax.adamw(0.01), 2).gradient_transformation()),
    )  # fmt: skip
    m.graphdef, params = nnx.split(float64_module(m.Transformer(11, 1, 8, 2, rngs=nnx.Rngs(0))), nnx.Variable)
    r = random()
    return m, params, [run.part(r.integers(0, 11, (BATCH, 6))) for _ in range(STEPS)]


@published(
    MICRO, "update_fn", "jax.jit; (params, opt_state, batch), params an nnx.State", float32=True, reason=KEY_BIAS
)
def optax_update(run: Run) -> Iterator[Any]:
    m, params, batches = micro(run)
    step, state = run.decorate(undecorated(m.update_fn)), m.adamw.init(params)
    for batch in batches:
        params, state, *_ = step(params, state, batch)
        yield params, state


@published(MICRO, "update_fn_v2", "jax.jit; (params, batch, opt_state)", float32=True, reason=KEY_BIAS)
def optax_multi_steps(run: Run) -> Iterator[Any]:
    m, params, batches = micro(run)
    step, state = run.decorate(undecorated(m.update_fn_v2)), m.multi_adam.init(params)
    for batch in batches:
        params, state, *_ = step(params, batch, state)
        yield params, state


@published(
    MICRO, "update_fn_v3", "jax.jit; (params, batch, opt_state); microbatches in a scan", float32=True, reason=KEY_BIAS
)
def optax_microbatches(run: Run) -> Iterator[Any]:
    m, params, batches = micro(run)
    step, state = run.decorate(undecorated(m.update_fn_v3)), m.adamw.init(params)
    for batch in batches:
        params, state, *_ = step(params, batch, state)
        yield params, state


@published(
    MICRO, "add_gradient", "jax.jit; (params, batch, gradients), params not returned", float32=True, reason=KEY_BIAS
)
def optax_add_gradient(run: Run) -> Iterator[Any]:
    m, params, batches = micro(run)
    step, total = run.decorate(undecorated(m.add_gradient)), optax.tree.zeros_like(params)
    for batch in batches:
        total = step(params, batch, total)
        yield total


@published(f"{EXAMPLES}/contrib/differentially_private_sgd.ipynb", "train_step", PLAIN)
def optax_dpsgd(run: Run) -> Iterator[Any]:
    init, predict = stax.serial(
        stax.Conv(4, (8, 8), padding="SAME", strides=(2, 2)), stax.Relu, stax.MaxPool((2, 2), (1, 1)),
        stax.Conv(4, (4, 4), padding="VALID", strides=(2, 2)), stax.Relu, stax.MaxPool((2, 2), (1, 1)),
        stax.Flatten, stax.Dense(8), stax.Relu, stax.Dense(10),
    )  # fmt: skip
    m = grab(f"{EXAMPLES}/contrib/differentially_private_sgd.ipynb", "DPSGD", "loss_fn", "train_step", predict=predict)
    m.tx = run.zero(optax.contrib.dpsgd(learning_rate=0.25, l2_norm_clip=1.5, noise_multiplier=1.3, seed=1337))
    params = float64(init(jax.random.PRNGKey(1337), (-1, 28, 28, 1))[1])
    opt_state = m.tx.init(params)
    step = run.decorate(undecorated(m.train_step))
    for batch in pairs((28, 28, 1), 10):
        params, opt_state, *rest = step(params, opt_state, run.part(batch))
        yield params, opt_state, rest


def plateau(which: str) -> tuple[Any, Any]:
    m = grab(PLATEAU, "MLP", "loss_accuracy", f"train_step{which}", NUM_CLASSES=10)
    m.net = m.MLP((16, 16))
    return m, float64(m.net.init({"params": jax.random.PRNGKey(0)}, jnp.ones((1, 6, 6, 1)))["params"])


@published(PLATEAU, "train_step", f"{PLAIN}; the optimizer reads the loss")
def optax_reduce_on_plateau(run: Run) -> Iterator[Any]:
    m, params = plateau("")
    slower = optax.contrib.reduce_on_plateau(patience=1, cooldown=0, factor=0.5, rtol=1e-4, accumulation_size=2)
    m.opt = run.zero(optax.chain(optax.adam(0.01), slower))
    opt_state = float64(m.opt.init(params))
    step = run.decorate(undecorated(m.train_step))
    for batch in pairs((6, 6, 1), 10):
        params, opt_state, *rest = step(params, opt_state, run.part(batch))
        yield params, opt_state, rest


@published(
    PLATEAU, "train_step, the second", "jax.jit; (params, solver_state, transform_state, batch), the third read only"
)
def optax_reduce_on_plateau_outside(run: Run) -> Iterator[Any]:
    m, params = plateau("#1")
    m.solver = run.zero(optax.adam(0.01))
    slower = optax.contrib.reduce_on_plateau(patience=1, cooldown=0, factor=0.5, rtol=1e-4, accumulation_size=1)
    state, factor = m.solver.init(params), float64(slower.init(params))
    step = run.decorate(undecorated(m.train_step))
    for batch in pairs((6, 6, 1), 10):
        params, state, *rest = step(params, state, factor, run.part(batch))
        yield params, state, rest


@published(
    f"{EXAMPLES}/lbfgs.ipynb",
    "run_opt",
    "jax.jit; a whole run with its line searches on one batch; an objective of ours",
)
def optax_lbfgs(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/lbfgs.ipynb", "run_opt")

    @run.decorate
    def step(params: Any, batch: Any) -> Any:
        x, y = batch
        return m.run_opt(params, lambda w: jnp.mean((x @ w - y) ** 2), run.zero(optax.lbfgs()), max_iter=5, tol=1e-3)

    params = jnp.zeros(4)
    for batch in regression(4):
        params, state = step(params, run.part(batch))
        yield params, state


@published(
    f"{EXAMPLES}/meta_learning.ipynb",
    "outer_step",
    "jax.jit; (eta, theta, meta_state, state, samples); means of 8 examples, theirs are scalars",
)
def optax_meta_learning(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/meta_learning.ipynb", "f", "loss", "step", "outer_loss", "outer_step")
    m.loss = lambda theta, x, y: optax.l2_loss(y, m.f(theta, x)).mean()
    m.opt = optax.inject_hyperparams(optax.rmsprop)(learning_rate=jnp.array(0.1))
    m.meta_opt = run.zero(optax.adam(learning_rate=jnp.array(0.03)))
    theta, eta = jax.random.normal(jax.random.PRNGKey(42)), -jnp.log(1.0 / jnp.array(0.1) - 1)
    meta_state, state = m.meta_opt.init(eta), float64(m.opt.init(theta))
    step = run.decorate(undecorated(m.outer_step))
    r = random()
    for _ in range(STEPS):
        xs = [r.random((BATCH,)) * 10 for _ in range(7)]
        samples = [(x, 10.0 * x + r.standard_normal((BATCH,))) for x in xs]
        eta, theta, meta_state, state = step(eta, theta, meta_state, state, run.part(samples))
        yield eta, theta, meta_state, state


@published(
    f"{EXAMPLES}/lookahead_mnist.ipynb",
    "train_step",
    "jax.jit; (params, model, solver_state, batch), the model read only",
)
def optax_lookahead(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/lookahead_mnist.ipynb", "CNN", "predict", "loss_accuracy", "train_step")
    net = float64_module(m.CNN(1, nnx.Rngs(0)))
    m.solver = run.zero(optax.lookahead(optax.adam(0.002), 2, 0.1))
    params = optax.LookaheadParams.init_synced(nnx.state(net, nnx.Param))
    state = m.solver.init(params)
    step = run.decorate(undecorated(m.train_step))
    for batch in pairs((28, 28, 1), 10):
        params, state, *rest = step(params, net, state, run.part(batch))
        yield params, state, rest


@published(f"{EXAMPLES}/mlp_mnist.ipynb", "train_step", NNX, reference=nnx.jit)
def optax_mlp_mnist(run: Run) -> Iterator[Any]:
    m = grab(f"{EXAMPLES}/mlp_mnist.ipynb", "MLP", "compute_loss_and_accuracy", "train_step")
    step = run.decorate(undecorated(m.train_step))
    model = float64_module(m.MLP(12, 10, [16, 16], rngs=nnx.Rngs(0)))
    optimizer = nnx.Optimizer(model, run.zero(optax.adam(0.002)), wrt=nnx.Param)
    for batch in pairs((12,), 10):
        rest = step(model, optimizer, run.part(batch))
        yield model, optimizer, rest
