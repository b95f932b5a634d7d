"""`jaxdist bench`: how fast the collectives between processes are, as a table, JSON or a plot."""

import importlib.util
import json
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from jaxdist.cli.doctor import versions
from jaxdist.cli.output import complain, console, write_json
from jaxdist.cli.run import run
from jaxdist.launch.job import CommunicatorName, ConnectorName, LauncherName

_SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_UNITS = ("B", "KiB", "MiB", "GiB")
_GET_MATPLOTLIB = "to draw needs matplotlib: pip install 'jaxdist[plots]'"


class Dtype(StrEnum):
    """What the arrays hold."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"
    int8 = "int8"
    int32 = "int32"
    int64 = "int64"


def bench(
    ranks: Annotated[
        int | None, typer.Option("-n", "--np", min=2, help="Ranks to start; default: 2. Not under a launcher.")
    ] = None,
    launcher: Annotated[
        LauncherName | None, typer.Option(help="Who starts them, as of `jaxdist run`. Not under a launcher.")
    ] = None,
    collectives: Annotated[
        str | None, typer.Option(help="Which, with commas between them; default: all below.", show_default=False)
    ] = None,
    communicators: Annotated[
        str | None,
        typer.Option("--communicator", help="xla, mpi or xla,mpi; default: what there is. A job has only one."),
    ] = None,
    sizes: Annotated[str, typer.Option(help="With commas between them; units: B, KiB, MiB, GiB.")] = _SIZES,
    dtype: Annotated[Dtype, typer.Option(help="Of the elements.")] = Dtype.float32,
    seconds: Annotated[float, typer.Option(help="For each row of the table, about.")] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of tables.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and bus bandwidth into this file (.png, .pdf or .svg).")
    ] = None,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Times the collectives between processes. Starts ranks of its own, one job for each communicator; under mpirun,
    srun, torchrun or `jaxdist run` it is one of the ranks.

    A row is the median over up to 20 samples, each of as many calls as there is time for; the ranks start a sample
    together, and the slowest one's time counts. min and max are those of the samples.

    Sizes and bandwidths are those of nccl-tests: algorithm bandwidth = size / time, bus bandwidth = algorithm
    bandwidth x factor, which on n ranks is what a link carries whatever n is. 1 GB/s = 1e9 bytes per second.

    \b
    collective      size of                        factor
    allreduce       a rank's array                 2 (n-1) / n
    allgather       the result                     (n-1) / n
    reduce_scatter  a rank's input                 (n-1) / n
    broadcast       the array                      1
    reduce          a rank's array                 1
    all_to_all      a rank's input                 (n-1) / n
    gather          the root's result              (n-1) / n
    scatter         the root's input               (n-1) / n
    sendrecv        a message; each rank sends     1
                    one to the next rank and
                    receives one
    barrier         0
    """
    try:
        names = names_in("--collectives", collectives, _known_collectives())
        wanted = names_in("--communicator", communicators, ("xla", "mpi"))
        nbytes = parse_sizes(sizes)
        if not 0 < seconds < math.inf:
            raise ValueError(f"--seconds {seconds:g}: expected a positive number")
        if plot is not None:
            check_plot(plot)
        as_rank = report is not None or in_job()
        if as_rank and (ranks or launcher):
            raise ValueError(
                "-n and --launcher start ranks, and this process already is one of a job's: leave them out"
            )
        if as_rank and communicators is not None and len(wanted) > 1:
            raise ValueError("a job has one communicator: name one with --communicator, or run without a launcher")
        _check_elements(names, nbytes, dtype, 1 if as_rank else ranks or 2)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None

    def show(result: dict[str, Any]) -> None:
        if not as_json:
            _print_table(result)

    if as_rank:
        results = _as_rank("auto" if communicators is None else wanted[0], names, nbytes, dtype, seconds)
        if report is not None:
            if results:
                report.write_text(json.dumps(results[0]))
            return
        for result in results:
            show(result)
    else:
        arguments = ["--collectives", ",".join(names), "--sizes", ",".join(map(str, nbytes))]
        arguments += ["--dtype", str(dtype), "--seconds", str(seconds)]
        must = communicators is not None
        results = _start(wanted, must, ranks or 2, launcher or LauncherName.auto, arguments, show)
    if not results:  # not the root
        return
    if as_json:
        merged = {
            "jobs": [{k: v for k, v in result.items() if k != "measurements"} for result in results],
            "measurements": [
                {"communicator": result["communicator"], **row} for result in results for row in result["measurements"]
            ],
            "versions": versions(),
        }
        write_json(merged)
    if plot is not None:
        draw(results, plot)


# --- what is asked for


def parse_sizes(text: str) -> list[int]:
    """Bytes of "4KiB,1MiB": whole numbers, with a unit or without.

    Raises:
        ValueError: something else.
    """
    found = []
    for one in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:([KMG])i?)?B?\s*", one, re.IGNORECASE)
        decimal = re.search(r"[KMG]B", one, re.IGNORECASE)  # 1000 or 1024? Neither is clear.
        nbytes = int(match[1]) << 10 * " KMG".index((match[2] or " ").upper()) if match and not decimal else 0
        if nbytes == 0:
            raise ValueError(f"--sizes: {one.strip()!r} is not a size; expected such as 4KiB,1MiB or a number of bytes")
        found.append(nbytes)
    return list(dict.fromkeys(found))


def check_plot(path: Path, option: str = "--plot") -> None:
    """Raises ValueError if nothing could be drawn there: better now than after the measurement."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"{option} {path}: the name must end in .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(_GET_MATPLOTLIB)


def names_in(option: str, text: str | None, valid: Sequence[str]) -> list[str]:
    if text is None:
        return list(valid)
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in valid:
            raise ValueError(f"{option}: no {name!r}; valid: {', '.join(valid)}")
    return names


def _known_collectives() -> Sequence[str]:
    from jaxdist.observe.bench import COLLECTIVES

    return COLLECTIVES


def _check_elements(names: Sequence[str], sizes: Sequence[int], dtype: Dtype, ranks: int) -> None:
    import jax.numpy as jnp

    from jaxdist.observe.bench import elements

    for name in names:
        elements(name, min(sizes), jnp.dtype(str(dtype)).itemsize, ranks)


def in_job() -> bool:
    """Whether a launcher started this process."""
    from jaxdist import connectors

    try:
        return connectors.choose() != "local"
    except (ValueError, ImportError):  # it did, and init will say what is missing
        return True


# --- as one of the ranks, and as their parent


def _as_rank(
    communicator: str, names: Sequence[str], sizes: Sequence[int], dtype: Dtype, seconds: float
) -> list[dict[str, Any]]:
    """Measures; the root gets the result, the others nothing."""
    import jax

    from jaxdist.observe.bench import measure
    from jaxdist.runtime.context import init

    _keep_stdout()
    try:
        ctx = init(communicator=communicator)
    except (ValueError, RuntimeError, ImportError) as error:
        complain("bench", error)
        raise typer.Exit(1) from None
    try:
        _check_elements(names, sizes, dtype, ctx.size)
    except ValueError as error:
        if ctx.is_root:
            complain("bench", error)
        ctx.barrier()  # or the first to end would be reported as the one that failed
        raise typer.Exit(2) from None
    jax.config.update("jax_enable_x64", dtype.endswith("64"))
    rows = []
    for name in names:
        if ctx.is_root:
            complain("bench", f"{ctx.communicator}, {ctx.size} rank(s): {name}")
        its_sizes = sizes if name != "barrier" else [0]
        rows += [asdict(measure(ctx, name, size, dtype, seconds)) for size in its_sizes]
    hosts = ctx.control.exchange("jaxdist bench", socket.gethostname())
    device = jax.local_devices()[0]
    job = {
        "communicator": ctx.communicator,
        "processes": ctx.size,
        "connector": ctx.connector.name,
        "hosts": list(dict.fromkeys(hosts)),
        "device": f"{device.platform} ({device.device_kind})" if device.platform != "cpu" else "cpu",
        "dtype": str(dtype),
        "measurements": rows,
    }
    return [job] if ctx.is_root else []


def _keep_stdout() -> None:
    """Gloo says on standard output that it is connected: to standard error with that, the report stays alone."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding)


def _start(
    communicators: Sequence[str],
    must: bool,
    ranks: int,
    launcher: LauncherName,
    arguments: Sequence[str],
    show: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Runs a job for each communicator; without `must` those that are not available are left out."""
    results = []
    with tempfile.TemporaryDirectory(prefix="jaxdist-bench-") as folder:
        for name in communicators:
            report = Path(folder, f"{name}.json")
            script = ["-m", "jaxdist", "bench", *arguments, "--communicator", name, "--report", str(report)]
            try:
                absent = name == "mpi" and importlib.util.find_spec("mpi4jax") is None
                if absent and launcher is not LauncherName.env:  # whose ranks could not use it anyway
                    raise typer.BadParameter("mpi4jax is not installed; `jaxdist info` says how to get it")
                run(script, ranks, launcher, ConnectorName.auto, CommunicatorName(name))
            except typer.Exit as done:
                if done.exit_code != 0:
                    raise
            except typer.BadParameter as problem:
                if must:
                    raise
                complain("bench", f"without communicator {name}: {problem.message}")
                continue
            results.append(json.loads(report.read_text()))
            show(results[-1])
    return results


# --- what is shown


def _print_table(result: dict[str, Any]) -> None:
    out = console()
    out.print(
        f"communicator [b]{result['communicator']}[/b]: {result['processes']} rank(s) on {len(result['hosts'])} "
        f"host(s), {result['device']}, {result['dtype']}"
    )
    table = Table()
    table.add_column("collective")
    for column in ("size", "time", "min", "max", "algorithm GB/s", "bus GB/s", "calls"):
        table.add_column(column, justify="right")
    before = None
    for row in result["measurements"]:
        name = row["collective"]
        if before is not None and name != before:
            table.add_section()
        moved = row["nbytes"] > 0
        table.add_row(
            "" if name == before else name,
            size_text(row["size"]) if moved else "",
            *(time_text(row[key]) for key in ("median_s", "min_s", "max_s")),
            *(f"{row[key]:.3g}" if moved else "" for key in ("algorithm_gb_s", "bus_gb_s")),
            f"{row['samples']} x {row['calls']}",
        )
        before = name
    out.print(table)


def size_text(nbytes: int) -> str:
    power = next(p for p in (3, 2, 1, 0) if nbytes % (1 << 10 * p) == 0)
    return f"{nbytes >> 10 * power} {_UNITS[power]}"


def time_text(seconds: float) -> str:
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{float(f'{seconds * scale:.3g}'):g} {unit}"
    return f"{seconds:.3g} s"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Time and bus bandwidth over size: a colour for each collective, a kind of line for each communicator.

    Args:
        results: of each communicator, as `--report` writes them.
        path: .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(row["collective"] for result in results for row in result["measurements"]))
    for result, (line, marker) in zip(results, (("-", "o"), ("--", "s")), strict=False):
        for name in names:
            style = {
                "linestyle": line, "marker": marker, "markersize": 4, "color": f"C{names.index(name)}",
                "label": f"{result['communicator']} {name}",
            }  # fmt: skip
            rows = sorted((r for r in result["measurements"] if r["collective"] == name), key=lambda r: r["nbytes"])
            if name == "barrier":  # of no size
                upper.axhline(rows[0]["median_s"], **{**style, "marker": "", "linewidth": 0.8})
                continue
            sizes = [row["nbytes"] for row in rows]
            upper.plot(sizes, [row["median_s"] for row in rows], **style)
            lower.plot(sizes, [row["bus_gb_s"] for row in rows], **style)
    for axes, label in ((upper, "median time (s)"), (lower, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    lower.xaxis.set_major_formatter(lambda nbytes, _: size_text(int(nbytes)) if nbytes >= 1 else "")
    lower.set_xlabel("size")
    first = results[0]
    figure.suptitle(f"jaxdist bench: {first['processes']} ranks, {first['device']}, {first['dtype']}")
    figure.legend(*upper.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
