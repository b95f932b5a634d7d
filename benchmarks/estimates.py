"""Estimated beside measured: whether the mesh and level that an estimate prefers are the fastest.

    mpirun -np 2 python benchmarks/estimates.py --json estimates.json

Ten models on two ranks, each on every mesh of two devices (data, model, sequence) that it can be on, at ZeRO levels 0
and 3 of the axis of data: what `mesh="auto"` goes by (`jaxdist.step.choice`) beside the median time of a step. All
candidates of a model take turns in each round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdist
from jaxdist.mesh import mesh_of
from jaxdist.runtime.context import machine_of
from jaxdist.step.choice import Estimate

RNG = np.random.default_rng(0)


def array(*shape: int) -> Any:
    return (RNG.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)


def mlp(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def attention(params: Any, x: Any) -> Any:
    for q, k, v, o, up, down in params:
        heads = [jnp.einsum("btd,dhk->bthk", x, w) for w in (q, k, v)]
        x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(*heads, is_causal=True), o)
        x = x + jnp.tanh(x @ up) @ down
    return x


def convolutions(params: Any, x: Any) -> Any:
    for w, scale in params:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu((x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-5) * scale)
    return x


def recurrent(params: Any, x: Any) -> Any:
    w, u = params
    return jax.lax.scan(lambda h, x: (jnp.tanh(x @ u + h @ w), None), x[:, 0] * 0, jnp.moveaxis(x, 1, 0))[0]


def contrastive(params: Any, x: Any) -> Any:
    z = mlp(params, x)
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return jax.nn.log_softmax(z @ z.T * 5)


def layers(count: int, width: int) -> list[Any]:
    kernel = lambda: array(width, 8, width // 8)
    return [
        (kernel(), kernel(), kernel(), array(8, width // 8, width), array(width, 4 * width), array(4 * width, width))
        for _ in range(count)
    ]


def filters(*widths: int) -> list[Any]:
    return [(array(3, 3, a, b), np.ones(b, np.float32)) for a, b in itertools.pairwise(widths)]


MODELS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "MLP 3 x 1024, 16 rows": (mlp, [array(1024, 1024)] * 3, array(16, 1024)),
    "MLP 3 x 1024, 512 rows": (mlp, [array(1024, 1024)] * 3, array(512, 1024)),
    "MLP 3 x 256, 4096 rows": (mlp, [array(256, 256)] * 3, array(4096, 256)),
    "transformer 2 x 256, 16 x 64": (attention, layers(2, 256), array(16, 64, 256)),
    "transformer 2 x 256, 2 x 512": (attention, layers(2, 256), array(2, 512, 256)),
    "transformer 2 x 512, 8 x 4": (attention, layers(2, 512), array(8, 4, 512)),
    "transformer 2 x 256, 1 x 1024": (attention, layers(2, 256), array(1, 1024, 256)),
    "convolutions with BatchNorm": (convolutions, filters(16, 64, 64), array(32, 16, 16, 16)),
    "recurrent 512, 16 x 32": (recurrent, (array(512, 512), array(512, 512)), array(16, 32, 512)),
    "contrastive 2 x 512, 256 rows": (contrastive, [array(512, 512)] * 2, array(256, 512)),
}


def step_of(apply: Callable[..., Any], level: int) -> tuple[Callable[..., Any], Any]:
    tx = optax.adam(1e-3)
    tx = jaxdist.zero(tx, level) if level else tx  # type: ignore[arg-type]

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.sin(apply(p, x))))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, tx


class Candidate:
    """A step on a mesh at a level."""

    def __init__(self, model: str, mesh: dict[str, int], level: int):
        apply, params, x = MODELS[model]
        step, tx = step_of(apply, level)
        self.name = f"{', '.join(mesh)}, level {level}"
        self._step: Any = jaxdist.parallel(step, mesh=mesh)
        self._state: Any = (params, tx.init(params))
        place, parts = jaxdist.get_context().part(mesh)
        rows = len(x) // parts
        self._x = x[place * rows : (place + 1) * rows]
        self._step.program(*self._state, self._x)
        own = mesh_of(mesh, jaxdist.get_context().devices)
        machine = machine_of(own)
        self.estimate = Estimate.of(self._step.forecast(own, machine, (*self._state, x)), machine)
        self.run(2)

    def run(self, steps: int) -> float:
        """The seconds of a step."""
        start, loss = time.perf_counter(), None
        for _ in range(steps):
            *self._state, loss = self._step(*self._state, self._x)
        jax.block_until_ready(loss)
        return (time.perf_counter() - start) / steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ctx = jaxdist.init()
    os.sched_setaffinity(0, {ctx.local_rank % (os.cpu_count() or 1)})
    found: dict[str, list[Sequence[Any]]] = {}
    for model in args.models:
        x = MODELS[model][2]
        meshes = [({"data": 2}, 0), ({"data": 2}, 3), ({"model": 2}, 0), ({"sequence": 2}, 0)]
        meshes = [
            (m, level)
            for m, level in meshes
            if ("data" not in m or len(x) > 1) and ("sequence" not in m or x.ndim == 3)
        ]
        candidates = [Candidate(model, mesh, level) for mesh, level in meshes]
        took: list[list[float]] = [[] for _ in candidates]
        for _ in range(args.rounds):
            for each, one in zip(took, candidates, strict=True):
                each.append(one.run(args.steps))
        rows = [
            (one.name, one.estimate.times.seconds, statistics.median(each), min(each), max(each))
            for one, each in zip(candidates, took, strict=True)
        ]
        found[model] = sorted(rows, key=lambda row: row[1])
        if ctx.is_root:
            fastest = min(row[2] for row in rows)
            print(f"{model}: the first by the estimate takes {found[model][0][2] / fastest:.2f} of the fastest")
            for name, estimated, median, least, most in found[model]:
                print(
                    f"  {name:18} {1e3 * estimated:9.3f} {1e3 * median:9.2f} ({1e3 * least:.2f}–{1e3 * most:.2f})",
                    flush=True,
                )
    if ctx.is_root and args.json:
        args.json.write_text(json.dumps({"communicator": ctx.communicator, "found": found}, indent=1))


if __name__ == "__main__":
    main()
