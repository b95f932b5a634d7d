"""Two hosts with a slow link between them: shards over all ranks, or within hosts.

    python benchmarks/hosts.py --models MLP-10M,GPT-10M --rounds 7 --torch PYTHON --json hosts.json

The hosts are network namespaces of this machine (needs root), with two ranks each and a link of
`--rate` between them, made by `tc tbf`; ranks of one host use the loopback device. All ranks share
the available cores, so only ratios within a round are meaningful. float32, Adam; torch and
hand-written JAX use gloo. PYTHON is an interpreter with torch (CPU); its ranks take turns with
jaxdist's, one job each, so its rounds are minutes apart from jaxdist's.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("jobs", "")]

VARIANTS = {
    "level 0": "jaxdist {} 0",
    "level 3": "jaxdist {} 3",
    "level 3, within hosts": "jaxdist {} 3 within=host",
    "level 2": "jaxdist {} 2",
    "level 2, within hosts": "jaxdist {} 2 within=host",
    "one buffer by hand": "gloo flat",
}
TORCH = {"torch FSDP2": "FSDP2", "torch HSDP": "HSDP"}
PAIRS = [
    ("level 3, within hosts", "level 3"),
    ("level 2, within hosts", "level 2"),
    ("level 0", "one buffer by hand"),
    ("level 3, within hosts", "torch HSDP"),
    ("level 3", "torch FSDP2"),
]


_JOBS = 3
"""Number of jobs of each kind, which take turns if there are two kinds."""


def rank(model: str, communicator: str, rounds: int, steps: int, torch: bool) -> None:
    """Run one rank of the job, with variants in turns; the root prints all times."""
    from worker import RANK, run

    if torch:
        from torch_steps import Steps
    else:
        from jax_steps import Steps

        import jaxdist

        jaxdist.init(communicator=communicator)
    make = Steps(model)
    wanted = TORCH if torch else {name: what.format(communicator) for name, what in VARIANTS.items()}
    variants = {name: make(what) for name, what in wanted.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    losses = {name: [_over_ranks(variant.step(), torch) for _ in range(3)] for name, variant in variants.items()}
    for _ in range(rounds):
        for name, variant in variants.items():
            times[name].append(run(variant, steps))
    if RANK == 0:
        print("REPORT " + json.dumps({"ms": times, "losses": losses}), flush=True)


def _over_ranks(loss: Any, torch: bool) -> float:
    """Return the mean loss; under torch each rank has its own."""
    if torch:
        import torch.distributed as dist

        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    return float(loss)


def measure(
    models: list[str], communicator: str, rate: str, rounds: int, steps: int, torch: str | None
) -> dict[str, Any]:
    """Measure each model, in jobs across the hosts."""
    from harness import jobs
    from namespaces import Hosts

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(2, Path(folder))
        try:
            for name in hosts.names:
                shape = f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms"
                subprocess.run(hosts.command(name, shape.split()), check=True)
            for model in models:
                found[model] = {"ms": {}, "losses": {}}
                for k in range(_JOBS if torch else 1):
                    turns = len(range(k, rounds, _JOBS)) if torch else rounds
                    for python in [sys.executable, *([torch] if torch else [])]:
                        command = [jobs.mpirun_path(), "-np", "4", "--mca", "btl_tcp_if_include", "10.77.0.0/24"]
                        command += ["-x", "MASTER_ADDR=10.77.0.1", "-x", "MASTER_PORT=29517"]
                        command += ["-x", "GLOO_SOCKET_IFNAME=eth0", "-H", "node1:2,node2:2"]
                        command += [
                            python,
                            __file__,
                            "--rank",
                            model,
                            *(["--torch", python] if python == torch else []),
                        ]
                        command += ["--communicator", communicator, "--rounds", str(turns), "--steps", str(steps)]
                        own = {"XLA_FLAGS": None}  # the tests' flags are for fast compilation
                        result = hosts.run("node1", command, own, timeout=900)
                        report_ = re.search(r"REPORT (.*)$", result.stdout, re.MULTILINE)
                        assert report_, result.output
                        one = json.loads(report_[1])
                        found[model]["losses"].update(one["losses"])
                        for name, times in one["ms"].items():
                            found[model]["ms"].setdefault(name, []).extend(times)
        finally:
            hosts.close()
    return {
        "machine": report.machine(),
        "command": report.command(),
        "communicator": communicator,
        "rate": rate,
        "models": found,
    }


def markdown(results: dict[str, Any]) -> str:
    """Return the tables."""
    models = results["models"]
    for model, found in models.items():
        first = found["losses"]["level 0"]
        for name, losses in found["losses"].items():
            worst = max(abs(a - b) / abs(a) for a, b in zip(first, losses, strict=True))
            assert worst < 1e-3, (model, name, losses, first)
    names = next(iter(models.values()))["ms"]
    ms = [[name, *(report.number(report.spread(m["ms"][name]).median) for m in models.values())] for name in names]
    pairs = [(a, b) for a, b in PAIRS if b in names]
    ratios = [[f"{a} / {b}", *(report.ratio(m["ms"], a, [b]) for m in models.values())] for a, b in pairs]
    return "\n\n".join(
        [
            f"Two hosts of two ranks each, {results['rate']} between, {results['communicator']}. Medians of ms a step.",
            report.table(["", *models], ms),
            "Medians of the ratios within rounds (smallest-largest).",
            report.table(["", *models], ratios),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="MLP-10M,GPT-10M")
    parser.add_argument("--communicator", choices=["xla", "mpi"], default="xla", help="xla: gloo")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    report.add_arguments(parser, pictures=False)
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.communicator, args.rounds, args.steps, bool(args.torch))
        return
    found = measure(args.models.split(","), args.communicator, args.rate, args.rounds, args.steps, args.torch)
    report.write(args, found, markdown)


if __name__ == "__main__":
    main()
