"""Choose the fastest mesh for a step, from its program's FLOPs and messages on each. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, NAMES, SEQUENCE, Sizes, in_a_row, mesh_of, on_each_host
from jaxdist.placements.layouts import physical
from jaxdist.runtime.context import Context, hosts_of, machine_of
from jaxdist.step.forecast import Forecast


def order(cost: float, peak: float, least: int, memory: float) -> tuple[bool, float, int]:
    """A key by which programs are ordered, the one to take first: the fastest of those that are expected to fit, or,
    if there is none, the one that needs the least memory."""
    too_large = peak > memory
    return too_large, peak if too_large else cost, least


def meshes(devices: int, in_host: int, batch: Sequence[Any]) -> Iterator[dict[str, int]]:
    """The meshes with an example for each device along the axis of data at least, entries of their second dimension
    for those along the sequence axis, and any size of the model axis.

    Two-dimensional floats count as features, not sequences.

    Sequences and the model are cut within a host, unless there are fewer examples than hosts."""
    found = False
    lengths = [a.shape[1] for a in batch if a.ndim > 2 or (a.ndim == 2 and jnp.issubdtype(a.dtype, jnp.integer))]
    for inner in (n for n in range(1, devices + 1) if devices % n == 0):
        if any(a.shape[0] < devices // inner for a in batch):
            continue
        if inner > in_host and found:
            return
        for model in (n for n in range(1, inner + 1) if inner % n == 0):
            sequence = inner // model
            if sequence == 1 or any(n >= sequence for n in lengths):
                found = True
                sizes = {AXIS: devices // inner, SEQUENCE: sequence, MODEL: model}
                yield {name: n for name, n in sizes.items() if n > 1} or {AXIS: 1}


def chosen(on: Callable[[Sizes], Forecast], among: Sequence[Sizes], machine: Machine) -> tuple[Mesh, str]:
    """The mesh of the least time, of those on which a step is expected to fit; and why."""
    if len(among) == 1:
        mesh = on(among[0]).mesh
        return mesh, f"{said(mesh.shape)}: the only one for this batch"
    memory = machine.kind.usable or float("inf")
    cuts = dict[int, dict[int, int]]()
    found, failed = list[_Estimate](), list[Exception]()
    for sizes in among:
        forecast = on(sizes)
        forecast.cut = cuts.get(forecast.model, {})
        try:
            ahead = forecast.ahead()
            ms = 1e3 * ahead.times(ahead.sent(machine), machine).seconds
            found.append(_Estimate(forecast, ms, ahead.least, ahead.least + ahead.held_at_once))
        except Exception as error:  # it names an axis that this mesh lacks, or has groups that do not divide it
            failed.append(error)
            continue
        cuts[forecast.model] = forecast.cut
    if not found:
        raise failed[0]
    found = [one for one in found if not one.forecast.repeats] or found
    found.sort(key=lambda one: order(one.ms, one.peak, one.least, memory))
    best = found[0]
    mesh = best.forecast.mesh
    if len(found) == 1:
        return mesh, f"{said(mesh.shape)}: the only mesh for it"
    why = f"{best} a step by the estimate; of {len(found)} meshes "
    if best.peak > memory:
        return mesh, f"{why}it needs the least memory, and none is sure to fit"
    faster = "; ".join(str(one) for one in found if one.ms < best.ms)
    more = f" that is sure to fit; too large: {faster}" if faster else f"; the next: {found[1]}"
    return mesh, f"{why}the fastest{more}"


class _Estimate(NamedTuple):
    """The estimated time and memory of a step on a mesh."""

    forecast: Forecast
    ms: float  # of a device, at least
    least: int  # bytes that it needs at least
    peak: int  # bytes that it needs at most

    def __str__(self) -> str:
        return f"{said(self.forecast.mesh.shape)}, {self.ms:.3g} ms"


def choose(first: Forecast, context: Context) -> tuple[Mesh, str]:
    """The mesh for a step's first call, and why: its state's mesh, if some of it is sharded, or the fastest."""
    devices = context.devices
    for name, x in first.state:
        own = getattr(physical(x), "sharding", None)
        if isinstance(own, NamedSharding) and not own.is_fully_replicated and own.device_set == set(devices):
            mesh = in_a_row(own.mesh)
            if set(mesh.axis_names) <= set(NAMES):
                return mesh, f"{said(mesh.shape)}: {name} lies in slices on it"
    in_host = on_each_host(hosts_of(context.mesh)) or 1
    if context.communicator == "mpi":  # which cannot move a batch between meshes
        return context.mesh, f"{said(context.mesh.shape)}: over MPI a batch stays where it was passed"
    among = list(meshes(len(devices), in_host, first.batch)) or [{AXIS: len(devices)}]
    return chosen(lambda sizes: first.on(mesh_of(sizes, devices)), among, machine_of(context.mesh))


def said(mesh: Sizes) -> str:
    """The sizes of a mesh, for a person."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
