"""The programs of one step: traced once for the types of its arguments, placed and compiled for how they are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxdist.communicators import Rules, default_bucket_bytes
from jaxdist.compat import trace_settings
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, data_size
from jaxdist.placements.layouts import Layout, check_host_memory, on_host
from jaxdist.step.calling import COMPRESSIONS, Settings
from jaxdist.step.placed import PlacedStep
from jaxdist.step.placer import Placer, abstract
from jaxdist.step.program import Program
from jaxdist.step.signature import Signature
from jaxdist.step.tracing import StepJaxpr, TracedStep, jaxpr_of, traced


class ProgramCache:
    """The programs of one step."""

    def __init__(
        self,
        settings: Settings,
        mesh: Mesh,
        machine: Machine,
        placer: Placer,
        communicator: str | Rules,
    ):
        self._settings, self._mesh, self._placer, self._machine = settings, mesh, placer, machine
        self._communicator = communicator
        self._jaxprs: dict[Any, StepJaxpr] = {}
        self.traces: dict[Any, TracedStep] = {}
        self.programs: dict[Any, Program] = {}
        self.looked_for: tuple[bool, bool] | None = None

    @contextlib.contextmanager
    def looking_for(self, kinds: tuple[bool, bool]) -> Iterator[None]:
        """Make the programs of calls in here count NaN, infinity, or both, as JAX's settings ask."""
        self.looked_for = kinds
        try:
            with jax.debug_nans(False), jax.debug_infs(False):
                yield
        finally:
            self.looked_for = None

    def clear(self) -> None:
        """Forget them."""
        self._jaxprs.clear()
        self.traces.clear()
        self.programs.clear()

    def types(self, signature: Signature, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of a call's leaves as the step sees them: the batch has the examples of all ranks."""
        logical = self._placer.logical_batch
        return [logical(x) if b else abstract(x) for x, b in zip(leaves, signature.is_batch, strict=True)]

    def program(self, signature: Signature, leaves: Sequence[Any]) -> Program:
        """The program for leaves that come as these do: what comes in shards, or in the host's memory, stays there; the
        rest is as the step wants it."""
        trace = self.traced(signature, leaves)
        layouts: list[Any] = list(trace.layouts)
        groups = trace.groups
        for i in signature.state:
            how, wanted = self._placer.layout(leaves[i]), layouts[i]
            cut = how.by(AXIS) if isinstance(how, Layout) else None
            own = data_size(self._mesh) // cut.parts if cut else 1
            groups = own if groups == 1 else groups
            if isinstance(how, Layout) and own in (1, groups):  # one step has groups of one size
                layouts[i] = on_host(how, (), 0) if wanted and wanted.host else how
        key = (trace, *layouts)
        if key not in self.programs:
            communicator, mesh = self._communicator, self._mesh
            self.programs[key] = self.make(trace, signature, self.types(signature, leaves), layouts, mesh, communicator)
        return self.programs[key]

    def jaxpr(self, signature: Signature, types: Sequence[Any]) -> StepJaxpr:
        """The step for leaves of these types, traced once."""
        call = (signature.tree, signature.keywords, signature.numbers)
        key = (call, trace_settings(), self.looked_for, *((a.shape, a.dtype, a.weak_type) for a in types))
        if key not in self._jaxprs:
            of = self._settings
            check = of.check_finite or self.looked_for is not None
            self._jaxprs[key] = jaxpr_of(of.step, signature, types, self._mesh, check)
        return self._jaxprs[key]

    def traced(self, signature: Signature, leaves: Sequence[Any]) -> TracedStep:
        """Return the step traced for a call with these leaves, analyzed."""
        types = self.types(signature, leaves)
        step = self.jaxpr(signature, types)
        layouts, key = self._settings.layouts, (signature, (id(step), False))
        given = self._cut_by_model(signature, leaves) if layouts is None else {}
        if given and key not in self.traces:  # which are searched for, where nothing comes cut
            key = (signature, (id(step), True))
        if key not in self.traces:
            found = traced(step, signature, types, self._mesh, self._machine, layouts=layouts, given=given)
            if found.marks.offloaded and self._machine.has_own_memory:
                check_host_memory(self._mesh)
            self.traces[key] = found
        return self.traces[key]

    def _cut_by_model(self, signature: Signature, leaves: Sequence[Any]) -> dict[int, int]:
        """The leaves that come cut by the model axis, and the dimension."""
        if self._mesh.shape.get(MODEL, 1) == 1:
            return {}
        kept = [(i, self._placer.layout(leaves[i])) for i in signature.state]
        return {i: cut.dim for i, how in kept if isinstance(how, Layout) and (cut := how.by(MODEL))}

    def make(
        self,
        trace: TracedStep,
        signature: Signature,
        avals: Sequence[Any],
        layouts: Sequence[Layout | None],
        mesh: Mesh,
        communicator: str | Rules,
    ) -> Program:
        """Return the step's program on these devices, with these layouts of the state."""
        of = self._settings
        may = lambda i, name: name in of.donated or (of.donate and i in trace.may_take)
        # An error of `check_finite` must not cost the state.
        donate = {i for _, at, name in signature.arguments for i in at if not trace.checked and may(i, name)}
        bucket_bytes = of.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(communicator, mesh, trace.infer.machine)
        compress = COMPRESSIONS[of.compress] if of.compress else None
        name = getattr(of.step, "__name__", "step")
        placed = PlacedStep(trace, signature, avals, tuple(layouts), mesh, communicator, bucket_bytes, compress)
        return Program(placed, donate, name)
