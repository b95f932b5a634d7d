"""`profile`: a trace of each rank, and a table of the devices' time."""

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxdist import compat
from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.ir.compiled import Collective, collectives_of
from jaxdist.runtime.context import get_context
from jaxdist.text import text_of

_MOST_ROWS = 20
# A rank's seconds in programs; per collective and device, the seconds of each call in order.
Trace = tuple[float, dict[Collective, list[list[float]]]]


@contextlib.contextmanager
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Trace every rank's devices, and print a breakdown of their time on the root. Every rank enters and leaves it.

    Rank r writes to ``path/rank{r}``, for TensorBoard or, with its ``perfetto_trace.json.gz``, for
    https://ui.perfetto.dev. The table has computation, each collective with its mesh axis and line of code, and waiting
    for slower devices. Run the step once before, or the trace contains its compilation.

    Args:
      path: the folder. It is created if necessary.

    Raises:
      OSError: (on every rank) a rank cannot write its files.
      RuntimeError: a profile is already running.

    Example:
      >>> import jax, jaxdist, tempfile
      >>> with tempfile.TemporaryDirectory() as path, jaxdist.profile(path):
      ...     _ = jax.numpy.ones(3) + 1
    """
    ctx, root = get_context(), Path(path)
    _finish_dispatched()
    folder = root / f"rank{ctx.rank}"

    def report() -> Part[None]:
        traces = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))  # sorted by time
        if not traces:
            raise RuntimeError(f"jax.profiler wrote no trace to {folder}")
        return Part(None, told=read(traces[-1]))

    on_every_rank(ctx, "profile", lambda: Part(folder.mkdir(parents=True, exist_ok=True)), raises=(OSError,))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it slows down Python functions
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
    try:
        yield
        _finish_dispatched()
    finally:
        jax.profiler.stop_trace()
    _, traces = on_every_rank(ctx, "the end of profile", report, raises=(RuntimeError,))
    if ctx.is_root:
        print(f"{_table(traces)}\ntraces: {root}/rank*", file=sys.stderr, flush=True)


def _finish_dispatched() -> None:
    """Wait for running programs on this process's devices."""
    jax.block_until_ready([x for x in jax.live_arrays() if not x.is_deleted()])


def read(trace: str | os.PathLike[str]) -> Trace:
    """Read the times of a rank's devices from a trace."""
    shardings = [x.sharding for x in jax.live_arrays() if not x.is_deleted()]
    meshes = {one.mesh for one in shardings if isinstance(one, NamedSharding) and isinstance(one.mesh, Mesh)}
    simplest = sorted(meshes, key=lambda mesh: (len(mesh.shape), mesh.axis_names))  # names a collective first
    known = dict[tuple[Any, Any], Collective]()  # by the names of program and operation
    for program, text in compat.programs():  # of equal names, the newest program counts
        known |= {(program, name): one for name, one in collectives_of(text, simplest).items()}
    busy: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    on: dict[Collective, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        of_device = plane.name.startswith("/device:")
        for line, event, stats in _operations(plane, of_device):
            busy[plane.name, line].append((event.start_ns, event.start_ns + event.duration_ns))
            one = known.get((stats.get("hlo_module"), stats.get("hlo_op", event.name)))
            if one is None and event.name.startswith("nccl"):
                one = Collective("collective")
            if one is not None:
                device = plane.name if of_device else stats.get("device_ordinal")
                on[one][device].append((event.start_ns, event.duration_ns / 1e9))
    in_order = {one: [[x for _, x in sorted(calls)] for calls in each.values()] for one, each in on.items()}
    return sum(map(_together, busy.values())) / 1e9, in_order


def _operations(plane: Any, of_device: bool) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    """The operations that a plane of a trace has, with their lines: no Python function, no work of XLA on the host."""
    for i, line in enumerate(plane.lines):
        if of_device and not line.name.startswith(("Stream", "XLA Ops")):
            continue  # derived lines: whole modules, steps, layer names
        for event in line.events:
            stats = dict(event.stats)
            if not event.name.startswith("$") and (of_device or "hlo_op" in stats):
                yield i, event, stats


def _together(intervals: list[tuple[float, float]]) -> float:
    """Return the length that intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _table(traces: Sequence[Trace]) -> str:
    from rich.table import Table  # import here, not at the start of each rank

    busy = sum(seconds for seconds, _ in traces)
    if not busy:
        return "[jaxdist profile] no device ran anything"
    on: dict[Collective, list[list[float]]] = defaultdict(list)
    for _, collectives in traces:
        for one, durations in collectives.items():
            on[one] += durations
    # The last device of a call waits for no one; other devices' longer times are waits for it.
    moving = {one: len(each) * sum(map(min, zip(*each, strict=False))) for one, each in on.items()}
    waiting = sum(sum(map(sum, each)) for each in on.values()) - sum(moving.values())
    computing = busy - waiting - sum(moving.values())
    grid = Table(box=None, pad_edge=False)
    for name in ("of the devices' time", "share", "calls", "axis", "line"):
        grid.add_column(name, justify="right" if name in ("share", "calls") else "left", no_wrap=True)
    grid.add_row("computing", f"{computing / busy:.1%}")
    for one in sorted(on, key=lambda one: -moving[one])[:_MOST_ROWS]:
        share, calls = f"{moving[one] / busy:.1%}", str(min(map(len, on[one])))
        grid.add_row(one.kind, share, calls, one.axis, one.line and os.path.relpath(one.line))
    grid.add_row("waiting in collectives", f"{waiting / busy:.1%}")
    return f"[jaxdist profile] {busy:.3g} s on {len(traces)} rank(s)\n{text_of(grid, width=120)}"
