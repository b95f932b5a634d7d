"""Choose the fastest mesh for a step, from its program's FLOPs and messages on each. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxdist.errors import in_words
from jaxdist.ir.interpreter import held_at_once
from jaxdist.ir.wire import Collective
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, NAMES, SEQUENCE, Sizes, in_a_row, mesh_of, on_each_host
from jaxdist.placements.layouts import physical
from jaxdist.runtime.context import Context, hosts_of, machine_of
from jaxdist.step.forecast import Forecast


@dataclass(frozen=True)
class Times:
    """Seconds that a device takes for a step."""

    compute: float  # that the FLOPs take
    state: float  # that it takes to read the state once, and to write it; to bring it from the host's memory, and back
    in_host: float  # of collectives within hosts
    between: float  # of collectives between hosts
    hidden: float  # of both, while something is computed; as far as the schedule is known

    @property
    def seconds(self) -> float:
        """Return the seconds of a step: computation, and messages that it does not hide."""
        return self.compute + self.state + self.in_host + self.between - self.hidden


def times(flops: int, state: int, away: int, sent: Sequence[Collective], machine: Machine) -> Times:
    """Return the times from a device's FLOPs, state and messages."""
    kind = machine.kind
    compute = flops / kind.rate("bfloat16")
    kept = 2 * state / kind.bandwidth + 2 * away / (kind.host or kind.bandwidth)
    in_host = between = hidden = 0.0
    for c in sent:
        if c.devices > 1:
            seconds = c.seconds(machine)
            if machine.crossings(c.groups):
                between += seconds
            else:
                in_host += seconds
            hidden += seconds * c.overlapped
    return Times(compute, kept, in_host, between, min(hidden, compute))


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


@dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of a step on a mesh."""

    mesh: Mesh  # the devices
    times: Times  # of a device, at least
    least: int  # bytes that it needs at least, for arguments and results
    peak: int  # bytes that it needs at most: these, and all values at once that a compiler may fuse
    repeats: bool  # whether the model axis cuts nothing: each device along it does the same

    @property
    def name(self) -> str:
        """For a person."""
        return said(self.mesh.shape)

    @classmethod
    def of(cls, forecast: Forecast, machine: Machine) -> Estimate:
        """The estimate for a step on a mesh of these devices."""
        ahead = forecast.ahead()
        found = times(ahead.flops, ahead.state, ahead.away, ahead.sent(machine), machine)
        peak = ahead.least + held_at_once(ahead.program.jaxpr)
        return cls(forecast.mesh, found, ahead.least, peak, forecast.repeats)


@dataclass(frozen=True)
class Choice:
    """A mesh, and why it was chosen."""

    mesh: Mesh  # the devices
    why: str = ""  # a line; empty if the mesh was given


def chosen(on: Callable[[Sizes], Forecast], among: Sequence[Sizes], machine: Machine) -> Choice:
    """The mesh of the least time, of those on which a step is expected to fit."""
    if len(among) == 1:
        mesh = on(among[0]).mesh
        return Choice(mesh, f"{said(mesh.shape)}: the only one for this batch")
    memory = machine.kind.usable or float("inf")
    cuts = dict[int, dict[int, int]]()
    found, failed = list[Estimate](), list[Exception]()
    for sizes in among:
        forecast = on(sizes)
        forecast.cut = cuts.get(forecast.model, {})
        try:
            found.append(Estimate.of(forecast, machine))
        except Exception as error:  # it names an axis that this mesh lacks, or has groups that do not divide it
            failed.append(error)
            continue
        cuts[forecast.model] = forecast.cut
    if not found:
        raise failed[0]
    found = [one for one in found if not one.repeats] or found
    found.sort(key=lambda one: order(one.times.seconds, one.peak, one.least, memory))
    best = found[0]
    if len(found) == 1:
        return Choice(best.mesh, f"{best.name}: the only mesh for it")
    ms = lambda one: f"{one.name}, {1e3 * one.times.seconds:.3g} ms"
    why = f"{ms(best)} a step by the estimate; of {len(found)} meshes "
    if best.peak > memory:
        return Choice(best.mesh, f"{why}it needs the least memory, and none is sure to fit")
    faster = [ms(one) for one in found if one.times.seconds < best.times.seconds]
    more = f"; too large: {'; '.join(faster)}" if faster else f"; the next: {ms(found[1])}"
    return Choice(best.mesh, f"{why}the fastest{' that is sure to fit' * bool(faster)}{more}")


def choose(first: Forecast, context: Context) -> Choice:
    """Return the mesh for a step's first call: its state's mesh, if some of it is sharded, or the fastest."""
    devices = context.devices
    for name, x in first.state:
        own = getattr(physical(x), "sharding", None)
        if isinstance(own, NamedSharding) and not own.is_fully_replicated and own.device_set == set(devices):
            mesh = in_a_row(own.mesh)
            if set(mesh.axis_names) <= set(NAMES):
                return Choice(mesh, f"{said(mesh.shape)}: {name} lies in slices on it")
    in_host = on_each_host(hosts_of(context.mesh)) or 1
    if context.communicator == "mpi":  # which cannot move a batch between meshes
        return Choice(context.mesh, f"{said(context.mesh.shape)}: over MPI a batch stays where it was passed")
    among = list(meshes(len(devices), in_host, first.batch)) or [{AXIS: len(devices)}]
    return chosen(lambda sizes: first.on(mesh_of(sizes, devices)), among, machine_of(context.mesh))


def agreed(name: str, context: Context, find: Callable[[], Choice]) -> Choice:
    """Return rank 0's choice. Every rank calls it."""
    if context.size == 1:
        return find()
    found, failed, problem = None, None, ""
    try:
        found = find()
    except Exception as error:
        failed, problem = error, in_words(error)
    mine = problem, dict(found.mesh.shape) if found else {}
    everyone = context.control.exchange(f"the mesh of step {name}", mine, context.timeout)
    if failed is not None:
        raise failed
    for rank, (problem, _) in enumerate(everyone):
        if problem:
            raise ValueError(f"step {name!r}: rank {rank} could not choose a mesh: {problem}")
    sizes = everyone[context.root_rank][1]
    if found is not None and dict(found.mesh.shape) == sizes:
        return found
    return Choice(mesh_of(sizes, context.devices), f"{said(sizes)}: rank 0 has chosen it")


def said(mesh: Sizes) -> str:
    """The sizes of a mesh, for a person."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
