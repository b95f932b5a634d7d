"""Compile one step for arguments of one structure and type: trace, place, bucket, lower."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.agreement.calls import Traced
from jaxdist.communicators import Rules, compiler_options, lowering
from jaxdist.communicators.by_hosts import large
from jaxdist.ir.interpreter import Interpreter
from jaxdist.ir.primitives import FETCHED
from jaxdist.ir.wire import transfers
from jaxdist.mesh import AXIS, GROUP, MODEL, Axis, axes_of_mesh, data_size, in_groups, in_host, passes
from jaxdist.placements.accumulation import in_place
from jaxdist.placements.buckets import Fuse
from jaxdist.placements.emit import Emitter, local_types
from jaxdist.placements.infer import Infer
from jaxdist.placements.layouts import HOST, Layout, Padded, layout_of, of_batch, sharding, spec
from jaxdist.placements.offload import staged
from jaxdist.placements.report import worth_splitting
from jaxdist.placements.strategy import Placed
from jaxdist.placements.values import REPLICATED
from jaxdist.placements.wires import compressible
from jaxdist.step.batch import carried_over, is_keys, unsplit
from jaxdist.step.passes import Pass, place, spec_of
from jaxdist.step.signature import Signature, constants_back, has_constants, picker
from jaxdist.step.tracing import TracedStep

_GATHERED_AT_ONCE = 64
"""At most one part in so many of what is kept in shards is whole at a time, for the sake of fewer messages."""


_AHEAD = 4
"""Calls after which a program waits for its results on virtual devices.

XLA starts programs on the threads that run them. Once 32 are under way on a device it waits there for one to end, which
has no thread to run on where there are as many threads as devices, and after a minute XLA ends the process. Other
programs count as well.
"""


class Program:
    """The function ``(state leaves, batch leaves) -> step's result, findings`` on global arrays, for arguments of one
    type, compiled."""

    def __init__(
        self,
        step: TracedStep,
        signature: Signature,
        avals: Sequence[Any],
        layouts: Sequence[Layout | None],
        mesh: Mesh,
        communicator: str | Rules,
        donate: Collection[int],
        bucket_bytes: int,
        compress: str | None,
        name: str = "step",
    ):
        self._step, self.signature, self.layouts, self._mesh = step, signature, tuple(layouts), mesh
        self.checked = step.checked
        self.types = tuple((a.shape, a.dtype, a.weak_type) for a in avals)
        held = [self.layouts[i] for i in signature.state]
        self.padded = [i for i, how in enumerate(held) if how and not how.is_plain]
        self.batch = [of_batch(avals[i].shape, mesh) for i in signature.batch]
        self._bucket_bytes, self._compress = bucket_bytes, compress
        self._machine = step.infer.machine
        self.virtual = mesh.devices.flat[0].platform == "cpu" and len(mesh.local_devices) > 1
        self._calls = 0
        self._communicator = communicator
        self._has_constants = has_constants(step.tree)
        self._executable: jax.stages.Compiled | None = None  # compiled ahead of the first call; else `jax.jit` does it
        self._emitted: tuple[ClosedJaxpr, list[Pass]] | None = None
        shares = [cut.parts for how in self.layouts if how and (cut := how.by(AXIS))]
        self._over = in_groups(mesh, max(step.groups, data_size(mesh) // min(shares, default=data_size(mesh))))
        self._avals = list(avals)
        self._padded_outputs: list[tuple[int, Layout]] = []
        state = signature.state
        self._offloaded = {  # and its next value
            i: step.sources.index(i) if i in step.sources else None
            for i, how in enumerate(self.layouts) if how and how.host
        }  # fmt: skip
        self._given_up = [k for k, i in enumerate(state) if i in donate]
        self._kept = [k for k, i in enumerate(state) if i not in donate]
        self._pick = picker(self._given_up), picker(self._kept)
        shardings = [sharding(mesh, how) for how in held]
        # What is in the host's memory, and does not say so (see `compat.say_on_host`).
        order = [(held[k], shardings[k]) for k in (*self._given_up, *self._kept)]
        self._unsaid = [i for i, (how, own) in enumerate(order) if how and how.host and own.memory_kind != HOST]
        run = functools.partial(self._run)
        run.__name__ = name  # type: ignore[attr-defined]
        self._jitted = jax.jit(
            run,
            in_shardings=(
                [shardings[k] for k in self._given_up], [shardings[k] for k in self._kept],
                [sharding(mesh, how) for how in self.batch],
            ),
            out_shardings=self._results_on(mesh) if self._over is not mesh else None,
            donate_argnums=(0,) if self._given_up else (),
            compiler_options=compiler_options(mesh) or None,
        )  # fmt: skip

    def _results_on(self, mesh: Mesh) -> list[NamedSharding]:
        """How its results lie: on the mesh of the arguments what need not be on that of several axes, so that they are
        arguments of the same type in the next call."""
        self._emitted = self._emitted or self._emit()
        _, found = self._emitted
        specs = [spec_of(found, ps) for ps in zip(*(one.placed.outs for one in found), strict=True)]
        kept = [None if i is None else self.layouts[i] for i in self._step.sources]

        def place(own: P, how: Layout | None) -> NamedSharding:
            if how is not None:
                return sharding(mesh, how)
            dims = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in own]
            if any((GROUP in axes) != (AXIS in axes) for axes in dims):
                return NamedSharding(self._over, own)
            merged = [tuple(name for name in axes if name != GROUP) for axes in dims]
            return NamedSharding(mesh, spec(merged))

        return list(map(place, specs, kept))

    def use(self, executable: jax.stages.Compiled) -> None:
        """Run what was compiled ahead, where it fits."""
        self._executable = executable

    @functools.cached_property
    def traced(self) -> Traced:
        """The program of a device and the step that it is of, which ranks compare."""
        return Traced(self.emitted()[0], self._step.jaxpr)

    @property
    def donated(self) -> list[int]:
        """Positions of the leaves whose memory it may take."""
        return [self.signature.state[k] for k in self._given_up]

    @property
    def donates(self) -> bool:
        """Whether it may take the memory of some state."""
        return bool(self._given_up)

    def taken(self, state: Sequence[Any]) -> list[Any]:
        """The arrays among the leaves of the state whose memory it may take."""
        return list(self._pick[0](state))

    def unreturned(self) -> set[int]:
        """Positions of the leaves of the state of whose structure the step returns nothing."""
        return set(self.signature.state).difference(self._step.sources)

    def cut_by_model(self) -> dict[str, int]:
        """The leaves that the model axis cuts, by name, and the dimension."""
        kept = zip(self.signature.names, self.layouts, strict=True)
        return {name: cut.dim for name, how in kept if how and (cut := how.by(MODEL))}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh that it runs on, the outermost first."""
        return axes_of_mesh(self._over)

    def unsplit(self, over: Sequence[Placed]) -> str:
        """What to say of a step that has no batch, though an argument may be one, and would gain from it."""
        returned, avals = set(self._step.sources), self._avals
        names = [
            name for _, at, name in self.signature.arguments
            if returned.isdisjoint(at) and any(avals[i].shape and not is_keys(avals[i]) for i in at)
        ]  # fmt: skip
        if not names or not any(map(worth_splitting, over)):
            return ""
        processes = {d.process_index for d in self._mesh.devices.flat}
        return unsplit(names, self._mesh.size, len(processes))

    def carried_batch(self) -> str:
        """What to say of a step that returns the next value of its batch, and has no arrays that may be its state."""
        step, signature = self._step, self.signature
        split = [k for k, (_, at, _) in enumerate(signature.arguments) if not set(at).isdisjoint(signature.batch)]
        arrays = [i for i in signature.state if self._avals[i].shape and not is_keys(self._avals[i])]
        if not split or arrays:
            return ""
        like = set(split).issubset(step.returned(signature.arguments, self._avals))
        return carried_over([signature.arguments[k][2] for k in split]) if like else ""

    def __call__(self, state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        """Run it."""
        args = list(self._pick[0](state)), list(self._pick[1](state)), batch
        if self._executable is None:
            outs, found = self._jitted(*args), None
        else:
            try:
                outs, found = self._executable(*args), None
            except (TypeError, ValueError):  # of other types, or kept otherwise
                outs, found = self._jitted(*args), None
        self._calls += 1
        if self.virtual and self._calls % _AHEAD == 0:
            jax.block_until_ready(outs)
        if self.checked:
            *outs, found = outs
        for i, how in self._padded_outputs:
            outs[i] = Padded(outs[i], how)
        result = jax.tree.unflatten(self._step.tree, outs)
        return constants_back(result) if self._has_constants else result, found

    def ahead(self, what: str, state: Sequence[Any], batch: Sequence[Any]) -> Any:
        """What ``jax.jit(f).lower`` returns, or another of its methods."""
        ahead = getattr(self._jitted, what)(list(self._pick[0](state)), list(self._pick[1](state)), batch)
        if what == "lower" and self._unsaid:
            compat.say_on_host(ahead, self._unsaid, HOST)
        return ahead

    def place(self, fused: Callable[[Infer, Placed], ClosedJaxpr] | None = None) -> list[Pass]:
        """Settle the placements of the step, over an axis of the mesh after the other."""
        axes, fused = passes(self._over), fused or self._fused
        whole, batch = [REPLICATED] * len(axes), iter(self.batch)
        given = [
            next(batch).placements(a.shape, axes, stored=False) if is_batch else how.placements(a.shape, axes) if how
            else whole
            for is_batch, how, a in zip(self.signature.is_batch, self.layouts, self._avals, strict=True)
        ]  # fmt: skip
        layouts = [None if i is None else self.layouts[i] for i in self._step.sources]
        kept = [
            how and how.placements(a.shape, axes) for how, a in zip(layouts, self._step.jaxpr.out_avals, strict=True)
        ]

        def emit(infer: Infer, placed: Placed) -> ClosedJaxpr:
            return self._emitter(infer, placed, True).program(local_types(placed))

        def messages(infer: Infer, placed: Placed) -> int:
            sent = transfers(fused(infer, placed), self.axes, self._machine)
            return sum(one.times * count for one, count in sent.items())

        found = place(self._step, axes, given, kept, emit, messages)
        if self._step.weighed:
            outer = found[0].placed
            found[0] = replace(found[0], placed=replace(outer, weighed=[*outer.weighed, *self._step.weighed]))
        for one in found:
            one.placed.names, one.placed.sources = self.signature.names, self._step.sources
        return found

    def emitted(self) -> tuple[ClosedJaxpr, Sequence[Placed]]:
        """What a device runs, and how it is placed over each axis (none: on one device): for who wants to know it
        before JAX lowers it."""
        if self._mesh.size == 1:
            return self._step.jaxpr, ()
        if self._emitted is None:
            self._emitted = self._emit()
        closed, found = self._emitted
        return closed, [one.placed for one in found]

    def _emit(self) -> tuple[ClosedJaxpr, list[Pass]]:
        fused = functools.cache(self._fused)  # a step that may be small is traced to know its messages
        found = self.place(fused)
        return staged(fused(found[-1].infer, found[-1].placed), self._offloaded, self.axes), found

    def _emitter(self, infer: Infer, placed: Placed, marks: bool) -> Emitter:
        may = compressible(placed, self._step.sources) if self._compress else {}
        return Emitter(infer, placed, may, self._compress, marks)

    def _fused(self, infer: Infer, placed: Placed) -> ClosedJaxpr:
        """What a device runs, its collectives in buckets."""
        axes = self.axes
        closed = self._emitter(infer, placed, bool(self._offloaded)).program(local_types(placed))
        in_shards = sum(a.size * a.dtype.itemsize for a, how in zip(self._avals, self.layouts, strict=True) if how)
        closed = in_place(closed, axes)
        ahead = in_shards // _GATHERED_AT_ONCE
        return Fuse(self._bucket_bytes, axes, ahead, barriers=not self._machine.kind.is_cpu)(closed)

    def _run(self, given_up: Sequence[Any], kept: Sequence[Any], batch: Sequence[Any]) -> Any:
        step, signature, mesh = self._step, self.signature, self._mesh
        state: list[Any] = [None] * len(signature.state)
        for k, x in zip([*self._given_up, *self._kept], [*given_up, *kept], strict=True):
            state[k] = x
        args = _interleave(signature.is_batch, state, batch)
        types = tuple(
            (how.logical(x.shape) if how else a.shape if is_batch else x.shape, x.dtype, jax.typeof(x).weak_type)
            for x, a, how, is_batch in zip(args, self._avals, self.layouts, signature.is_batch, strict=True)
        )
        assert types == self.types, (types, self.types)
        kept_as = [None if i is None else self.layouts[i] for i in step.sources]

        def results(outs: Sequence[Any]) -> list[Any]:
            # A counter that came as a Python number goes out as one came in, or the next call would compile anew.
            weak = [aval.weak_type for aval in step.jaxpr.out_avals]
            outs = [compat.with_weak_type(x, w) for x, w in zip(outs, weak, strict=True)]
            host = jax.memory.Space.Host
            return [jax.device_put(x, host) if k and k.host else x for x, k in zip(outs, kept_as, strict=True)]

        if mesh.size == 1:
            return results(Interpreter(FETCHED).run(staged(step.jaxpr, self._offloaded, ()), *args))
        closed, found = self._emitted = self._emitted or self._emit()
        over, outs = self._over, [one.placed.outs for one in found]
        specs = tuple(spec_of(found, ps) for ps in zip(*(one.ins for one in found), strict=True))
        out_specs = [spec_of(found, ps) for ps in zip(*outs, strict=True)]

        def local(zero: Any, *xs: Any) -> list[Any]:
            if not any(x.size for x in xs):  # XLA can't divide a program all of whose arguments are empty
                xs = lax.optimization_barrier((zero, *xs))[1:]
            each = in_host(self._machine.hosts)
            hosts = each, large(self._machine, mesh.size, each) if each else 0
            return lowering(self._communicator, over, hosts).run(closed, *xs)

        made = jax.shard_map(
            local, mesh=over, in_specs=(P(), *specs), out_specs=out_specs, check_vma=False,
        )(0, *args)  # fmt: skip
        self._padded_outputs = [
            (i, how) for i, p in enumerate(outs[-1])
            if (how := kept_as[i] or layout_of(p, found[-1].infer.axis)) is not None and not how.is_plain
        ]  # fmt: skip
        return results(made)


def _interleave(is_batch: Sequence[bool], state: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
    leaves = {False: iter(state), True: iter(batch)}
    return [next(leaves[b]) for b in is_batch]
