"""Estimated and measured time of a step, and whether the mesh with the best estimate is the fastest.

    python benchmarks/estimates.py --json estimates.json

Ten models, each on every possible mesh of two devices, at ZeRO levels 0 and 3: the estimate that
`mesh="auto"` uses, and the median time of a step. The table shows the candidate with the best
estimate, its estimated and measured milliseconds, and its time divided by the fastest candidate's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
from rounds import in_turns

import jaxdist
from jaxdist.mesh import mesh_of
from jaxdist.runtime.context import machine_of

NEAR = 1.05
"""Ratio to the fastest candidate up to which the preferred one counts as right, above the noise of rounds."""
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
        self._x = x[jaxdist.get_context().rows(len(x), mesh)]
        self._step.program(*self._state, self._x)
        own = mesh_of(mesh, jaxdist.get_context().devices)
        machine = machine_of(own)
        ahead = self._step.forecast(own, machine, (*self._state, x), {}, False).ahead()
        self.estimate = ahead.times(ahead.sent(machine), machine)
        self.run(2)

    def run(self, steps: int) -> float:
        """Return the seconds per step."""
        start, loss = time.perf_counter(), None
        for _ in range(steps):
            *self._state, loss = self._step(*self._state, self._x)
        jax.block_until_ready(loss)
        return (time.perf_counter() - start) / steps


def measure(models: Sequence[str], rounds: int, steps: int) -> dict[str, list[Sequence[Any]]]:
    """Return each model's candidates, ordered by estimate: name, estimated seconds, and the median,
    smallest and largest measured step times."""
    found: dict[str, list[Sequence[Any]]] = {}
    for model in models:
        x = MODELS[model][2]
        meshes = [({"data": 2}, 0), ({"data": 2}, 3), ({"model": 2}, 0), ({"sequence": 2}, 0)]
        candidates = [
            Candidate(model, mesh, level)
            for mesh, level in meshes
            if ("data" not in mesh or len(x) > 1) and ("sequence" not in mesh or x.ndim == 3)
        ]
        took = in_turns({one.name: functools.partial(one.run, steps) for one in candidates}, rounds)
        rows = [(one.name, one.estimate.seconds, *report.spread(took[one.name])) for one in candidates]
        found[model] = sorted(rows, key=lambda row: row[1])
    return found


def markdown(results: dict[str, Any]) -> str:
    """Return a table with one row per model, and how often the estimate is right."""
    wires, rows, right = results["found"], [], Counter[str]()
    for model in results["models"]:
        cells = []
        for wire, found in wires.items():
            name, estimated, took, *_ = found[model][0]
            over = took / min(row[2] for row in found[model])
            right[wire] += over <= NEAR
            cells += [name, report.three(1e3 * estimated), report.three(1e3 * took), f"{over:.2f}"]
        rows.append([model, *cells])
    head = ["", *(f"{wire}: {what}" for wire in wires for what in ("preferred", "estimated", "measured", "of fastest"))]
    said = [f"over {wire} in {right[wire]} of {len(rows)}" for wire in wires]
    text = f"Within {NEAR - 1:.0%} of the fastest: {', '.join(said)}. Medians of {results['rounds']} rounds."
    return f"{text}\n\n{report.table(head, rows)}"


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot measured over estimated time, one panel per wire."""
    figure.suptitle(f"Estimated and measured time of a step, {report.processor(results)}")
    panels = figure.subplots(1, len(results["found"]), sharey=True, squeeze=False)[0]
    for panel, (wire, found) in zip(panels, results["found"].items(), strict=True):
        for model in results["models"]:
            panel.plot(*([1e3 * row[k] for row in found[model]] for k in (1, 2)), "o", markersize=5, label=model)
        panel.axline((10, 10), (100, 100), color="black", linewidth=1)
        panel.set(xscale="log", yscale="log", title=wire, xlabel="estimated, ms")
    panels[0].set_ylabel("measured, ms")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def main() -> None:
    """Measure and report; each rank writes its measurements to a file."""
    parser = report.arguments(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        ctx = jaxdist.init()
        os.sched_setaffinity(0, {ctx.local_rank % (os.cpu_count() or 1)})
        found = measure(args.models, args.rounds, args.steps)
        if ctx.is_root:
            args.rank.write_text(json.dumps(found))
        return
    wires = {}
    with tempfile.TemporaryDirectory() as folder:
        for wire in ("mpi", "xla"):
            path = Path(folder, wire)
            own = [__file__, "--rank", path, "--rounds", args.rounds, "--steps", args.steps, "--models", *args.models]
            job = [sys.executable, "-m", "jaxdist", "run", "-n", 2, *own]
            env = os.environ | {"JAXDIST_COMMUNICATOR": wire}
            subprocess.run(list(map(str, job)), check=True, stdout=subprocess.DEVNULL, env=env)
            wires["MPI" if wire == "mpi" else "gloo"] = json.loads(path.read_text())
    report.write(args, {"rounds": args.rounds, "models": args.models, "found": wires}, markdown)


if __name__ == "__main__":
    main()
