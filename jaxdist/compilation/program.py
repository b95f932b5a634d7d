"""The programs of one step: traced once for the types of its arguments, placed for how they are kept, compiled."""

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.export
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.agreement.calls import Traced
from jaxdist.communicators import Rules, compiler_options, default_bucket_bytes, lowering
from jaxdist.compilation.callbacks import Callbacks
from jaxdist.compilation.calling import ANNOTATIONS, COMPRESSIONS, Settings
from jaxdist.compilation.placed import PlacedStep
from jaxdist.compilation.signature import Avals, Leaf, PyTree, Signature, picker, unflattener
from jaxdist.compilation.tracing import StepJaxpr, TracedStep, jaxpr_of, traced, without_collections
from jaxdist.ir.fingerprint import dataflow
from jaxdist.ir.interpreter import Interpreter, contains
from jaxdist.machine import Machine
from jaxdist.mesh import AXIS, MODEL, automatic, data_size
from jaxdist.placements.model.layouts import HOST, Layout, Padded, check_host_memory, of_batch, on_host

# Calls after which a program waits for its results on virtual devices. XLA starts programs on the threads that run
# them. Once 32 (of all programs) are under way on a device, it waits there for one to end, which has no thread to run
# on where there are as many threads as devices, and after a minute it ends the process.
_AHEAD = 4

T = TypeVar("T")
CompilerOptions = Mapping[str, object]  # XLA's, by name
TraceSettings = tuple[Hashable, tuple[bool, bool] | None]  # of JAX; whether NaN, and whether infinity, is looked for


class Program:
    """The function ``(state leaves, batch leaves) -> step's result, counts`` on global arrays of one type.

    XLA's program takes three lists: the leaves of the state that are donated, its other leaves, and the batch.
    """

    def __init__(self, placed: PlacedStep, donate: Collection[int], name: str, options: CompilerOptions):
        self.placed, self.name, self._options = placed, name, options
        self.donated = [i for i in placed.signature.state if i in donate]  # leaves whose memory it may take
        not_donated = [i for i in placed.signature.state if i not in donate]
        self._lists = self.donated, not_donated, placed.signature.batch  # positions of the leaves in each
        place_in_state = {i: k for k, i in enumerate(placed.signature.state)}
        # `jax.jit` donates whole arguments: so what is donated, and what is not, are lists of their own.
        self.pick_donated = picker([place_in_state[i] for i in self.donated])
        self._pick_others = picker([place_in_state[i] for i in not_donated])
        self.virtual = placed.mesh.devices.flat[0].platform == "cpu" and len(placed.mesh.local_devices) > 1
        self._calls, self._callbacks = 0, Callbacks()
        self._unflatten, self._leaf_count = unflattener(placed.step.tree), placed.step.tree.num_leaves
        self._padded_results: list[tuple[int, Layout]] = []  # empty until `_run` is traced
        run = functools.partial(self._run)  # can have a name of its own, unlike a method
        run.__name__ = name  # type: ignore[attr-defined]
        self._jitted = jax.jit(
            run,
            in_shardings=tuple([placed.physical_types[i].sharding for i in positions] for positions in self._lists),
            out_shardings=placed.result_shardings(),
            donate_argnums=(0,) if self.donated else (),
            compiler_options={**compiler_options(placed.mesh), **options} or None,
        )

    @functools.cached_property
    def traced(self) -> Traced:
        """The program of a device and the step that it is of, which ranks compare."""
        program = self.placed.emitted.program
        return Traced(program, self.placed.step.jaxpr, dataflow(program))

    def __call__(self, state: Sequence[Leaf], batch: Sequence[Leaf]) -> tuple[PyTree, jax.Array | None]:
        outs, counts = self._jitted(list(self.pick_donated(state)), list(self._pick_others(state)), batch), None
        self._callbacks.check(outs)
        self._calls += 1
        if self.virtual and self._calls % _AHEAD == 0:
            jax.block_until_ready(outs)
        step = self.placed.step
        if step.checked:
            *outs, counts = outs
        for i, layout in self._padded_results:
            outs[i] = Padded(outs[i], layout)
        return self._unflatten(outs), counts

    def with_options(self, options: CompilerOptions) -> "Program":
        """The same with more of the compiler's options."""
        return Program(self.placed, self.donated, self.name, {**self._options, **options})

    def is_as(self, other: "Program") -> bool:
        """Check whether it takes, runs and returns the same, as a program does that was made anew."""
        a, b = self.placed, other.placed
        same_arguments = a.signature == b.signature and a.avals == b.avals and a.layouts == b.layouts
        return a.mesh == b.mesh and same_arguments and self.traced.digest == other.traced.digest

    def by_leaf(self, lists: Sequence[Sequence[T]]) -> list[T]:
        """Return the items of three lists, as the compiled function takes its arguments, in the order of the leaves."""
        pairs = zip(self._lists, lists, strict=True)
        by_position = {i: x for positions, items in pairs for i, x in zip(positions, items, strict=True)}
        return [by_position[i] for i in range(len(self.placed.avals))]

    @compat.under_no_mesh
    @without_collections
    def lower(self) -> jax.stages.Lowered:
        """Lower it, like ``jax.jit(f).lower``."""
        placed = self.placed
        lowered = self._jitted.lower(*([placed.physical_types[i] for i in positions] for positions in self._lists))
        # Arguments in the host's memory that do not say so (see `compat.say_on_host`).
        arguments = [(placed.physical_types[i], placed.layouts[i]) for positions in self._lists for i in positions]
        in_host_memory = [
            k for k, (aval, layout) in enumerate(arguments)
            if layout and layout.host and aval.sharding.memory_kind != HOST
        ]  # fmt: skip
        if in_host_memory:
            compat.say_on_host(lowered, in_host_memory, HOST)
        return lowered

    @compat.under_no_mesh
    def export(self, platforms: Sequence[str] | None) -> jax.export.Exported:
        """The program of whole leaves, in the order of the arguments; XLA sends its collectives."""
        # Where the program runs there may be no jaxdist, which MPI calls need; Auto axes keep shardings out of its
        # types.
        placed = dataclasses.replace(self.placed, mesh=automatic(self.placed.mesh), communicator="xla")
        program, is_batch, leaf_count = Program(placed, (), self.name, {}), placed.signature.is_batch, self._leaf_count

        def run(*leaves: jax.Array) -> list[jax.Array]:
            triples = zip(leaves, placed.layouts, is_batch, strict=True)
            filled = [x if layout is None else _filled(x, layout, batch) for x, layout, batch in triples]
            outs = program._run(*([filled[i] for i in positions] for positions in program._lists))
            for i, layout in program._padded_results:
                outs[i] = layout.trimmed(outs[i])
            return jax.tree.leaves(self._unflatten(outs[:leaf_count]))

        run.__name__ = self.name
        # Leaves with padding in the program come and leave whole, so that callers need not know of it.
        specs = [P()] * len(placed.avals) if placed.mesh.size == 1 else placed.specs()[0]
        plain = [layout is None or layout.is_plain for layout in placed.layouts]
        places = [NamedSharding(placed.run_mesh, s if p else P()) for s, p in zip(specs, plain, strict=True)]
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in placed.avals]
        return jax.export.export(jax.jit(run, in_shardings=tuple(places)), platforms=platforms)(*types)

    def _run(self, *lists: Sequence[jax.Array]) -> list[jax.Array]:
        placed, step = self.placed, self.placed.step
        args = self.by_leaf(lists)

        def results(outs: Sequence[jax.Array]) -> list[jax.Array]:
            # A counter that came as a Python number goes out as one came in, or the next call would compile anew.
            weak = [aval.weak_type for aval in step.jaxpr.out_avals]
            outs = [compat.with_weak_type(x, w) for x, w in zip(outs, weak, strict=True)]
            host = jax.memory.Space.Host
            pairs = zip(outs, placed.result_layouts, strict=True)
            return [jax.device_put(x, host) if layout and layout.host else x for x, layout in pairs]

        closed = placed.emitted.program
        if placed.mesh.size == 1:
            return results(Interpreter({}).run(closed, *args))
        in_specs, out_specs = placed.specs()
        if AxisType.Explicit in placed.mesh.axis_types:  # a leaf kept in shards may be needed whole
            args = jax.sharding.reshard(args, [NamedSharding(placed.mesh, spec) for spec in in_specs])

        def local(zero: int | jax.Array, *xs: jax.Array) -> Sequence[jax.Array]:
            if not any(x.size for x in xs):  # XLA can't divide a program all of whose arguments are empty
                xs = lax.optimization_barrier((zero, *xs))[1:]
            return lowering(placed.communicator, placed.run_mesh).run(self._callbacks.guarded(closed), *xs)

        outs = jax.shard_map(
            local, mesh=placed.run_mesh, in_specs=(P(), *in_specs), out_specs=out_specs, check_vma=False,
        )(0, *args)  # fmt: skip
        layouts = enumerate(placed.out_layouts())
        # Set as JAX traces this, before the first call's results are there: `__call__` reads it.
        self._padded_results = [(i, layout) for i, layout in layouts if layout and not layout.is_plain]
        return results(outs)


def _filled(x: jax.Array, layout: Layout, is_batch: bool) -> jax.Array:
    """A leaf with its padding: of a batch, copies of its last row."""
    return layout.padded(x, "edge" if is_batch and x.size else "constant")


class Pinned(NamedTuple):
    """What a call of a compiled step runs: no other program than its own."""

    expected: Program  # the program of the call must be this one
    program: Program  # runs in its place: it may have more options of the compiler


class ProgramCache:
    """The programs of one step."""

    def __init__(self, settings: Settings, mesh: Mesh, machine: Machine, communicator: str | Rules):
        self._settings, self._mesh, self._machine = settings, mesh, machine
        self._communicator = communicator
        self._jaxprs: dict[Hashable, StepJaxpr] = {}
        self._traces: dict[Hashable, TracedStep] = {}
        self._programs: dict[Hashable, Program] = {}
        self.looked_for: tuple[bool, bool] | None = None  # whether NaN, and whether infinity

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

    def program(
        self, signature: Signature, types: Avals, current: Mapping[int, Layout], elsewhere: Mapping[int, int]
    ) -> Program:
        """The program for leaves of these types: state that is in shards stays so, other state as the step wants it.

        `current` has the layout of each leaf of the state that is in shards on the mesh, `elsewhere` the dimension of
        each that a model axis cuts on another mesh.
        """
        trace = self._traced(signature, types, current, elsewhere)
        layouts: list[Layout | None] = list(trace.layouts)
        groups = trace.groups
        for i, layout in current.items():
            cut, preferred = layout.by(AXIS), layouts[i]
            groups_of_leaf = data_size(self._mesh) // cut.parts if cut else 1
            groups = groups_of_leaf if groups == 1 else groups
            if groups_of_leaf in (1, groups):  # one step has groups of one size
                layouts[i] = on_host(layout, (), 0) if preferred and preferred.host else layout
        key = (trace, *layouts)  # `trace` by identity: it is one for its signature, types and settings
        if key not in self._programs:
            self._programs[key] = self.make(trace, signature, types, layouts, self._mesh, self._communicator)
        return self._programs[key]

    def jaxpr(self, signature: Signature, types: Avals, mesh: Mesh | None = None) -> StepJaxpr:
        """The step for leaves of these types, traced once for all meshes of one size."""
        settings, mesh = self._settings, mesh or self._mesh
        call = (signature.tree, signature.keywords, signature.numbers, compat.trace_settings(), self.looked_for)
        # A step sees whole arrays, whatever the mesh; only the counts of `check_finite` are one for each device.
        key = (call, mesh.size, *((a.shape, a.dtype, a.weak_type) for a in types))
        step = self._jaxprs.get(key) or self._jaxprs.get((key, mesh))
        if step is None:
            counts_nan = settings.check_finite or self.looked_for is not None
            step = jaxpr_of(settings.step, signature, types, mesh, counts_nan)
            # With `per_device` it has code for each device.
            self._jaxprs[(key, mesh) if contains(step.jaxpr.jaxpr, [compat.shard_map_p]) else key] = step
        return step

    def _traced(
        self, signature: Signature, types: Avals, current: Mapping[int, Layout], elsewhere: Mapping[int, int]
    ) -> TracedStep:
        """Return the step traced for leaves of these types, analyzed."""
        step = self.jaxpr(signature, types)
        # By `id`: `_jaxprs` keeps the step as long as this cache has entries for it, so no other gets its number.
        layouts, key, model_dims = self._settings.layouts, (signature, id(step), False), dict[int, int]()
        if layouts in (None, ANNOTATIONS) and self._mesh.shape.get(MODEL, 1) > 1:
            here = {i: cut.dim for i, layout in current.items() if (cut := layout.by(MODEL))}
            model_dims = {**elsewhere, **here}
        # Cuts that leaves come with are not searched for; the first decide, for all that come cut later. Where a search
        # was made before, for leaves that came whole, its cuts serve too.
        if model_dims and key not in self._traces:
            key = (signature, id(step), True)
        if key not in self._traces:
            trace = traced(step, signature, types, self._mesh, self._machine, layouts=layouts, model_dims=model_dims)
            if trace.marks.offloaded and self._machine.has_own_memory:
                check_host_memory(self._mesh)
            self._traces[key] = trace
        return self._traces[key]

    def make(
        self,
        trace: TracedStep,
        signature: Signature,
        avals: Avals,
        layouts: Sequence[Layout | None],
        mesh: Mesh,
        communicator: str | Rules,
    ) -> Program:
        """Return the step's program on these devices, with these layouts of the state."""
        settings = self._settings
        bucket_bytes = settings.bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(communicator, mesh, trace.infer.axis.machine)
        compress = COMPRESSIONS[settings.compress] if settings.compress else None
        leaves = zip(signature.is_batch, avals, layouts, strict=True)
        layouts = [of_batch(aval.shape, mesh) if is_batch else layout for is_batch, aval, layout in leaves]
        placed = PlacedStep(trace, signature, avals, layouts, mesh, communicator, bucket_bytes, compress)
        name, options = getattr(settings.step, "__name__", "step"), dict(settings.compiler_options)
        return Program(placed, self._donated(trace, signature), name, options)

    def _donated(self, trace: TracedStep, signature: Signature) -> set[int]:
        """The leaves that the user lets the results take the memory of."""
        if trace.checked:  # an error of `check_finite` must not cost the state
            return set()
        settings = self._settings
        may = lambda i, name: name in settings.donate_argnums or (settings.donate and i in trace.returned_as_often)
        return {i for argument in signature.arguments for i in argument.positions if may(i, argument.name)}
