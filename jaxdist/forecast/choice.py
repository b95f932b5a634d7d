"""The choice of a mesh for a step: by FLOPs, state and messages on each. Nothing is compiled, nothing is sent."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxdist.compilation.calling import Settings
from jaxdist.compilation.program import ProgramCache
from jaxdist.compilation.signature import Avals, Signature
from jaxdist.compilation.tracing import traced
from jaxdist.forecast.ahead import Ahead
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, NAMES, SEQUENCE, Sizes, data_size, in_a_row, mesh_of, on_each_host
from jaxdist.placements.model.layouts import choose as choose_cut
from jaxdist.placements.model.layouts import layout as layout_with
from jaxdist.runtime.context import Context, machine_of, map_of


@dataclass
class Forecast:
    """A call of a step on other devices than this job's, which need not be here; nothing is sent, no array is made."""

    _settings: Settings
    _cache: ProgramCache
    signature: Signature
    avals: Avals  # as in `Ahead.arguments`; of the batch with the examples of all devices
    shardings: Mapping[int, NamedSharding]  # of the leaves of the state that are in shards, over any devices
    mesh: Mesh
    _machine: Machine
    # The leaves that the model axis cuts, and the dimension: found for the step's own batch and level.
    model_dims: dict[int, int] = field(default_factory=dict)

    def on(self, mesh: Mesh) -> "Forecast":
        """Return the same call on a different mesh of the same number of devices."""
        return dataclasses.replace(self, mesh=mesh, model_dims={})

    @property
    def model(self) -> int:
        """The size of the model axis."""
        return self.mesh.shape.get(MODEL, 1)

    @property
    def repeats(self) -> bool:
        """Check whether the model axis cuts nothing: each device along it does the same."""
        return self.model > 1 and not self.model_dims

    @property
    def batch(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the batch."""
        return [self.avals[i] for i in self.signature.batch]

    def ahead(self, level: int | None = None, shared: int | None = None) -> Ahead:
        """The step, traced once for all levels and groups; placed and emitted."""
        signature, avals, mesh = self.signature, self.avals, self.mesh
        step, declared = self._cache.jaxpr(signature, avals, mesh), self._settings.layouts
        trace = traced(step, signature, avals, mesh, self._machine, level, shared, declared, self.model_dims)
        layouts = list(trace.layouts)
        self.model_dims = {i: cut.dim for i, layout in enumerate(layouts) if layout and (cut := layout.by(MODEL))}
        for i in self.shardings:  # a step leaves them in shards
            cut = choose_cut(avals[i].shape, data_size(mesh))
            layouts[i] = layouts[i] or (cut and layout_with(cut))
        ahead = Ahead(self._cache.make(trace, signature, avals, layouts, mesh, "xla"))
        _ = ahead.program.placed.emitted  # raises here if it can't be placed
        return ahead


def order(cost: float, peak: float, least: int, memory: float) -> tuple[bool, float, int]:
    """A key for sorting programs: the fastest that fits is first, or else the one that needs the least memory."""
    too_large = peak > memory
    return too_large, peak if too_large else cost, least


def meshes(devices: int, in_host: int, batch: Avals) -> Iterator[dict[str, int]]:
    """The meshes whose axes have no more devices than the batch has examples and its sequences have entries."""
    # Sequences and the model are cut within a host, unless there are fewer examples than hosts.
    has_one = False
    # Two-dimensional floats count as features, not sequences.
    lengths = [a.shape[1] for a in batch if a.ndim > 2 or (a.ndim == 2 and jnp.issubdtype(a.dtype, jnp.integer))]
    for inner in (n for n in range(1, devices + 1) if devices % n == 0):
        if any(a.shape[0] < devices // inner for a in batch):
            continue
        if inner > in_host and has_one:
            return
        for model in (n for n in range(1, inner + 1) if inner % n == 0):
            sequence = inner // model
            if sequence == 1 or any(n >= sequence for n in lengths):
                has_one = True
                sizes = {AXIS: devices // inner, SEQUENCE: sequence, MODEL: model}
                yield {name: n for name, n in sizes.items() if n > 1} or {AXIS: 1}


class ChosenMesh(NamedTuple):
    """A mesh for a step."""

    mesh: Mesh
    why: str  # for a person


@dataclass(frozen=True)
class _Candidate:
    """A mesh for a step, and the step's time and memory on it."""

    forecast: Forecast
    ms: float  # of a step
    peak: int  # bytes of a device, at most
    least: int  # bytes of a device's arguments and results


def fastest(on: Callable[[Sizes], Forecast], among: Sequence[Sizes], machine: Machine) -> ChosenMesh:
    """The mesh of the least time, of those on which a step is expected to fit."""
    if len(among) == 1:
        mesh = on(among[0]).mesh
        return ChosenMesh(mesh, f"{in_words(mesh.shape)}: the only one for this batch")
    memory = machine.kind.usable or float("inf")
    model_dims = dict[int, dict[int, int]]()  # by the size of the model axis: a search for each takes long
    candidates, failed = list[_Candidate](), list[Exception]()
    for sizes in among:
        forecast = on(sizes)
        forecast.model_dims = model_dims.get(forecast.model, {})
        try:
            ahead = forecast.ahead()
            ms = 1e3 * ahead.times(ahead.sent(machine), machine).seconds
            candidates.append(_Candidate(forecast, ms, ahead.least + ahead.held_at_once, ahead.least))
        except Exception as error:  # it names an axis that this mesh lacks, or has groups that do not divide it
            failed.append(error)
            continue
        model_dims[forecast.model] = forecast.model_dims
    if not candidates:
        raise failed[0]
    candidates = [candidate for candidate in candidates if not candidate.forecast.repeats] or candidates
    best = min(candidates, key=lambda candidate: order(candidate.ms, candidate.peak, candidate.least, memory))
    fits = best.peak <= memory
    what = "the fastest that is sure to fit" if fits else "needs the least memory, and none is sure to fit"
    mesh = best.forecast.mesh
    why = f"{in_words(mesh.shape)}: {what} ({len(candidates)} meshes; estimated {best.ms:.3g} ms per step)"
    return ChosenMesh(mesh, why)


def choose(first: Forecast, context: Context) -> ChosenMesh:
    """The mesh for a step's first call: its state's mesh, if some of it is sharded, or the fastest."""
    devices = context.devices
    for i, sharding in first.shardings.items():
        if sharding.device_set == set(devices):
            mesh = in_a_row(sharding.mesh)
            if set(mesh.axis_names) <= set(NAMES):
                return ChosenMesh(mesh, f"{in_words(mesh.shape)}: {first.signature.names[i]} lies in slices on it")
    in_host = on_each_host(map_of(context.mesh).hosts) or 1
    if context.communicator == "mpi":  # which cannot move a batch between meshes
        return ChosenMesh(context.mesh, f"{in_words(context.mesh.shape)}: over MPI a batch stays where it was passed")
    among = list(meshes(len(devices), in_host, first.batch)) or [{AXIS: len(devices)}]
    return fastest(lambda sizes: first.on(mesh_of(sizes, devices)), among, machine_of(context.mesh))


def in_words(mesh: Sizes) -> str:
    """The sizes of a mesh, for a person."""
    return ", ".join(f"{axis}={size}" for axis, size in mesh.items())
