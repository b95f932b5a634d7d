"""`jaxdist test`: does this installation train as it should, here or on several hosts? In under a minute."""

import functools
import importlib.util
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxdist import connectors
from jaxdist.cli.doctor import Finding, findings, versions
from jaxdist.cli.output import WIDTH, complain, console
from jaxdist.cli.run import run
from jaxdist.connectors import site
from jaxdist.launch.job import LauncherName
from jaxdist.launch.mpi import find_mpirun

_TAG = "jaxdist test"
_TIMEOUT = "60"  # seconds for ranks that do not come, if nothing else is said
_TOLERANCE = 1e-10  # of float64
_STEPS = 3
_SIZES = {"4 KiB": 4 << 10, "16 MiB": 16 << 20}
_CALLS = 20  # of an allreduce that is timed
_REPORT = "run `jaxdist info --json`, and report both"


def self_test(
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--np", min=1, help="Ranks to start; default: the GPUs or 2, or all slots of the hosts."),
    ] = None,
    launcher: Annotated[
        LauncherName | None,
        typer.Option(help="Who starts them, as of `jaxdist run`; default: env for xla, mpirun for mpi."),
    ] = None,
    communicators: Annotated[
        str | None,
        typer.Option("--communicator", help="xla, mpi or xla,mpi; default: what there is. A job has only one."),
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="As of `jaxdist run`.")] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="As of `jaxdist run`.", exists=True, dir_okay=False, readable=True)
    ] = None,
    as_rank: Annotated[bool, typer.Option("--as-rank", hidden=True)] = False,
) -> None:
    """Tests the installation: starts ranks with each communicator, lets them take steps at each ZeRO level and compares
    these with jax.jit on one device, and times an allreduce. Under mpirun, srun, torchrun or `jaxdist run` it is one of
    the ranks.

    The exit code is 1 if something is wrong; what is wrong comes with the command that puts it right.
    """
    if as_rank or _in_job():
        raise typer.Exit(_as_rank())
    asked = "xla,mpi" if communicators is None else communicators
    names = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    if other := [name for name in names if name not in ("xla", "mpi")]:
        raise typer.BadParameter(f"--communicator: no {other[0]!r}; valid: xla, mpi")
    begin = time.monotonic()
    os.environ.setdefault("JAXDIST_TIMEOUT", _TIMEOUT)
    if sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
    if ranks is None and hosts is None and hostfile is None:
        ranks = _default_ranks()
    out = console()
    wrong: list[str] = []
    for name in names:
        why_not = _not_there() if name == "mpi" else ""
        if why_not and communicators is None:
            out.print(f"communicator [b]mpi[/b] is not here: {escape(why_not)}", soft_wrap=True)
            continue
        problem = _problem(name, ranks, launcher, hosts, hostfile)
        if problem:
            wrong.append(f"communicator {name}: {problem}")
    found = [finding for finding in findings() if not finding.ok]
    wrong += [f"{f.name}: {f.seen}" for f in found if f.name == "GPU" and os.environ.get("JAX_PLATFORMS") != "cpu"]
    for finding in found:
        out.print(f"[yellow]note[/yellow] {finding.name}: {escape(finding.seen)}", soft_wrap=True)
        out.print(f"     {escape(finding.fix)}", soft_wrap=True, style="bold")
    for problem in wrong:
        out.print(f"[red]wrong[/red] {escape(problem)}", soft_wrap=True)
    verdict = "[red]Something is wrong.[/red]" if wrong else "[green]All is well.[/green]"
    out.print(f"{verdict} ({time.monotonic() - begin:.0f} s)")
    raise typer.Exit(1 if wrong else 0)


def _in_job() -> bool:
    """Whether a launcher started this process."""
    try:
        return connectors.choose() != "local"
    except (ValueError, ImportError):  # it did, and init will say what is missing
        return True


def _default_ranks() -> int:
    from jaxdist.runtime.devices import visible_gpus

    return 2 if os.environ.get("JAX_PLATFORMS") == "cpu" else len(visible_gpus()) or 2


def _not_there() -> str:
    """Why there is no communicator mpi to test, with the command that makes it; "": there is one."""
    missing = [name for name in ("mpi4py", "mpi4jax") if importlib.util.find_spec(name) is None]
    missing += [] if find_mpirun() else ["mpirun"]
    return f"no {' and no '.join(missing)}. To have it: {site.install()}" if missing else ""


def _problem(
    name: str, ranks: int | None, launcher: LauncherName | None, hosts: str | None, hostfile: Path | None
) -> str:
    """What is wrong with a job of this communicator, beside what it prints itself."""
    by = launcher or (LauncherName.env if name == "xla" and not (hosts or hostfile) else LauncherName.mpirun)
    script = ["-m", "jaxdist", "test", "--as-rank"]
    try:
        os.environ["JAXDIST_COMMUNICATOR"] = name  # of the ranks
        run(script, ranks, by, hosts=hosts, hostfile=hostfile)
    except typer.Exit as done:
        return f"exit code {done.exit_code}, see above" if done.exit_code else ""
    except typer.BadParameter as problem:
        return problem.message
    return ""


# --- as one of the ranks


def _as_rank() -> int:
    """Runs the checks; the root prints them. Returns the exit code."""
    import jax

    from jaxdist.runtime.context import init

    begin = time.monotonic()
    try:
        ctx = init()
    except (ValueError, RuntimeError, ImportError) as error:
        complain("test", error)
        return 1
    jax.config.update("jax_enable_x64", True)
    rows = list(_checks(ctx, time.monotonic() - begin))
    if not ctx.is_root:
        return 0
    _print(ctx, rows)
    return 0 if all(row.ok for row in rows) else 1


def _checks(ctx: Any, start: float) -> Iterator[Finding]:
    hosts = ctx.control.exchange(_TAG, socket.gethostname())
    names = list(dict.fromkeys(hosts))
    yield Finding("connector", True, f"{ctx.connector.name}: {ctx.size} rank(s) on {', '.join(names)} in {start:.1f} s")
    yield from _alike(ctx, hosts)
    yield from (_parity(ctx, level) for level in range(4))
    for text, nbytes in _SIZES.items() if ctx.size > 1 else ():
        yield _bandwidth(ctx, text, nbytes)


def _alike(ctx: Any, hosts: Sequence[str]) -> Iterator[Finding]:
    """Software and findings of the hosts; only the first rank of each looks."""
    first = ctx.rank == hosts.index(socket.gethostname())
    mine = versions() if first else {}
    wanted = ("python", "jaxdist", "jax", "jaxlib", "optax", "numpy", "mpi4jax")
    notes = [(f.name, f.seen, f.fix) for f in findings() if not f.ok] if first and not ctx.is_root else []
    reports = ctx.control.exchange(_TAG, ({name: mine.get(name, "") for name in wanted}, notes))
    root, _ = reports[ctx.root_rank]
    theirs = {host: reports[hosts.index(host)] for host in dict.fromkeys(hosts)}
    other = [
        f"{host} has {name} {software[name] or 'not at all'}, {hosts[ctx.root_rank]} {root[name] or 'not at all'}"
        for host, (software, _) in theirs.items()
        for name in wanted
        if software[name] != root[name]
    ]
    seen = "; ".join(other) or ", ".join(f"{name} {version}" for name, version in root.items() if version)
    yield Finding("software", not other, seen, "install the same versions on every host")
    for host, (_, found) in theirs.items():
        for name, seen, command in found:
            yield Finding(f"{host}, {name}", True, f"{seen} ({command})")


def _parity(ctx: Any, level: Any) -> Finding:
    """Some steps of a job, compared with `jax.jit` on one device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from jaxdist.step.data_parallel import data_parallel
    from jaxdist.zero import unshard, zero

    def loss_fn(params: Any, x: Any) -> Any:
        hidden = x @ params["in"]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3)  # of the whole batch, as BatchNorm
        return jnp.mean((jnp.tanh(hidden) @ params["out"] - x.sum(1, keepdims=True)) ** 2)

    def step(tx: Any, state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    random = np.random.default_rng(0)
    whole = random.normal(size=(4 * ctx.num_devices, 13))
    begin = {"in": random.normal(size=(13, 16 * ctx.num_devices)), "out": random.normal(size=(16 * ctx.num_devices, 1))}

    def train(transform: Any, tx: Any, batch: Any) -> Any:
        params = jax.tree.map(jnp.asarray, begin)
        state, loss, update = (params, tx.init(params)), None, transform(functools.partial(step, tx))
        for _ in range(_STEPS):
            state, loss = update(state, batch)
        return unshard((state[0], loss))

    rows = len(whole) // ctx.size
    tx = optax.adam(1e-2)
    got = train(data_parallel, zero(tx, level), whole[ctx.rank * rows : (ctx.rank + 1) * rows])
    want = train(jax.jit, tx, whole)
    apart = jax.tree.map(lambda a, b: float(np.max(np.abs(np.asarray(a) - b)) / (1 + np.max(np.abs(b)))), got, want)
    most = max(ctx.control.exchange(_TAG, max(jax.tree.leaves(apart))), key=lambda x: (x != x, x))  # NaN is the most
    ok = most <= _TOLERANCE
    seen = f"{_STEPS} steps, {most:.1e} away from jax.jit on one device" + ("" if ok else f", expected {_TOLERANCE}")
    return Finding(f"step, ZeRO level {level}", ok, seen, _REPORT)


def _bandwidth(ctx: Any, text: str, nbytes: int) -> Finding:
    """Bytes per second as nccl-tests count them on the bus: 2 (n - 1) / n of an array's for each of n ranks."""
    import jax
    import jax.numpy as jnp

    from jaxdist.collectives.public import allreduce

    x, times = jnp.ones(nbytes // 4, jnp.float32), []
    for _ in range(_CALLS):
        ctx.barrier()
        begin = time.perf_counter()
        jax.block_until_ready(allreduce(x))
        times.append(time.perf_counter() - begin)
    seconds = max(ctx.control.exchange(_TAG, statistics.median(times)))
    on_the_bus = 2 * (ctx.size - 1) / ctx.size * nbytes / seconds / 1e9
    return Finding(f"allreduce of {text}", True, f"{seconds * 1e3:.3g} ms, {on_the_bus:.3g} GB/s on the bus")


def _print(ctx: Any, rows: Sequence[Finding]) -> None:
    import jax

    device = jax.local_devices()[0]
    kind = device.platform if device.platform == "cpu" else device.device_kind
    # A rank's terminal may be Open MPI's own: what it writes goes through a pipe all the same.
    out = Console(width=int(os.environ.get("COLUMNS", WIDTH)), force_terminal=False, highlight=False)
    table = Table(title=f"communicator {ctx.communicator}: {ctx.num_devices} x {kind}", title_justify="left")
    for column in ("", "check", "seen"):
        table.add_column(column)
    for row in rows:
        seen = row.seen if row.ok else f"{row.seen}: {row.fix}"
        table.add_row("[green]ok[/green]" if row.ok else "[red]wrong[/red]", escape(row.name), escape(seen))
    out.print(table)
