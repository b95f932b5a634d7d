"""A decorated step, and a call of it."""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import jax
from jax.sharding import AxisType, Mesh

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.compat import mesh_of_user, under_no_mesh
from jaxdist.compilation import modules
from jaxdist.compilation.calling import AUTO, AnyMesh, Settings
from jaxdist.compilation.program import Pinned, Program
from jaxdist.compilation.signature import Args, Kwargs, Leaf, PyTree, Signature, flat
from jaxdist.compilation.tracing import is_traced, without_collections
from jaxdist.errors import StepError
from jaxdist.forecast.choice import ChosenMesh, Forecast, choose, in_words
from jaxdist.ir.primitives import plain_p
from jaxdist.ir.trace import inside_step, with_axis
from jaxdist.machine import Machine
from jaxdist.mesh import NAMES, automatic, mesh_of
from jaxdist.proof.compare import Verified
from jaxdist.runtime.context import Context, get_context, machine_of, map_of
from jaxdist.step import batch
from jaxdist.step.calls import Arguments, Calls
from jaxdist.step.leaves import abstract, sharding_over_any
from jaxdist.step.stages import Lowered, Traced
from jaxdist.text import name_of
from jaxdist.tracebacks import api_boundary

P = ParamSpec("P")
R = TypeVar("R")
Bound = TypeVar("Bound")  # the object whose method it is
Others = ParamSpec("Others")  # the parameters after it


class DataParallel(Generic[P, R]):
    """A decorated step. Programs are compiled per structure of arguments; jit does the rest per shape."""

    def __init__(self, settings: Settings):
        self._settings = settings
        step = settings.step
        self._base = name_of(step)
        self._bound: dict[Mesh | None, Calls] = {}  # by the mesh that the user has set
        self.why = ""  # it has chosen its mesh

    def __reduce__(self) -> str | tuple[Callable[[Settings], "DataParallel"], tuple[Settings]]:
        """Pickle as the step of the same module, or (from a notebook) as its decoration."""
        name = getattr(self, "__qualname__", "")
        importable = self.__module__ != "__main__" and getattr(sys.modules.get(self.__module__), name, None) is self
        return name if importable else (decorated_with, (self._settings,))

    @overload
    def __get__(self, instance: None, owner: type | None = ...) -> Self: ...
    @overload
    def __get__(
        self: "DataParallel[Concatenate[Bound, Others], R]", instance: Bound, owner: type | None = ...
    ) -> Callable[Others, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @api_boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced(args, kwargs):
            return self._on_tracers(args, kwargs)
        return self._outermost(args, kwargs)

    @under_no_mesh
    def _outermost(self, args: Args, kwargs: dict[str, PyTree], pinned: Pinned | None = None) -> PyTree:
        calls, config, keywords = self._calls(args, kwargs), cast("Any", jax.config), ()
        if config.jax_disable_jit:
            raise StepError(
                f"step {self._base!r}: jax.disable_jit() runs a step in Python, on one device. Call the plain step "
                "there, step.__wrapped__, in one process with the whole batch (python train.py)"
            )
        if kwargs or self._settings.calling.static:
            args, keywords = self._settings.calling.arrange(args, kwargs)
        if config.jax_debug_nans or config.jax_debug_infs:  # counted in the step: JAX would look in our code
            with calls.cache.looking_for((config.jax_debug_nans, config.jax_debug_infs)):
                return calls.run(args, keywords, pinned)
        return calls.run(args, keywords, pinned)

    def _plain(self, args: Args, kwargs: dict[str, PyTree]) -> PyTree:
        """The undecorated step."""
        step = self._settings.step
        copied = modules.with_copied_containers
        return with_axis(lambda *xs: step(*copied(xs), **copied(kwargs)), args)

    def _on_tracers(self, args: Args, kwargs: dict[str, PyTree]) -> PyTree:
        """Run the plain step, marked: it must not be compiled unchanged in a job of several devices."""
        result = self._plain(args, kwargs)
        if inside_step():
            return result
        return jax.tree.map(lambda x: plain_p.bind(x, name=self._base) if isinstance(x, jax.Array) else x, result)

    @api_boundary
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Traced[P, R]:
        """The step, traced for these arguments or their types (`jax.ShapeDtypeStruct`). No array is sent."""
        program = self.program(*args, **kwargs)
        self._calls(args, kwargs).announce(program)
        return Traced(program, self._outermost)

    @api_boundary
    @without_collections
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered[P, R]:
        """The program of all devices for these arguments or their types, not yet compiled. No array is sent."""
        return self.trace(*args, **kwargs).lower()

    @api_boundary
    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """The types of the result for these arguments or their types. No array is sent."""
        return self.trace(*args, **kwargs).out_info

    def clear_cache(self) -> None:
        """Forget traces and compiled programs, like ``jax.jit(step).clear_cache``."""
        for calls in self._bound.values():
            calls.clear()

    @property
    def mesh(self) -> AnyMesh | None:
        """The mesh option that it was decorated with."""
        return self._settings.mesh

    @under_no_mesh
    def program(self, *args: PyTree, **kwargs: PyTree) -> Program:
        """Return the program for these arguments, not compiled.

        No array is sent. On a mesh of several axes the first call is one that all ranks make.
        """
        calls = self._calls(args, kwargs)
        signature, leaves = self._read(calls, args, kwargs)
        return calls.program(signature, leaves)

    @api_boundary
    @under_no_mesh
    def verified(self, args: Args, kwargs: Kwargs, points: int, strict: bool) -> Verified:
        """Compare the program for these arguments with the step (`jaxdist.verify`). Every rank calls it."""
        if is_traced(args, kwargs):
            raise StepError("jaxdist.verify compares programs: call it outside of jax.jit and of other transformations")
        return self._calls(args, kwargs).verified(self._arguments(args, kwargs), points, strict)

    def _read(self, calls: Calls, args: Args, kwargs: Kwargs) -> tuple[Signature, list[Leaf]]:
        """Return the signature of a call and its leaves."""
        return calls.read(self._arguments(args, kwargs))

    def _arguments(self, args: Args, kwargs: Kwargs) -> Arguments:
        """Return the arguments of a call, with objects of nnx as their arrays."""
        args, keywords = self._settings.calling.arrange(args, kwargs)
        args = modules.split(args)[0] if modules.has_objects(args) else args
        return Arguments(args, keywords, *flat(args, keywords))

    def _calls(self, args: Args, kwargs: Kwargs, where_user_is: bool = True) -> Calls:
        """The calls of the step, once its devices are settled; with ``mesh="auto"`` for a call of these arguments."""
        users = mesh_of_user() if where_user_is else None
        if users not in self._bound:
            context = get_context()
            declared, input_mesh = self._settings.mesh, None
            if declared == AUTO:
                declared, self.why = self._chosen(context, args, kwargs)
                input_mesh = context.mesh
            mesh = context.mesh if declared is None else mesh_of(declared, context.devices)
            mesh = self._where_results_live(mesh, users) if users else mesh
            # Two settings of `jax.set_mesh` may come to one mesh.
            same_mesh = (calls for calls in self._bound.values() if calls.mesh == mesh)
            new = functools.partial(Calls, self._base, self._settings, context, mesh, input_mesh)
            self._bound[users] = next(same_mesh, None) or new()
        return self._bound[users]

    def _where_results_live(self, mesh: Mesh, users: Mesh) -> Mesh:
        """The mesh of `jax.set_mesh`, if it has the step's axes and devices; else the step's own."""
        if isinstance(self._settings.mesh, Mesh):
            return users if automatic(users) == automatic(mesh) else mesh
        same_devices = {*users.devices.flat} == {*mesh.devices.flat}
        if same_devices and users.shape == mesh.shape and _have_same_rows(users, mesh):
            return users
        if AxisType.Explicit not in users.axis_types:
            return mesh
        advice = "set one of the step's axes and devices, or one with Auto axes"
        if same_devices and {*users.axis_names} <= {*NAMES}:
            advice = "decorate with jaxdist.parallel(mesh=jax.sharding.get_mesh()), whose rows are ctx.rows(n, mesh)"
        raise StepError(
            f"step {self._base!r} runs on {_in_words(mesh)}, and jax.set_mesh has set {_in_words(users)} with Explicit "
            f"axes, whose arrays go with no others: {advice}"
        )

    def _chosen(self, context: Context, args: Args, kwargs: Kwargs) -> ChosenMesh:
        """The fastest mesh for a call, the same on every rank. Every rank calls it."""

        def part() -> Part[ChosenMesh]:
            chosen = choose(self.forecast(context.mesh, machine_of(context.mesh), args, kwargs, True), context)
            return Part(chosen, (("mesh", in_words(chosen.mesh.shape)),))

        advice = "Give the sizes of its axes, or the same JAXDIST_MACHINE on all ranks"
        try:
            return on_every_rank(context, f"the mesh of step {self._base!r}", part, advice=advice)[0]
        except ValueError as error:
            raise error.__cause__ or error from None  # an error in the step is the user's own

    @under_no_mesh
    def forecast(self, mesh: Mesh, machine: Machine, args: Args, kwargs: Kwargs, parts: bool) -> Forecast:
        """A call on devices that need not be here; its batch is whole, or this process's part of one."""
        if self._settings.mesh is not None:
            other: DataParallel[P, R] = DataParallel(dataclasses.replace(self._settings, mesh=None))
            return other.forecast(mesh, machine, args, kwargs, parts)
        calls = self._calls(args, kwargs, where_user_is=False)
        signature, leaves = self._read(calls, args, kwargs)
        logical = calls.placer.logical_batch if parts else abstract
        avals = [logical(x) if b else abstract(x) for x, b in zip(leaves, signature.is_batch, strict=True)]
        for i in signature.batch:
            batch.check(signature.names[i], avals[i])
        shardings = {i: sharding for i in signature.state if (sharding := sharding_over_any(leaves[i])) is not None}
        return Forecast(self._settings, calls.cache, signature, avals, shardings, mesh, machine)


def _have_same_rows(a: Mesh, b: Mesh) -> bool:
    """Check whether each process has the same rows of a batch on both meshes."""
    try:
        return map_of(a).shares == map_of(b).shares
    except ValueError:  # the devices of a process are not next to each other
        return False


def _in_words(mesh: Mesh) -> str:
    return f"a mesh {dict(mesh.shape)} of the devices {', '.join(str(d.id) for d in mesh.devices.flat)}"


def decorated_with(settings: Settings) -> DataParallel:
    """The step, decorated."""
    decorated = DataParallel(settings)
    functools.update_wrapper(decorated, settings.step)
    return decorated
