"""jaxdist's eager collectives beside those of other libraries: two processes, one core each.

    python benchmarks/collectives.py --torch PYTHON --json collectives.json

Sizes are bytes of one process's input, in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import report
from rounds import Job, build, take_turns
from worker import RANK, SIZE, Variant

OPS = ("allreduce", "reduce_scatter", "allgather", "all_to_all", "broadcast")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
WAITS = {"barrier": ("jaxdist mpi", "jaxdist xla", "mpi4py"), "check_sync": ("jaxdist mpi", "jaxdist xla")}
"""What only waits for the other rank, and the systems that have it: an exchange, and a comparison of ten leaves."""

SYSTEMS = {
    "jaxdist mpi": ["collectives:of_jaxdist", "mpi"],
    "jaxdist xla": ["collectives:of_jaxdist", "xla"],
    "mpi4jax": ["collectives:of_mpi4jax"],
    "mpi4py": ["collectives:of_mpi4py"],
    "torch gloo": ["collectives:of_torch"],
}


def of_jaxdist(communicator: str) -> Callable[[str], Variant]:
    """Return a rank's builder: ``"allreduce 4096"`` gives that call."""
    import jax

    import jaxdist

    ctx = jaxdist.init(communicator=communicator)
    state = [jax.numpy.ones((64, 64)) for _ in range(10)]
    waits = {"barrier": ctx.barrier, "check_sync": lambda: jaxdist.check_sync(state)}

    def call(name: str) -> Variant:
        if name in waits:
            return _variant(waits[name])
        op, size = name.split()
        x = jax.random.normal(jax.random.key(ctx.rank), (int(size) // 4,))
        return _variant(lambda: jax.block_until_ready(getattr(jaxdist, op)(x)))

    return call


def of_mpi4jax() -> Callable[[str], Variant]:
    """Call compiled programs of one collective. There is no reduce-scatter."""
    import jax
    import mpi4jax
    from mpi4py import MPI

    def call(name: str) -> Variant:
        op, size = name.split()
        x = jax.random.normal(jax.random.key(RANK), (int(size) // 4,))
        calls: dict[str, Callable[[Any], Any]] = {
            "allreduce": lambda x: mpi4jax.allreduce(x, op=MPI.SUM),
            "reduce_scatter": lambda x: mpi4jax.allreduce(x, op=MPI.SUM).reshape(SIZE, -1)[RANK],
            "allgather": mpi4jax.allgather,
            "all_to_all": lambda x: mpi4jax.alltoall(x.reshape(SIZE, -1)),
            "broadcast": lambda x: mpi4jax.bcast(x, 0),
        }
        program = jax.jit(calls[op])
        return _variant(lambda: jax.block_until_ready(program(x)))

    return call


def of_mpi4py() -> Callable[[str], Variant]:
    """Receive into existing buffers, which is the limit."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def call(name: str) -> Variant:
        if name == "barrier":
            return _variant(world.Barrier)
        op, size = name.split()
        n = int(size) // 4
        x, out = np.ones(n, np.float32), np.zeros(n, np.float32)
        part, whole = np.zeros(n // SIZE, np.float32), np.zeros(n * SIZE, np.float32)
        calls = {
            "allreduce": lambda: world.Allreduce(x, out),
            "reduce_scatter": lambda: world.Reduce_scatter_block(x, part),
            "allgather": lambda: world.Allgather(x, whole),
            "all_to_all": lambda: world.Alltoall(x, out),
            "broadcast": lambda: world.Bcast(x),
        }
        return _variant(calls[op])

    return call


def of_torch() -> Callable[[str], Variant]:
    """Work in place, or into existing tensors."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=SIZE)  # at MASTER_ADDR and MASTER_PORT

    def call(name: str) -> Variant:
        op, size = name.split()
        n = int(size) // 4
        x, out = torch.zeros(n), torch.zeros(n)  # zeros, since they are added up repeatedly
        part, whole = torch.zeros(n // SIZE), torch.zeros(n * SIZE)
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: dist.all_reduce(x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, x),
            "allgather": lambda: dist.all_gather_into_tensor(whole, x),
            "all_to_all": lambda: dist.all_to_all_single(out, x),
            "broadcast": lambda: dist.broadcast(x, 0),
        }
        return _variant(calls[op])

    return call


def _variant(call: Callable[[], Any]) -> Variant:
    def step() -> None:  # returns no loss
        call()

    return Variant(step)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def markdown(results: dict[str, Any]) -> str:
    """Return a table with one row per collective and size."""
    rows = []
    systems = results["systems"]
    for op in results["ops"]:
        for size in results["sizes"][::2]:  # the picture has all sizes
            times = {s: results["ms"][f"{s}|{op} {size}"] for s in systems}
            cells = [report.three(report.spread(times[s]).median) for s in systems]
            rows.append([f"{op}, {_size(size)}", *cells])
    for name in WAITS:
        times = [results["ms"].get(f"{s}|{name}") for s in systems]
        if any(times):
            rows.append([name, *(report.three(report.spread(ms).median) if ms else "" for ms in times)])
    return f"ms a call, medians of {results['rounds']} rounds.\n\n" + report.table(["float32", *systems], rows)


def draw(results: dict[str, Any], figure: Any) -> None:
    """Plot time over size, one panel per collective."""
    figure.suptitle(f"Time of a collective between two ranks, {report.processor(results)} (lower is better)")
    figure.set_size_inches(max(11, 2.8 * len(results["ops"])), 4.5)
    panels = figure.subplots(1, len(results["ops"]), sharey=True, squeeze=False)[0]
    for panel, op in zip(panels, results["ops"], strict=True):
        for system in results["systems"]:
            spreads = [report.spread(results["ms"][f"{system}|{op} {size}"]) for size in results["sizes"]]
            panel.plot(results["sizes"], [s.median for s in spreads], "o-", markersize=4, label=system)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(results["sizes"], map(_size, results["sizes"]), rotation=60)
        panel.set_title(op)
    panels[0].set_ylabel("ms")
    handles, labels = panels[0].get_legend_handles_labels()
    named = [label.replace("jaxdist mpi", "jaxdist, MPI").replace("jaxdist xla", "jaxdist, gloo") for label in labels]
    figure.legend(handles, named, loc="outside lower center", ncols=len(named))


def main() -> None:
    """Measure and report."""
    parser = report.arguments(__doc__, rounds=7, seconds=0.1, torch=True)
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--ops", nargs="*", default=list(OPS), choices=OPS)
    parser.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="bytes")
    args = parser.parse_args()
    systems = [s for s in args.systems if args.torch or s != "torch gloo"]
    with contextlib.ExitStack() as stack:
        tasks = {}
        for system in systems:
            python = {"python": args.torch} if system == "torch gloo" else {}
            job = stack.enter_context(Job(SYSTEMS[system], 2, **python))
            tasks |= {f"{system}|{op} {size}": (job, f"{op} {size}") for op in args.ops for size in args.sizes}
            tasks |= {f"{system}|{name}": (job, name) for name, measured in WAITS.items() if system in measured}
        # All systems run one collective, then the next.
        tasks = dict(sorted(tasks.items(), key=lambda task: task[0].partition("|")[2]))
        times = take_turns(tasks, build(tasks, args.seconds), args.rounds)
    results = {"rounds": args.rounds, "systems": systems, "ops": args.ops, "sizes": args.sizes, "ms": times}
    report.write(args, results, markdown)


if __name__ == "__main__":
    main()
