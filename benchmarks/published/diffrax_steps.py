"""diffrax's examples, and all its adjoints that train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from published import Run, published
from published.samples import BATCH, STEPS, float64, random
from published.source import grab, undecorated

EXAMPLES = "diffrax/docs/examples"
FILTERED = "eqx.filter_jit"


def trained(path: str, tx: Any, *names: str, **given: Any) -> Any:
    return grab(f"{EXAMPLES}/{path}", *names, "make_step", optim=tx, **given)


def neural_ode(run: Run, **options: Any) -> Iterator[Any]:
    m = trained("neural_ode.ipynb", run.zero(optax.adabelief(3e-3)), "Func", "NeuralODE", "_get_data", "grad_loss")
    if options:  # other arguments of theirs
        solve = diffrax.diffeqsolve
        stand_in = lambda *args, **kwargs: solve(*args, **{**kwargs, **options})
        m.diffrax = type("diffrax", (), {**vars(diffrax), "diffeqsolve": staticmethod(stand_in)})
    model = float64(m.NeuralODE(2, 6, 1, key=jr.PRNGKey(0)))
    opt_state = m.optim.init(eqx.filter(model, eqx.is_inexact_array))
    step = run.decorate(undecorated(m.make_step))
    ts = jnp.linspace(0, 1, 5)
    for i in range(STEPS):
        ys = jax.vmap(lambda key: m._get_data(ts, key=key))(jr.split(jr.PRNGKey(i), BATCH))
        loss, model, opt_state = step(ts, run.part(ys), model, opt_state)
        yield loss, model, opt_state


@published(
    f"{EXAMPLES}/neural_ode.ipynb",
    "make_step",
    f"{FILTERED}; (times, batch, model, opt_state)",
    reference=eqx.filter_jit,
)
def diffrax_neural_ode(run: Run) -> Iterator[Any]:
    return neural_ode(run)


@published(
    f"{EXAMPLES}/neural_ode.ipynb",
    "make_step, DirectAdjoint",
    f"{FILTERED}; (times, batch, model, opt_state)",
    reference=eqx.filter_jit,
)
def diffrax_direct_adjoint(run: Run) -> Iterator[Any]:
    return neural_ode(run, adjoint=diffrax.DirectAdjoint(), max_steps=64)


@published(
    f"{EXAMPLES}/neural_ode.ipynb",
    "make_step, BacksolveAdjoint",
    f"{FILTERED}; (times, batch, model, opt_state)",
    reference=eqx.filter_jit,
)
def diffrax_backsolve_adjoint(run: Run) -> Iterator[Any]:
    return neural_ode(run, adjoint=diffrax.BacksolveAdjoint())


@published(
    f"{EXAMPLES}/neural_cde.ipynb", "make_step", f"{FILTERED}; (model, data, opt_state)", reference=eqx.filter_jit
)
def diffrax_neural_cde(run: Run) -> Iterator[Any]:
    m = trained("neural_cde.ipynb", run.zero(optax.adam(1e-2)), "Func", "NeuralCDE", "get_data", "loss", "grad_loss")
    model = float64(m.NeuralCDE(3, 4, 6, 1, key=jr.PRNGKey(0)))
    opt_state = m.optim.init(eqx.filter(model, eqx.is_inexact_array))
    step = run.decorate(undecorated(m.make_step))
    for i in range(STEPS):
        ts, coefficients, labels, _ = m.get_data(BATCH, True, key=jr.PRNGKey(i))
        few = (ts[:, :6], labels, *(c[:, :5] for c in coefficients))
        loss, accuracy, model, opt_state = step(model, run.part(few), opt_state)
        yield loss, accuracy, model, opt_state


@published(
    f"{EXAMPLES}/latent_ode.ipynb",
    "make_step",
    f"{FILTERED}; (model, opt_state, times, batch, key)",
    reference=eqx.filter_jit,
)
def diffrax_latent_ode(run: Run) -> Iterator[Any]:
    m = trained("latent_ode.ipynb", run.zero(optax.adam(1e-2)), "Func", "LatentODE", "get_data", "loss")
    sizes = {"data_size": 2, "hidden_size": 4, "latent_size": 3, "width_size": 4, "depth": 1}
    model = float64(m.LatentODE(**sizes, key=jr.PRNGKey(0)))
    opt_state, key = m.optim.init(eqx.filter(model, eqx.is_inexact_array)), jr.PRNGKey(1)
    step = run.decorate(undecorated(m.make_step))
    for i in range(STEPS):
        ts, ys = m.get_data(BATCH, key=jr.PRNGKey(i))
        loss, model, opt_state, key = step(model, opt_state, run.part(ts[:, :6]), run.part(ys[:, :6]), key)
        yield loss, model, opt_state, key


@published(
    f"{EXAMPLES}/neural_sde.ipynb",
    "make_step",
    f"{FILTERED}; (two models, their states and optimizers, times, batch, key, step)",
    reference=eqx.filter_jit,
)
def diffrax_neural_sde(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/neural_sde.ipynb", "lipswish", "VectorField", "ControlledVectorField", "NeuralSDE", "NeuralCDE",
        "loss", "grad_loss", "increase_update_initial", "make_step",
    )  # fmt: skip
    generator = float64(m.NeuralSDE(1, 2, 2, 4, 4, 1, key=jr.PRNGKey(0)))
    discriminator = float64(m.NeuralCDE(1, 4, 4, 1, key=jr.PRNGKey(1)))
    g_optim, d_optim = run.zero(optax.rmsprop(2e-5)), run.zero(optax.rmsprop(-1e-4))
    g_state = g_optim.init(eqx.filter(generator, eqx.is_inexact_array))
    d_state = d_optim.init(eqx.filter(discriminator, eqx.is_inexact_array))
    step, r = run.decorate(undecorated(m.make_step)), random()
    ts = np.tile(np.arange(5.0), (BATCH, 1))
    for i in range(STEPS):
        ys = np.where(r.random((BATCH, 5, 1)) < 0.3, np.nan, r.normal(size=(BATCH, 5, 1)))
        generator, discriminator, g_state, d_state = step(
            generator, discriminator, g_state, d_state, g_optim, d_optim, run.part(ts), run.part(ys), jr.PRNGKey(2),
            jnp.asarray(i),
        )  # fmt: skip
        yield generator, discriminator, g_state, d_state


@published(
    f"{EXAMPLES}/continuous_normalising_flow.ipynb",
    "loss and the last lines of make_step",
    f"{FILTERED}; (model, opt_state, batch, weights, key); their step draws its batch itself",
    reference=eqx.filter_jit,
)
def diffrax_normalising_flow(run: Run) -> Iterator[Any]:
    m = grab(
        f"{EXAMPLES}/continuous_normalising_flow.ipynb", "Func", "ConcatSquash", "exact_logp_wrapper",
        "normal_log_likelihood", "CNF", "loss", std=1.0,
    )  # fmt: skip
    tx = run.zero(optax.adamw(1e-3, weight_decay=1e-5))

    @run.decorate
    def step(model: Any, opt_state: Any, data: Any, weight: Any, key: Any) -> Any:
        value, grads = m.loss(model, data, weight, key)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return value, eqx.apply_updates(model, updates), opt_state

    sizes = {"data_size": 2, "exact_logp": True, "num_blocks": 1, "width_size": 4, "depth": 1}
    model = float64(m.CNF(**sizes, key=jr.PRNGKey(0)))
    opt_state, r = tx.init(eqx.filter(model, eqx.is_inexact_array)), random()
    for i in range(STEPS):
        data, weight = run.part((r.normal(size=(BATCH, 2)), r.random(BATCH)))
        value, model, opt_state = step(model, opt_state, data, weight, jr.PRNGKey(i))
        yield value, model, opt_state


@published(
    f"{EXAMPLES}/steady_state.ipynb",
    "make_step, ImplicitAdjoint",
    f"{FILTERED}; (model, opt_state, target), no batch",
    reference=eqx.filter_jit,
)
def diffrax_steady_state(run: Run) -> Iterator[Any]:
    tx = run.zero(optax.sgd(1e-2, momentum=0.7, nesterov=True))
    m = trained("steady_state.ipynb", tx, "ExponentialDecayToSteadyState", "loss")
    model = m.ExponentialDecayToSteadyState(jnp.array(0.0))
    opt_state = tx.init(model)
    step = run.decorate(undecorated(m.make_step))
    for _ in range(STEPS):
        model, opt_state = step(model, opt_state, jnp.array(0.76))
        yield model, opt_state
