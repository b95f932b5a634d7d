"""numpyro's SVI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpyro
import numpyro.distributions as dist
import optax
from numpyro import handlers, optim
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta

from published import Run, published
from published.samples import BATCH, STEPS, float64, random, regression
from published.source import grab

VAE = "numpyro/examples/vae.py"


def train(run: Run, svi: Any, update: Any, batches: list[Any]) -> Iterator[Any]:
    step = run.decorate(update)
    state = svi.init(jax.random.key(0), batches[0])
    for batch in batches:
        state, loss = step(state, run.part(batch))
        yield state, loss


def vae(optimizer: Any) -> tuple[Any, list[Any]]:
    m = grab(VAE, "encoder", "decoder", "model", "guide")
    r = random()
    svi = SVI(m.model, m.guide, optimizer, Trace_ELBO(), hidden_dim=6, z_dim=3)
    return svi, [(r.random((BATCH, 4, 4)) > 0.5).astype(float) for _ in range(STEPS)]


@published(VAE, "SVI.update", "jax.jit of a bound method; (state, batch)")
def numpyro_svi(run: Run) -> Iterator[Any]:
    svi, batches = vae(optim.Adam(1e-3))
    return train(run, svi, svi.update, batches)


@published(VAE, "SVI.stable_update, optax", "jax.jit of a bound method; (state, batch)")
def numpyro_svi_stable(run: Run) -> Iterator[Any]:
    svi, batches = vae(run.zero(optax.adam(1e-3)))
    return train(run, svi, svi.stable_update, batches)


@published(
    "numpyro/numpyro/infer/svi.py",
    "SVI.update, AutoDelta",
    "jax.jit of a bound method; (state, batch); a model of ours",
)
def numpyro_map(run: Run) -> Iterator[Any]:
    def model(batch: Any) -> None:
        x, y = batch
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("data", x.shape[0]), handlers.scale(scale=100.0 / x.shape[0]):
            numpyro.sample("obs", dist.Normal(x @ w, 0.5), obs=y)

    svi = SVI(model, AutoDelta(model), run.zero(optax.adam(1e-2)), Trace_ELBO())
    return train(run, svi, svi.update, float64(regression(2)))
