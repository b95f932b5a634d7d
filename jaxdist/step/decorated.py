"""A decorated step, and a call of it."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

import jax
from jax.sharding import Mesh

from jaxdist.agreement import sync
from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.agreement.meshes import Meshes
from jaxdist.compat import under_no_mesh
from jaxdist.errors import StepError
from jaxdist.ir.primitives import plain_p
from jaxdist.ir.trace import inside_step, with_axis
from jaxdist.machine import Machine
from jaxdist.mesh import Sizes, mesh_of
from jaxdist.placements import report
from jaxdist.placements.strategy import Placed
from jaxdist.runtime.context import Context, get_context, machine_of
from jaxdist.step import finite, modules
from jaxdist.step.calling import AUTO, Settings
from jaxdist.step.calls import Calls
from jaxdist.step.choice import choose, said
from jaxdist.step.forecast import Forecast
from jaxdist.step.known import Taken, check_there
from jaxdist.step.placer import Placer, on_one_device
from jaxdist.step.program import Program
from jaxdist.step.program_cache import ProgramCache
from jaxdist.step.reading import Reader
from jaxdist.step.signature import Signature, Signatures, flat
from jaxdist.step.tracing import is_traced, say_once
from jaxdist.tracebacks import api_boundary

P = ParamSpec("P")
R = TypeVar("R")
Own = TypeVar("Own")
Rest = ParamSpec("Rest")


class DataParallel(Generic[P, R]):
    """A decorated step. Programs are compiled per structure of arguments; jit does the rest per shape."""

    def __init__(self, settings: Settings):
        self._settings = settings
        step = settings.step
        self._base = getattr(step, "__qualname__", type(step).__name__)
        self._taken = Taken(self._base)
        self._context: Context | None = None
        self._signatures = Signatures()
        self._has_modules = False  # among the arguments of some call
        self._warned = False  # of what is gathered
        self.why = ""

    def __reduce__(self) -> Any:
        """Pickle as the step of the same module, or (from a notebook) as its decoration."""
        name = getattr(self, "__qualname__", "")
        importable = self.__module__ != "__main__" and getattr(sys.modules.get(self.__module__), name, None) is self
        return name if importable else (decorated_with, (self._settings,))

    @overload
    def __get__(self, instance: None, owner: Any = ...) -> Self: ...
    @overload
    def __get__(
        self: DataParallel[Concatenate[Own, Rest], R], instance: Own, owner: Any = ...
    ) -> Callable[Rest, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_traced(args, kwargs):
            return self._on_tracers(args, kwargs)
        return self._outermost(args, kwargs)

    @under_no_mesh
    def _outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._bind_context(args, kwargs)
        config: Any = jax.config
        if config.jax_disable_jit:
            return self._op_by_op(args, kwargs)
        if config.jax_debug_nans or config.jax_debug_infs:  # counted in the step: JAX would look in our code
            with self._cache.looking_for((config.jax_debug_nans, config.jax_debug_infs)):
                return self._dispatch(args, kwargs)
        return self._dispatch(args, kwargs)

    def _op_by_op(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain step in Python, under `jax.disable_jit`."""
        assert self._context is not None
        if self._context.size > 1:
            raise StepError(
                f"step {self._base!r}: jax.disable_jit() runs a step in Python, without the other ranks. Use it in one "
                "process, with the whole batch (python train.py)"
            )
        arranged, keywords = self._settings.calling.arrange(args, kwargs)
        check_there(self._base, self._settings.calling, arranged, keywords, jax.tree.leaves(arranged))
        with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):  # JAX's check would name the copy
            local = lambda x: x if modules.found(x) else jax.tree.map(on_one_device, x)
            args, kwargs = tuple(map(local, args)), {name: local(x) for name, x in kwargs.items()}
        return self._plain(args, kwargs)

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keywords: tuple[str, ...] = ()
        if kwargs or not self._settings.calling.plain:
            args, keywords = self._settings.calling.arrange(args, kwargs)
        if not self._has_modules:
            try:
                return self._run(args, keywords)
            except modules.FoundError:
                self._has_modules = True
        if not modules.found(args):
            return self._run(args, keywords)
        args, objects = modules.split(args)
        return modules.update(objects, self._run(args, keywords))

    def _run(self, args: tuple[Any, ...], keywords: tuple[str, ...]) -> Any:
        calls = self._calls
        calls.begin()
        known, leaves = calls.find(args, keywords)
        program = known.program
        state, batch = known.arguments(leaves, self._placer)
        calls.enter(known)
        try:
            result, found = program(state, batch)
        except BaseException as error:
            calls.failed(error)
            raise
        calls.returned(result)
        name, call = calls.name, calls.number
        if program.donated:
            self._taken.step, self._taken.call, self._taken.state = name, call, program.taken(state)
            if program.virtual:  # where NumPy looks at one device's part JAX keeps it, and would crash on the others
                for x in self._taken.state:
                    x.delete()
        if found is not None:
            assert self._mesh is not None
            kinds = (True, True) if self._settings.check_finite else self._cache.looked_for or (True, True)
            finite.examine(program.placed.step.checked, found, self._mesh, f"step {name!r}, call {call}: ", kinds)
        if self._settings.check_every and call % self._settings.check_every == 0:
            assert self._context is not None
            sync.compare(self._context, result, f"check of {name} call {call}", f"step {name!r}, call {call}: result")
        return result

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The undecorated step."""
        step = self._settings.step
        return with_axis(lambda *xs: step(*modules.apart(xs), **modules.apart(kwargs)), args)

    def _on_tracers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the plain step, marked: it must not be compiled unchanged in a job of several devices."""
        result = self._plain(args, kwargs)
        if inside_step():
            return result
        return jax.tree.map(lambda x: plain_p.bind(x, name=self._base) if isinstance(x, jax.Array) else x, result)

    @api_boundary
    @under_no_mesh
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """The program for these arguments, lowered and not yet compiled, to look at: its text, cost and memory. Nothing
        is sent."""
        self._bind_context(args, kwargs)
        signature, leaves = self._signature(*self._arguments(args, kwargs))
        problem = self._placer.batch_problem(signature, leaves)
        if problem:
            raise ValueError(problem)
        program = self._cache.program(signature, leaves)
        self._say(program)
        return program.lower()

    def clear_cache(self) -> None:
        """Forget traces and compiled programs, like ``jax.jit(step).clear_cache``."""
        if self._context is not None:
            self._cache.clear()
            self._calls.clear()

    @property
    def mesh(self) -> Mesh | Sizes | Literal["auto"] | None:
        """The mesh option that it was decorated with."""
        return self._settings.mesh

    @under_no_mesh
    def program(self, *args: Any, **kwargs: Any) -> Program:
        """Return the program for these arguments, not compiled. Nothing is sent."""
        self._bind_context(args, kwargs)
        return self._cache.program(*self._signature(*self._arguments(args, kwargs)))

    @under_no_mesh
    def placed(self, *args: Any, **kwargs: Any) -> list[Placed]:
        """`program`, placed over each axis; nothing: on one device."""
        placed = self.program(*args, **kwargs).placed
        return [one.placed for one in placed.place()] if placed.mesh.size > 1 else []

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """All arguments in order, objects of nnx as their arrays; and the names of those that go by keyword."""
        args, keywords = self._settings.calling.arrange(args, kwargs)
        return modules.split(args)[0] if modules.found(args) else args, keywords

    def _signature(self, args: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Signature, list[Any]]:
        """Return the signature of a call and its leaves: an earlier call's, or as this rank reads it."""
        leaves, tree = flat(args, keywords)
        known = self._signatures.get((tree, self._signatures.constants(tree, leaves)))
        signature = known or self._reader.read(args, keywords)
        return signature, signature.data(leaves)

    def _bind_context(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Settle the devices; with ``mesh="auto"`` for a call of these arguments."""
        if self._context is None:
            context = get_context()
            given, passed = self._settings.mesh, None
            if given == AUTO:
                given, self.why = self._chosen(context, args, kwargs)
                passed = context.mesh
            mesh = context.mesh if given is None else mesh_of(given, context.devices)
            context.only(Meshes).connect(mesh)
            self._context, self._mesh = context, mesh
            self._placer = Placer(context, mesh, passed)
            rules = context.rules or context.communicator
            machine = machine_of(mesh)
            self._cache = ProgramCache(self._settings, mesh, machine, self._placer, rules)
            self._reader = Reader(self._base, self._settings, self._placer, self._cache)
            self._calls = Calls(
                self._base, self._settings, context, self._placer, self._cache, self._reader, self._signatures,
                self._say,
            )  # fmt: skip

    def _chosen(self, context: Context, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Mesh, str]:
        """The fastest mesh for a call, the same on every rank, and why. Every rank calls it."""

        def part() -> Part[tuple[Mesh, str]]:
            mesh, why = choose(self._over_data(args, kwargs), context)
            return Part((mesh, why), (("mesh", said(mesh.shape)),))

        advice = lambda _: "Give the sizes of its axes, or the same JAXDIST_MACHINE on all ranks"
        return on_every_rank(context, f"the mesh of step {self._base!r}", part, advice=advice)[0]

    def _over_data(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forecast:
        """A call on this job's devices in one axis."""
        there = self._anywhere()
        there._bind_context()
        args, keywords = there._arguments(args, dict(kwargs))
        try:
            signature, leaves = there._signature(args, keywords)
        except Exception:
            if clearer := there._reader.bad_constant(args, keywords):
                raise clearer from None
            raise
        leaves = [there._placer.logical_batch(x) if b else x for x, b in zip(leaves, signature.is_batch, strict=True)]
        return Forecast(there._settings, there._cache, signature, leaves, there._mesh, machine_of(there._mesh))

    def _anywhere(self) -> DataParallel[P, R]:
        """The same step, for no mesh in particular."""
        there: DataParallel[P, R] = object.__new__(
            DataParallel
        )  # `copy.copy` may return the step itself (`__reduce__`)
        there.__dict__.update(self.__dict__, _context=None, _settings=dataclasses.replace(self._settings, mesh=None))
        return there

    @under_no_mesh
    def forecast(self, mesh: Mesh, machine: Machine, args: tuple[Any, ...]) -> Forecast:
        """A call on other devices than this job's, which need not be here (see `jaxdist.step.forecast`)."""
        if self._settings.mesh is not None:  # nor the devices of its own mesh
            return self._anywhere().forecast(mesh, machine, args)
        self._bind_context()
        signature, leaves = self._signature(*self._arguments(args, {}))
        return Forecast(self._settings, self._cache, signature, leaves, mesh, machine)

    def _say(self, made: Program) -> None:
        """Warn about slow parts of a program, once."""
        assert self._context is not None
        placed = [one.placed for one in made.placed.emitted[1]]
        if not placed or not self._context.is_root or self._warned:
            return
        text = report.warning(placed)
        if self._settings.batch is None:
            text = text or made.placed.unsplit()
        if text:
            self._warned = True  # and once of a step that is decorated anew, in a loop or for each trial
            say_once(f"step {self._base!r}: {text}")


def decorated_with(settings: Settings) -> DataParallel:
    """The step, decorated."""
    decorated = DataParallel(settings)
    functools.update_wrapper(decorated, settings.step)
    return decorated
