"""The programs of one step: traced once for the types of its arguments, placed for how they are kept, compiled."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.agreement.calls import Traced
from jaxdist.communicators import Rules, compiler_options, default_bucket_bytes, lowering
from jaxdist.ir.fingerprint import dataflow
from jaxdist.ir.interpreter import Interpreter, contains
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, data_size, passes
from jaxdist.placements.layouts import HOST, Layout, Padded, check_host_memory, layout_of, of_batch, on_host
from jaxdist.step.callbacks import Callbacks
from jaxdist.step.calling import COMPRESSIONS, Settings
from jaxdist.step.placed import PlacedStep
from jaxdist.step.placer import Placer, abstract
from jaxdist.step.signature import Signature, picker, unflattener
from jaxdist.step.tracing import StepJaxpr, TracedStep, jaxpr_of, traced

# Calls after which a program waits for its results on virtual devices. XLA starts programs on the threads that run
# them. Once 32 (of all programs) are under way on a device, it waits there for one to end, which has no thread to run
# on where there are as many threads as devices, and after a minute it ends the process.
_AHEAD = 4


class Program:
    """The function ``(state leaves, batch leaves) -> step's result, findings`` on global arrays of one type."""

    def __init__(self, placed: PlacedStep, donate: Collection[int], name: str, options: Mapping[str, Any]):
        self.placed, self.name, self._options = placed, name, options  # of the compiler
        self.donated = [i for i in placed.signature.state if i in donate]  # leaves whose memory it may take
        kept = [i for i in placed.signature.state if i not in donate]
        self._order = self.donated, kept, placed.signature.batch
        at = {i: k for k, i in enumerate(placed.signature.state)}
        self.taken, self._kept = picker([at[i] for i in self.donated]), picker([at[i] for i in kept])
        self.virtual = placed.mesh.devices.flat[0].platform == "cpu" and len(placed.mesh.local_devices) > 1
        self._calls, self._callbacks = 0, Callbacks()
        self._unflatten = unflattener(placed.step.tree)
        self._padded_results: list[tuple[int, Layout]] = []
        run = functools.partial(self._run)
        run.__name__ = name  # type: ignore[attr-defined]
        self._jitted = jax.jit(
            run,
            in_shardings=tuple([placed.held[i].sharding for i in at] for at in self._order),
            out_shardings=placed.result_shardings(),
            donate_argnums=(0,) if self.donated else (),
            compiler_options={**compiler_options(placed.mesh), **options} or None,
        )

    @functools.cached_property
    def traced(self) -> Traced:
        """The program of a device and the step that it is of, which ranks compare."""
        program = self.placed.emitted[0]
        return Traced(program, self.placed.step.jaxpr, dataflow(program))

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        outs, found = self._jitted(list(self.taken(state)), list(self._kept(state)), batch), None
        self._callbacks.check(outs)
        self._calls += 1
        if self.virtual and self._calls % _AHEAD == 0:
            jax.block_until_ready(outs)
        step = self.placed.step
        if step.checked:
            *outs, found = outs
        for i, how in self._padded_results:
            outs[i] = Padded(outs[i], how)
        return self._unflatten(outs), found

    def with_options(self, options: Mapping[str, Any]) -> "Program":
        """The same with more of the compiler's options."""
        return Program(self.placed, self.donated, self.name, {**self._options, **options})

    def by_leaf(self, groups: Sequence[Sequence[Any]]) -> list[Any]:
        """Return the items of three lists, as the compiled function takes its arguments, in the order of the leaves."""
        by_position = {i: x for at, xs in zip(self._order, groups, strict=True) for i, x in zip(at, xs, strict=True)}
        return [by_position[i] for i in range(len(self.placed.avals))]

    def lower(self) -> jax.stages.Lowered:
        """Lower it, like ``jax.jit(f).lower``."""
        placed = self.placed
        lowered = self._jitted.lower(*([placed.held[i] for i in at] for at in self._order))
        # Arguments in the host's memory that do not say so (see `compat.say_on_host`).
        held = [(placed.held[i], placed.layouts[i]) for at in self._order for i in at]
        away = [k for k, (x, how) in enumerate(held) if how and how.host and x.sharding.memory_kind != HOST]
        if away:
            compat.say_on_host(lowered, away, HOST)
        return lowered

    def _run(self, *leaves: Sequence[Any]) -> Any:
        placed, step = self.placed, self.placed.step
        args = self.by_leaf(leaves)

        def results(outs: Sequence[Any]) -> list[Any]:
            # A counter that came as a Python number goes out as one came in, or the next call would compile anew.
            weak = [aval.weak_type for aval in step.jaxpr.out_avals]
            outs = [compat.with_weak_type(x, w) for x, w in zip(outs, weak, strict=True)]
            host = jax.memory.Space.Host
            return [jax.device_put(x, host) if k and k.host else x for x, k in zip(outs, placed.results, strict=True)]

        closed, found = placed.emitted
        if placed.mesh.size == 1:
            return results(Interpreter({}).run(closed, *args))
        in_specs, out_specs = placed.specs()

        def local(zero: Any, *xs: Any) -> list[Any]:
            if not any(x.size for x in xs):  # XLA can't divide a program all of whose arguments are empty
                xs = lax.optimization_barrier((zero, *xs))[1:]
            return lowering(placed.communicator, placed.over).run(self._callbacks.guarded(closed), *xs)

        made = jax.shard_map(
            local, mesh=placed.over, in_specs=(P(), *in_specs), out_specs=out_specs, check_vma=False,
        )(0, *args)  # fmt: skip
        self._padded_results = [
            (i, how) for i, p in enumerate(found[-1].out_forms)
            if (how := placed.results[i] or layout_of(p, passes(placed.over)[-1])) is not None and not how.is_plain
        ]  # fmt: skip
        return results(made)


class ProgramCache:
    """The programs of one step."""

    def __init__(self, settings: Settings, mesh: Mesh, machine: Machine, placer: Placer, communicator: str | Rules):
        self._settings, self._mesh, self._placer, self._machine = settings, mesh, placer, machine
        self._communicator = communicator
        self._jaxprs: dict[Any, StepJaxpr] = {}
        self._traces: dict[Any, TracedStep] = {}
        self._programs: dict[Any, Program] = {}
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
        self._jaxprs.clear()
        self._traces.clear()
        self._programs.clear()

    def types(self, signature: Signature, leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of a call's leaves as the step sees them: the batch has the examples of all ranks."""
        logical = self._placer.logical_batch
        found = [logical(x) if b else abstract(x) for x, b in zip(leaves, signature.is_batch, strict=True)]
        for name, dtype in zip(signature.names, (x.dtype for x in found), strict=True):
            if jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype:
                raise TypeError(f"leaf {name} is {dtype}, and jax_enable_x64 is off: set it, or cast the leaf")
        return found

    def program(self, signature: Signature, leaves: Sequence[Any]) -> Program:
        """The program for leaves that come like these: where they are in shards, or else as the step wants them."""
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
        if key not in self._programs:
            types = self.types(signature, leaves)
            self._programs[key] = self.make(trace, signature, types, layouts, self._mesh, self._communicator)
        return self._programs[key]

    def jaxpr(self, signature: Signature, types: Sequence[Any], mesh: Mesh | None = None) -> StepJaxpr:
        """The step for leaves of these types, traced once for all meshes of one size."""
        of, mesh = self._settings, mesh or self._mesh
        call = (signature.tree, signature.keywords, signature.numbers, compat.trace_settings(), self.looked_for)
        key = (call, mesh.size, *((a.shape, a.dtype, a.weak_type) for a in types))
        found = self._jaxprs.get(key) or self._jaxprs.get((key, mesh))
        if found is None:
            found = jaxpr_of(of.step, signature, types, mesh, of.check_finite or self.looked_for is not None)
            # With `per_device` it has code for each device.
            self._jaxprs[(key, mesh) if contains(found.jaxpr.jaxpr, [compat.shard_map_p]) else key] = found
        return found

    def traced(self, signature: Signature, leaves: Sequence[Any]) -> TracedStep:
        """Return the step traced for a call with these leaves, analyzed."""
        types = self.types(signature, leaves)
        step = self.jaxpr(signature, types)
        layouts, key, given = self._settings.layouts, (signature, id(step), False), dict[int, int]()
        if layouts is None and self._mesh.shape.get(MODEL, 1) > 1:
            kept = [(i, self._placer.layout(leaves[i])) for i in signature.state]
            given = {i: cut.dim for i, how in kept if isinstance(how, Layout) and (cut := how.by(MODEL))}
        if given and key not in self._traces:  # which are searched for, where nothing comes cut
            key = (signature, id(step), True)
        if key not in self._traces:
            found = traced(step, signature, types, self._mesh, self._machine, layouts=layouts, given=given)
            if found.marks.offloaded and self._machine.has_own_memory:
                check_host_memory(self._mesh)
            self._traces[key] = found
        return self._traces[key]

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
        may = lambda i, name: name in of.donate_argnums or (of.donate and i in trace.may_take)
        # An error of `check_finite` must not cost the state.
        donate = {i for _, at, name in signature.arguments for i in at if not trace.checked and may(i, name)}
        bucket_bytes = of.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(communicator, mesh, trace.infer.machine)
        compress = COMPRESSIONS[of.compress] if of.compress else None
        leaves = zip(signature.is_batch, avals, layouts, strict=True)
        layouts = [of_batch(a.shape, mesh) if is_batch else how for is_batch, a, how in leaves]
        placed = PlacedStep(trace, signature, avals, layouts, mesh, communicator, bucket_bytes, compress)
        return Program(placed, donate, getattr(of.step, "__name__", "step"), dict(of.compiler_options))
