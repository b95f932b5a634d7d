"""Train steps in JAX for `worker.py`: under jaxdist, hand-written, and lower bounds.

| name | what |
|---|---|
| `jaxdist COMMUNICATOR LEVEL` | `jaxdist.data_parallel`, at levels 1 to 3 with `jaxdist.zero` |
| `gloo per leaf`, `gloo flat` | `shard_map`; a `pmean` of each gradient, of all gradients in one buffer |
| `mpi4jax per leaf`, `mpi4jax flat` | a local `jit` with `mpi4jax.allreduce` in it |
| `constraints LEVEL` | `jit` over global arrays with sharding constraints: level 0, 1 or 3 |
| `jit` | `jax.jit`, on one rank |
| `raw allreduce` | mpi4py's, on the bytes of the gradients, between two NumPy buffers |
| … `x2` | on one rank: with the batches of two |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_models import loss_of
from worker import Variant

import jaxdist

tx = optax.adam(models.LEARNING_RATE)


class Steps:
    """The steps of one rank for one model.

    Args:
      model: its name.
    """

    def __init__(self, model: str):
        self.ctx = jaxdist.init()
        self.model = models.find(model)
        self.loss = loss_of(self.model)
        self.params = models.init(self.model)

    def __call__(self, name: str) -> Variant:
        """Return the variant with this name."""
        words = name.split()
        twice = words[-1] == "x2"
        batch = models.batches(self.model, [0, 1] if twice else [self.ctx.rank])
        match words[:-1] if twice else words:
            case ["jaxdist", communicator, level]:
                return self._jaxdist(communicator, int(level), batch)
            case ["gloo", *how]:
                return self._loop(self._over_gloo(how), self._globally((self.params, tx.init(self.params)), P()), batch)
            case ["mpi4jax", *how]:
                return self._locally(self._over_mpi(how), batch)
            case ["constraints", level]:
                return self._constraints(int(level), batch)
            case ["jit"]:
                return self._locally(jax.jit(self._step, donate_argnums=(0, 1)), batch)
            case ["raw", "allreduce"]:
                return self._raw()
        raise ValueError(f"no variant {name!r}")

    def _step(
        self, params: Any, opt_state: Any, batch: Any, reduce: Callable[[Any], Any] = lambda x: x, tx: Any = tx
    ) -> Any:
        """Run a step; `reduce` takes (loss, gradients)."""
        value, grads = reduce(jax.value_and_grad(self.loss)(params, batch))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def _jaxdist(self, communicator: str, level: int, batch: Any) -> Variant:
        sharded: Any = jaxdist.zero(tx, level) if level else tx  # type: ignore[arg-type]

        @jaxdist.data_parallel(donate=True)
        def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
            return self._step(params, opt_state, batch, tx=sharded)

        def call(*args: Any) -> Any:
            if communicator != "auto":
                self.ctx.communicator = communicator  # read when the step is built
            return train_step(*args)

        return self._loop(call, (self.params, sharded.init(self.params)), batch)

    # --- by hand

    def _over_gloo(self, how: list[str]) -> Callable[..., Any]:
        reduce = _each_or_flat(how, lambda g: jax.lax.pmean(g, "data"))
        step = lambda params, opt_state, batch: self._step(params, opt_state, batch, reduce)
        specs = (P(), P(), P("data"))
        mapped = jax.shard_map(step, mesh=self.ctx.mesh, in_specs=specs, out_specs=P(), check_vma=False)
        return jax.jit(mapped, donate_argnums=(0, 1))

    def _over_mpi(self, how: list[str]) -> Callable[..., Any]:
        import mpi4jax
        from mpi4py import MPI

        reduce = _each_or_flat(how, lambda g: mpi4jax.allreduce(g, op=MPI.SUM) / self.ctx.size)
        step = lambda params, opt_state, batch: self._step(params, opt_state, batch, reduce)
        return jax.jit(step, donate_argnums=(0, 1))

    def _constraints(self, level: int, batch: Any) -> Variant:
        mesh = self.ctx.mesh

        def cut(x: Any) -> NamedSharding:
            dims = sorted((d for d, n in enumerate(x.shape) if n % mesh.size == 0), key=lambda d: -x.shape[d])
            return NamedSharding(mesh, P(*("data" if d == dims[0] else None for d in range(x.ndim))) if dims else P())

        whole = lambda _: NamedSharding(mesh, P())
        opt_state = tx.init(self.params)
        params_at = jax.tree.map(cut if level == 3 else whole, self.params)
        opt_state_at = jax.tree.map(cut if level else whole, opt_state)
        grads_at = jax.tree.map(cut if level else whole, self.params)

        def reduce(loss_and_grads: Any) -> Any:
            loss, grads = loss_and_grads
            return loss, jax.lax.with_sharding_constraint(grads, grads_at)

        step = jax.jit(
            lambda params, opt_state, batch: self._step(params, opt_state, batch, reduce),
            out_shardings=(params_at, opt_state_at, NamedSharding(mesh, P())),
            donate_argnums=(0, 1),
        )
        state = jax.tree.map(_place, (self.params, opt_state), (params_at, opt_state_at))
        return self._loop(step, state, batch)

    # --- lower bounds

    def _raw(self) -> Variant:
        from mpi4py import MPI

        mine = np.concatenate([x.ravel() for x in models.leaves(self.params)])
        out = np.empty_like(mine)
        return Variant(lambda: MPI.COMM_WORLD.Allreduce(mine, out))

    # --- placing and stepping

    def _globally(self, tree: Any, spec: P) -> Any:
        sharding = NamedSharding(self.ctx.mesh, spec)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

    def _locally(self, step: Callable[..., Any], batch: Any) -> Variant:
        device = self.ctx.mesh.local_mesh.devices.flat[0]
        state = jax.device_put(jax.tree.map(jnp.asarray, (self.params, tx.init(self.params))), device)
        return _stepping(step, state, jax.device_put(batch, device))

    def _loop(self, step: Callable[..., Any], state: Any, batch: Any) -> Variant:
        return _stepping(step, state, self._globally(batch, P("data")))


def _stepping(step: Callable[..., Any], state: Any, batch: Any) -> Variant:
    held = list(state)

    def once() -> Any:
        *held[:], loss = step(*held, batch)
        return loss

    return Variant(once, lambda: jax.block_until_ready(held))


def _each_or_flat(how: list[str], reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if how == ["per", "leaf"]:
        return lambda tree: jax.tree.map(reduce, tree)

    def flat(tree: Any) -> Any:
        buffer, back = ravel_pytree(tree)
        return back(reduce(buffer))

    return flat


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
