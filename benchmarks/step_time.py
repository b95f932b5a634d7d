"""Step time of jaxdist beside the same step written by hand, in one job, in interleaved rounds.

    mpirun -np 2 --bind-to core python benchmarks/step_time.py

Models (float32, Adam, cross-entropy, GELU, batch 64 per rank): MLP-10M: 784 -> 1024, 9 x 1024 -> 1024, -> 10;
MLP-0.4M: 784 -> 256, 3 x 256 -> 256, -> 10; MLP-deep: 784 -> 64, 100 x 64 -> 64, -> 10. By hand: `shard_map` with a
`pmean` per leaf over gloo, and one `mpi4jax.allreduce` per leaf in a local `jit`. Prints medians of rounds, and medians
of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist

MODELS = {
    "MLP-10M": [784, *[1024] * 10, 10],
    "MLP-0.4M": [784, *[256] * 4, 10],
    "MLP-deep": [784, *[64] * 101, 10],
}
BATCH = 64
tx = optax.adam(1e-3)


def init(sizes: list[int]) -> list[dict[str, jax.Array]]:
    """Weights of the MLP."""
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32), "b": jnp.zeros(b)}
        for a, b in itertools.pairwise(sizes)
    ]


def loss_fn(params: list[dict[str, jax.Array]], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross-entropy on `batch`."""
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def plain(params: Any, opt_state: Any, batch: Any) -> Any:
    """The step for one device."""
    return update(params, opt_state, *jax.value_and_grad(loss_fn)(params, batch))


def update(params: Any, opt_state: Any, loss: Any, grads: Any) -> Any:
    """What follows the gradients."""
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def by_hand_gloo(ctx: jaxdist.Context) -> Callable[..., Any]:
    """shard_map, a pmean per leaf."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.tree.map(lambda g: jax.lax.pmean(g, "data"), (loss, grads))
        return update(params, opt_state, loss, grads)

    mapped = jax.shard_map(step, mesh=ctx.mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1))


def by_hand_mpi(ctx: jaxdist.Context) -> Callable[..., Any]:
    """A local jit, an mpi4jax.allreduce per leaf."""
    import mpi4jax
    from mpi4py import MPI

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        loss, grads = jax.tree.map(lambda g: mpi4jax.allreduce(g, op=MPI.SUM) / ctx.size, (loss, grads))
        return update(params, opt_state, loss, grads)

    return jax.jit(step, donate_argnums=(0, 1))


def decorated(ctx: jaxdist.Context, communicator: str) -> Callable[..., Any]:
    """The plain step under jaxdist."""
    step = jaxdist.data_parallel(plain)

    def call(*args: Any) -> Any:
        ctx.communicator = communicator  # read when a program is built
        return step(*args)

    return call


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one variant in one round")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ctx = jaxdist.init(communicator="mpi")
    device = ctx.mesh.local_mesh.devices.flat[0]
    replicated, sharded = NamedSharding(ctx.mesh, P()), NamedSharding(ctx.mesh, P("data"))

    def globally(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), tree)

    for name in args.models:
        rng = np.random.default_rng(ctx.rank)
        local = (
            rng.normal(size=(BATCH, 784)).astype(np.float32),
            rng.integers(0, 10, BATCH).astype(np.int32),
        )
        on_device = jax.device_put(local, device)
        state = init(MODELS[name])
        state = (state, tx.init(state))
        batch = globally(local, sharded)
        variants: dict[str, tuple[Callable[..., Any], Any, Any]] = {
            "gloo by hand": (by_hand_gloo(ctx), globally(state, replicated), batch),
            "jaxdist xla": (decorated(ctx, "xla"), globally(state, replicated), batch),
            "mpi4jax by hand": (by_hand_mpi(ctx), jax.device_put(state, device), on_device),
            "jaxdist mpi": (decorated(ctx, "mpi"), globally(state, replicated), batch),
        }
        states = {k: v[1] for k, v in variants.items()}
        counts, times = {}, {k: [] for k in variants}
        losses = {}
        for k, (step, _, b) in variants.items():  # compile, then see how many calls fill the time
            copy = jax.tree.map(jnp.copy, states[k])
            *copy, losses[k] = step(*copy, b)
            jax.block_until_ready(copy)
            start = time.perf_counter()
            *copy, _ = step(*copy, b)
            jax.block_until_ready(copy)
            took = ctx.broadcast(time.perf_counter() - start)
            counts[k] = max(2, min(300, int(args.seconds / took)))
        for _ in range(args.rounds):
            for k, (step, _, b) in variants.items():
                ctx.barrier()
                s = states[k]
                start = time.perf_counter()
                for _ in range(counts[k]):
                    *s, _ = step(*s, b)
                jax.block_until_ready(s)
                times[k].append((time.perf_counter() - start) / counts[k] * 1e3)
                states[k] = s
        if ctx.is_root:
            report(name, times, losses, args.json)


def report(name: str, times: dict[str, list[float]], losses: dict[str, Any], as_json: bool) -> None:
    """A line a variant."""

    def ratio(a: str, b: str) -> str:
        ratios = [x / y for x, y in zip(times[a], times[b], strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"

    medians = {k: round(statistics.median(v), 2) for k, v in times.items()}
    ratios = {
        "xla / gloo by hand": ratio("jaxdist xla", "gloo by hand"),
        "mpi / mpi4jax by hand": ratio("jaxdist mpi", "mpi4jax by hand"),
        "mpi / xla": ratio("jaxdist mpi", "jaxdist xla"),
    }
    if as_json:
        print(json.dumps({"model": name, "ms": medians, "ratios": ratios}), flush=True)
        return
    print(f"{name}: median ms of rounds {medians}")
    print(f"  median ratio (min-max): {ratios}", flush=True)


if __name__ == "__main__":
    main()
