"""`jaxdist info`: who the ranks are, what they would use, and what is missing."""

import os
import socket
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdist.cli.doctor import Finding, findings, versions
from jaxdist.cli.output import console, write_json
from jaxdist.errors import in_words


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
    connector: Annotated[str, typer.Option(help="As of jaxdist.init.")] = "auto",
    communicator: Annotated[str, typer.Option(help="As of jaxdist.init.")] = "auto",
) -> None:
    """Shows ranks, devices, communicator, versions and what is missing. Works under mpirun too."""
    # Here, not above: `jaxdist run` needs none of it.
    from jaxdist.runtime.context import init

    try:
        ctx = init(connector, communicator)
    except (ValueError, RuntimeError, ImportError) as error:
        # What is missing may be why it failed, so say that too.
        report = _report([], {}, in_words(error))
        _write(report, as_json)
        raise typer.Exit(1) from None
    ranks: list[dict[str, Any]] = ctx.control.exchange("jaxdist info", _this_rank(ctx))
    if ctx.is_root:
        job = {
            "processes": ctx.size,
            "devices": ctx.num_devices,
            "connector": ctx.connector.name,
            "communicator": str(ctx.communicator),
            "kind": {k: v for k, v in asdict(ctx.kind).items() if k != "target"},
        }
        _write(_report(ranks, job, ""), as_json)
    ctx.barrier()


def _this_rank(ctx: Any) -> dict[str, Any]:
    import jax

    local = jax.local_devices()
    return {
        "rank": ctx.rank,
        "local_rank": ctx.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": local[0].platform,
        "devices": [f"{device.device_kind}:{device.id}" for device in local],
    }


def _report(ranks: list[dict[str, Any]], job: dict[str, Any], problem: str) -> dict[str, Any]:
    return {
        "job": job,
        "problem": problem,
        "ranks": ranks,
        "versions": versions(),
        "findings": [asdict(finding) for finding in findings()],
    }


def _write(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(report)
        return
    out = console()
    if report["problem"]:
        out.print(f"[red]jaxdist.init failed:[/red] {escape(report['problem'])}")
    else:
        _print_ranks(out, report["job"], report["ranks"])
    _print_versions(out, report["versions"])
    _print_findings(out, [Finding(**finding) for finding in report["findings"]])


def _print_ranks(out: Console, job: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    out.print(
        f"{job['processes']} process(es), {job['devices']} device(s), "
        f"connector [b]{job['connector']}[/b], communicator [b]{job['communicator']}[/b]"
    )
    out.print(_seconds(job["kind"], len({one["host"] for one in ranks}) > 1))
    table = Table()
    for column in ("rank", "local rank", "host", "pid", "cores", "platform", "devices"):
        table.add_column(column)
    for one in ranks:
        cells = [one["rank"], one["local_rank"], one["host"], one["pid"], one["cores"]]
        devices = escape(", ".join(one["devices"]))
        table.add_row(*map(str, cells), one["platform"], devices)
    out.print(table)


def _seconds(kind: dict[str, Any], several: bool) -> str:
    """What placements take for granted of a device: `jaxdist.machine.Kind`, as a line."""
    links = [("within a host", kind["link"], kind["latency"])]
    links += [("between hosts", kind["network"], kind["network_latency"])] if several else []
    sent = "; ".join(f"{where} {rate / 1e9:.3g} GB/s and {wait * 1e6:.3g} us a message" for where, rate, wait in links)
    return f"a device ({kind['name']}): {kind['flops'] / 1e9:.4g} GFLOP/s, {sent}"


def _print_versions(out: Console, found: dict[str, str]) -> None:
    table = Table("software", "version")
    for name, version in found.items():
        table.add_row(name, escape(version) if version else "[dim]not installed[/dim]")
    out.print(table)


def _print_findings(out: Console, all_findings: list[Finding]) -> None:
    for finding in all_findings:
        mark = "[green]ok[/green] " if finding.ok else "[red]fix[/red]"
        out.print(f"{mark} {finding.name}: {escape(finding.seen)}", soft_wrap=True)
        if not finding.ok:
            out.print(f"      {escape(finding.fix)}", soft_wrap=True, style="bold")
