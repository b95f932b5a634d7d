"""Bytes that a device holds at each ZeRO level, counted on live arrays, and the ZeRO paper's formulas.

    python benchmarks/memory.py --json memory.json

Adam on virtual CPU devices: float32, and bfloat16 parameters with a float32 copy. Between steps a device holds
parameters and optimizer state. Gradients exist only in a step, in XLA's temporaries, with activations and messages.
Formulas: Rajbhandari et al., arXiv 1910.02054, section 5 (for float32, with 4 bytes instead of 2, and no copy).
"""

from __future__ import annotations

import os
from typing import Any

import models
import report

DEVICES = (1, 2, 4, 8)
LEVELS = (0, 1, 2, 3)
KINDS = ("float32 Adam", "bfloat16 with a float32 copy")


def formula(kind: str, level: int, n: int) -> tuple[float, float]:
    """Return bytes per parameter on one of n devices: parameters plus optimizer state; gradients."""
    parameters, gradients, optimizer = (4, 4, 8) if kind == KINDS[0] else (2, 2, 12)
    return (
        parameters / (n if level >= 3 else 1) + optimizer / (n if level >= 1 else 1),
        gradients / (n if level >= 2 else 1),
    )


def measure(model: str, kind: str, level: Any, n: int, temporaries: bool) -> dict[str, Any]:
    """Return bytes on the first of n devices: of the state after a step and, on request (it
    compiles again), of XLA's temporaries within one."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh
    from jax_models import loss_of

    import jaxdist

    found = models.find(model)
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    loss = loss_of(found)
    adam = optax.adam(models.LEARNING_RATE)
    dtype = jnp.float32 if kind == KINDS[0] else jnp.bfloat16
    tx = jaxdist.zero(adam, level, precision=None if kind == KINDS[0] else "bf16")

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    train_step: Any = jaxdist.data_parallel(step, mesh=mesh, donate=True)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), models.init(found))
    batch = models.batches(found, list(range(n)))
    params, opt_state, _ = train_step(params, tx.init(params), batch)
    first = mesh.devices.flat[0]
    shards = [s for x in jax.tree.leaves((params, opt_state)) for s in _array(x).addressable_shards]
    row = {"kind": kind, "level": level, "devices": n, "state": sum(s.data.nbytes for s in shards if s.device == first)}
    if temporaries:
        row["temporaries"] = train_step.lower(params, opt_state, batch).compile().memory_analysis().temp_size_in_bytes
    return row


def _array(x: Any) -> Any:
    return getattr(x, "array", x)  # unwraps a `Padded`


def markdown(results: dict[str, Any]) -> str:
    """Return one table per kind."""
    count, devices = results["parameters"], results["devices"]
    intro = (
        f"{results['model']}, {count / 1e6:.3g}M parameters. Bytes a parameter on a device between steps, counted on "
        f"live arrays / by the formula; and in a step on {max(devices)} devices XLA's temporaries / the formula's "
        "gradients."
    )
    text = [intro]
    worst = 0.0
    for kind in KINDS:
        rows = []
        for level in LEVELS:
            cells, last = [f"level {level}"], ""
            for row in (r for r in results["rows"] if r["kind"] == kind and r["level"] == level):
                state, gradients = formula(kind, level, row["devices"])
                cells.append(f"{row['state'] / count:.3f} / {state:.3f}")
                worst = max(worst, row["state"] / count / state - 1)
                if "temporaries" in row:
                    last = f"{row['temporaries'] / count:.2f} / {gradients:.2f}"
            rows.append([*cells, last])
        text += [f"{kind}:", report.table(["", *(f"N = {n}" for n in devices), "temporaries"], rows)]
    text.append(f"Largest excess of the state over its formula: {worst:.2%}.")
    return "\n\n".join(text)


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot dots for counted bytes, and lines for the formulas."""
    figure.suptitle(f"Memory of a device between steps, {results['model']}, Adam (dots: counted, lines: formula)")
    figure.set_size_inches(11, 4.5)
    devices = results["devices"]
    for panel, kind in zip(figure.subplots(1, 2, sharey=True), KINDS, strict=True):
        for level, title in {0: "level 0", 1: "levels 1 and 2", 3: "level 3"}.items():  # 2 keeps the same as 1
            mine = [r for r in results["rows"] if r["kind"] == kind and r["level"] == level]
            panel.plot(devices, [formula(kind, level, n)[0] for n in devices], color=f"C{level}")
            counted = [r["state"] / results["parameters"] for r in mine]
            panel.plot(devices, counted, "o", color=f"C{level}", label=title)
        panel.set_xscale("log", base=2)
        panel.set_xticks(devices, map(str, devices))
        panel.set(title=kind, xlabel="devices")
    figure.axes[0].set(ylim=(0, 15), ylabel="bytes per parameter")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def main() -> None:
    """Count and report."""
    parser = report.arguments(__doc__)
    parser.add_argument("--model", default="MLP-10M", choices=[*models.MODELS, *models.TINY])
    parser.add_argument("--devices", nargs="*", type=int, default=list(DEVICES))
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(args.devices)}"
    )
    rows = [
        measure(args.model, kind, level, n, temporaries=n == max(args.devices))
        for kind in KINDS for level in LEVELS for n in args.devices
    ]  # fmt: skip
    parameters = models.parameters(models.find(args.model))
    results = {"model": args.model, "devices": args.devices, "parameters": parameters, "rows": rows}
    report.write(args, results, markdown)


if __name__ == "__main__":
    main()
