"""`data_parallel`: run a train step that was written for one device on all of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import commlog, finite, sync
from jaxdist.communicators import Rules, default_bucket_bytes
from jaxdist.compat import sharding_of, trace_settings, trace_state_clean
from jaxdist.context import Context, get_context
from jaxdist.placements import report
from jaxdist.placements.plan import Placed
from jaxdist.step import debugging, modules
from jaxdist.step.agree import Agreement, StepCall, list_ranks
from jaxdist.step.calling import Calling
from jaxdist.step.fingerprint import constants
from jaxdist.step.layouts import Layout, Padded, choose, sharding
from jaxdist.step.placement import ELSEWHERE, Part, Placement, abstract, batch_problem, checksum, in_shards
from jaxdist.step.primitives import AXIS, plain_p
from jaxdist.step.program import (
    OtherTypesError,
    Program,
    Signature,
    StepJaxpr,
    Traced,
    is_array,
    jaxpr_of,
    picker,
    run,
    traced,
)
from jaxdist.step.signing import Signer
from jaxdist.step.trace import inside_step, with_axis
from jaxdist.step.tracebacks import api_boundary

A = ParamSpec("A")
R = TypeVar("R")
Batch = int | str

Compression = Literal["bf16", "fp16"]
_COMPRESSIONS = {"bf16": "bfloat16", "fp16": "float16"}

_log = logging.getLogger("jaxdist")
_names: dict[str, itertools.count[int]] = {}


@overload
def data_parallel(
    step: Callable[A, R],
    *,
    batch_argnums: Batch | Sequence[Batch] | None = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    axis_name: str = ...,
    donate: bool = ...,
    check_finite: bool = ...,
    check_every: int = ...,
    bucket_bytes: int | None = ...,
    compress: Compression | None = ...,
    enabled: bool = ...,
    mesh: Mesh | None = ...,
) -> DataParallel[A, R]: ...
@overload
def data_parallel(
    *,
    batch_argnums: Batch | Sequence[Batch] | None = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    donate_argnums: int | Sequence[int] | None = ...,
    axis_name: str = ...,
    donate: bool = ...,
    check_finite: bool = ...,
    check_every: int = ...,
    bucket_bytes: int | None = ...,
    compress: Compression | None = ...,
    enabled: bool = ...,
    mesh: Mesh | None = ...,
) -> Callable[[Callable[A, R]], DataParallel[A, R]]: ...
def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    batch_argnums: Batch | Sequence[Batch] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] | None = None,
    axis_name: str = AXIS,
    donate: bool = True,
    check_finite: bool = False,
    check_every: int = 0,
    bucket_bytes: int | None = None,
    compress: Compression | None = None,
    enabled: bool = True,
    mesh: Mesh | None = None,
) -> Any:
    """Run a pure train step, written for one device, on every device of the job.

    The decorated step returns what ``jax.jit(step)`` returns on one device with the whole batch, up to the rounding of
    floating-point sums: every leaf, for every pure step. Inside it ``x.shape[0]`` is the whole batch's, a mean is the
    mean over all examples and a sum their sum. Each device computes its part of the examples; what couples them (a
    gradient, the statistics of BatchNorm, a similarity matrix) moves between the devices.

    * Each process passes ITS part of the batch (arrays of any kind; the parts are concatenated in rank order), or an
      array that is global already. The parts have the same shapes. Where the devices don't divide the examples, the
      last ones have fewer.
    * All other arguments are state: any number of pytrees. The parts of the result that have the structure, shapes and
      types of a state argument, and follow from it, are its next value. State that is not on the mesh yet is taken from
      the root rank; a state argument that the step does not return must be the same on every rank. A leaf that is no
      array is a constant of the program.
    * What comes back are global arrays: the state as it is kept, aux values whole, or split over the devices where they
      have an entry an example (and the devices divide them).

    Inside the step the mesh axis means what it means on one device, an axis of size one: code written for `jax.pmap`,
    ``lax.pmean(x, "batch")`` say, is right as it is. Code for each device goes into `jaxdist.per_device`. Called with
    tracers (under `jax.grad`, in another decorated step) it is the plain step.

    Args:
      step: ``(*state, batch) -> result``, pure, jit-compatible.
      batch_argnums: which arguments are the batch: positions, names, or paths of a part of one (``"state.images"``,
        ``"data['x']"``); ``()`` for none. Default: those that have arrays of one length, like the last one, and of
        which the step does not return the next value (see ``jaxdist.step.batch``); where that leaves two readings of
        a call of several ranks, an error names them.
      static_argnums: arguments that are constants of the program, as of `jax.jit`.
      static_argnames: the same, by name.
      donate_argnums: of the state that the step returns only these arguments are donated, as of `jax.jit`; default:
        all of it.
      axis_name: what the step calls the axis of data parallelism, if it names it.
      donate: let the new state reuse the memory of the old one, which can't be used afterwards. State that was not on
        the mesh yet is copied and stays usable, and so does state that the step does not return.
      check_finite: after each call look for NaN and infinity in the result (and what `jaxdist.check_finite` names
        inside the step) and raise, on every rank, naming the first such leaf. Waits for the step to end; the state is
        not donated, so that the one given is still there after the error.
      check_every: after so many calls, and again after as many, compare what the result holds whole on each device,
        bit for bit, over all devices and ranks, as `jaxdist.check_sync` does, and raise on every rank. Waits for that
        step to end. 0: never.
      bucket_bytes: gradients of one dtype travel together in messages of about so many bytes; a larger one travels
        alone. 0: each travels alone. Default: by measurement, see ``jaxdist.communicators.default_bucket_bytes``.
      compress: ``"bf16"`` or ``"fp16"``: wider floating gradients are cast to it on the wire, half the bytes of
        float32. Between CPU processes each device's part is rounded, the parts are added in float32 and their sum is
        rounded again: a relative error of at most 2**-8 (bf16; 2**-10 fp16) of the sum of the parts' magnitudes. On
        GPUs NCCL rounds each partial sum as well. The optimizer sees the gradient's own dtype. Losses, aux values,
        statistics of the batch and collectives of your own are not compressed.
      enabled: False: the step runs as it is, on one device.
      mesh: the devices to use, one axis named ``"data"``; default: all of the job.

    Returns:
      A function of the same arguments. Its methods ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` are those
      of what ``jax.jit`` returns.

    Raises:
      ValueError: (on every rank) a batch that can't be divided over the devices, or ranks whose arguments differ.
      StepError: (when first called) an operation that is not possible on several devices, or a result of which can't be
        told which argument's next value it is.
      FloatingPointError: see `check_finite`.
      SyncError: see `check_every`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> @jaxdist.data_parallel
      ... def step(w, batch):
      ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
      ...     return w - 0.1 * grad, loss
      >>> w, loss = step(jnp.ones(3), jnp.ones((8, 3)))
      >>> float(loss)
      9.0

    References:
      Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020;
      https://docs.jax.dev/en/latest/notebooks/shard_map.html
    """
    if type(check_every) is not int or check_every < 0:
        raise ValueError(f"check_every={check_every!r}: a number of calls, or 0 for never")
    if not isinstance(axis_name, str):
        raise ValueError(f"axis_name={axis_name!r}: a name, as in jax.lax.pmean(x, 'batch')")
    if compress not in (None, *_COMPRESSIONS):
        raise ValueError(f"compress={compress!r}: gradients can travel as 'bf16' or 'fp16', or as they are (None)")
    if not (bucket_bytes is None or (type(bucket_bytes) is int and bucket_bytes >= 0)):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: a number of bytes, 0 to send each gradient alone")
    if mesh is not None and mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh has axes {mesh.axis_names}; data_parallel needs one, named {AXIS!r}")

    def decorate(step: Callable[..., Any]) -> Any:
        if not callable(step):
            raise TypeError(f"data_parallel decorates a function, not {step!r}")
        calling = Calling(step, _several(static_argnums), _several(static_argnames))
        batch = None if batch_argnums is None else _several(batch_argnums)
        given_up = donate and (donate_argnums is None or calling.named(_several(donate_argnums)))
        decorated = DataParallel(
            step, calling, batch, axis_name, given_up, check_finite, check_every, mesh, bucket_bytes, compress, enabled
        )
        return functools.update_wrapper(decorated, step)

    return decorate if step is None else decorate(step)


class DataParallel(Generic[A, R]):
    """A decorated step. Programs are compiled per structure of arguments; jit does the rest per shape."""

    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> DataParallel:
        made = super().__new__(cls)
        made._made_of = args, kwargs
        return made

    def __init__(
        self,
        step: Callable[A, R],
        calling: Calling,
        batch: tuple[Batch, ...] | None,
        axis_name: str,
        donate: bool | frozenset[str],
        check_finite: bool,
        check_every: int,
        mesh: Mesh | None,
        bucket_bytes: int | None,
        compress: Compression | None,
        enabled: bool,
    ):
        self._step, self._calling, self._batch, self._enabled = step, calling, batch, enabled
        self._bucket_bytes, self._compress = bucket_bytes, compress
        self._axis_name = axis_name
        self._donate, self._mesh = donate, mesh
        self._debugging: debugging.Settings | None = None
        self._check_finite, self._check_every = check_finite, check_every
        name = getattr(step, "__qualname__", type(step).__name__)
        count = next(_names.setdefault(name, itertools.count()))
        self._name = f"{name}#{count}" if count else name
        self._context: Context | None = None
        self._jaxprs: dict[Any, StepJaxpr] = {}
        self._traces: dict[Any, Traced] = {}
        self._programs: dict[Any, Program] = {}
        self._signatures: dict[Any, Signature] = {}
        self._latest: dict[Any, _Latest] = {}
        self._varied: set[Any] = set()  # structures of arguments that come with states of several types
        self._agreed: dict[Any, StepCall] = {}  # what the ranks have compared
        self._numbers: dict[Any, frozenset[int]] = {}  # positions of Python numbers that are constants
        self._has_modules = False  # among the arguments of some call
        self._told = False  # what is gathered
        self._log: commlog.StepLog | None = None

    def __reduce__(self) -> Any:
        """What another process gets: the step of the same module, or (of a notebook) one that is decorated alike."""
        name = getattr(self, "__qualname__", "")
        there = self.__module__ != "__main__" and getattr(sys.modules.get(self.__module__), name, None) is self
        return name if there else (_decorated_alike, self._made_of)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Decorated in a class body: the instance is the first state argument, as for a plain function.
        return self if instance is None else Method(self, instance)

    @api_boundary
    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_traced(args, kwargs) or not self._enabled:
            return self._on_tracers(args, kwargs)
        self._bind_context()
        if on := debugging.settings():
            return self._debug(on, args, kwargs)
        return self._dispatch(args, kwargs)

    def _debug(self, on: debugging.Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call under `jax.disable_jit`, or one that is to say where NaN come from: JAX would look in our code."""
        if not on.disable_jit:
            with jax.debug_nans(False), jax.debug_infs(False):
                self._debugging = on
                try:
                    return self._dispatch(args, kwargs)
                except FloatingPointError as error:
                    found = error
                finally:
                    self._debugging = None
            self._op_by_op(args, kwargs)  # the operation that makes the first one raises
            raise found
        return self._op_by_op(args, kwargs)

    def _op_by_op(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._context is not None
        args, keywords = self._calling.arrange(args, kwargs)
        objects: list[Any] = []
        if modules.found(args):
            args, objects = modules.split(args)
        signature, leaves = self._signature(args, keywords)
        if self._context.size > 1:
            call = self._agreement.enter(self._name)
            self._agree(signature, leaves, [leaves[i] for i in signature.batch])
            signature, _ = self._signer.settle(signature, args, call, self._context)
        plain = lambda *args: with_axis(lambda *xs: run(self._step, xs, signature.keywords), self._axis_name, args)
        result = debugging.op_by_op(plain, signature, leaves, self._placement, self._context)
        return modules.update(objects, result) if objects else result

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keywords: tuple[str, ...] = ()
        if kwargs or not self._calling.plain:
            args, keywords = self._calling.arrange(args, kwargs)
        if not self._has_modules:
            try:
                return self._run(args, keywords)
            except _ModulesError:
                self._has_modules = True
        if not modules.found(args):
            return self._run(args, keywords)
        args, objects = modules.split(args)
        return modules.update(objects, self._run(args, keywords))

    def _run(self, args: tuple[Any, ...], keywords: tuple[str, ...]) -> Any:
        call = self._agreement.enter(self._name)
        try:
            program, state, batch = self._prepare(args, keywords, call)
            try:
                result, found = program(state, batch)
            except OtherTypesError:  # shapes of the state changed, their shardings did not
                program, state, batch = self._prepare(args, keywords, call, other_types=True)
                result, found = program(state, batch)
        except BaseException as error:
            self._agreement.failed(self._name, call, error)
            self._agreed.clear()  # the next call finds out whether it failed on every rank
            self._name_deleted(args, keywords, error)
            raise
        self._agreement.returned(self._name, result)
        if self._log is not None:
            self._log.called(call, program, [*state, *batch])
        if found is not None:
            assert self._mesh is not None
            on = None if self._check_finite else self._debugging
            kinds = (on.nans, on.infs) if on else (True, True)
            finite.examine(program.checked, found, self._mesh, f"step {self._name!r}, call {call}: ", kinds)
        if self._check_every and call % self._check_every == 0:
            assert self._context is not None
            sync.compare(self._context, result, f"check of {self._name} call {call}",
                         f"step {self._name!r}, call {call}: result")  # fmt: skip
        return result

    def _name_deleted(self, args: tuple[Any, ...], keywords: tuple[str, ...], error: BaseException) -> None:
        """XLA's error for an array whose memory another call has taken says neither which nor why."""
        leaves = jax.tree_util.tree_leaves_with_path(args)
        gone = [path for path, x in leaves if isinstance(x, (jax.Array, Padded)) and x.is_deleted()]
        about = isinstance(error, (RuntimeError, ValueError)) and ("deleted" in str(error) or "donated" in str(error))
        if not gone or not about:
            return
        name = self._calling.of(len(args), keywords)[gone[0][0].idx] + jax.tree_util.keystr(gone[0][1:])
        raise RuntimeError(
            f"step {self._name!r}: {name} was deleted: an earlier call of a step, which returned its next value, took "
            "its memory. Go on with what that call returned, or decorate with donate=False"
        ) from error

    def _on_tracers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The plain step; but it must not be compiled as it is in a job of several devices."""
        result = with_axis(functools.partial(self._step, **kwargs), self._axis_name, args)
        if inside_step() or not self._enabled:
            return result
        return jax.tree.map(lambda x: plain_p.bind(x, name=self._name) if isinstance(x, jax.Array) else x, result)

    @api_boundary
    def lower(self, *args: A.args, **kwargs: A.kwargs) -> jax.stages.Lowered:
        """As ``jax.jit(step).lower``: the step for these arguments, not yet compiled. Nothing is sent."""
        return self._ahead("lower", args, kwargs)

    @api_boundary
    def trace(self, *args: A.args, **kwargs: A.kwargs) -> jax.stages.Traced:
        """As ``jax.jit(step).trace``: of the program for all devices. Nothing is sent."""
        return self._ahead("trace", args, kwargs)

    @api_boundary
    def eval_shape(self, *args: A.args, **kwargs: A.kwargs) -> Any:
        """As ``jax.jit(step).eval_shape``: shapes and types of the result. Nothing is sent."""
        self._bind_context()
        arranged, keywords = self._arguments(args, kwargs)
        result = self._traced_as(*self._signature(arranged, keywords)).result()
        return result[0] if any(type(x) is modules.Part for x in arranged) else result

    def clear_cache(self) -> None:
        """As ``jax.jit(step).clear_cache``: forget what was traced and compiled."""
        self._jaxprs.clear()
        self._traces.clear()
        self._programs.clear()
        self._latest.clear()

    def _ahead(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._enabled:
            plain = jax.jit(lambda *xs, **more: with_axis(functools.partial(self._step, **more), self._axis_name, xs))
            return getattr(plain, what)(*args, **kwargs)
        self._bind_context()
        signature, leaves = self._signature(*self._arguments(args, kwargs))
        batch = [leaves[i] for i in signature.batch]
        problem = self._placement.batch_problem([signature.names[i] for i in signature.batch], batch)
        if problem:
            raise ValueError(problem)
        program = self._choose(signature, leaves)
        state = [self._placement.abstract_state(leaves[i], program.layouts[i]) for i in signature.state]
        return program.ahead(what, state, [
            self._placement.abstract_batch(x, how) for x, how in zip(batch, program.batch, strict=True)
        ])  # fmt: skip

    def placed(self, *args: Any, **kwargs: Any) -> Placed | None:
        """The step for these arguments, placed and not compiled; None: on one device. Nothing is sent."""
        self._bind_context()
        assert self._mesh is not None
        program = self._choose(*self._signature(*self._arguments(args, kwargs)))
        return program.place()[0] if self._mesh.size > 1 else None

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """All arguments in order, objects of nnx as their arrays; and the names of those that go by keyword."""
        args, keywords = self._calling.arrange(args, kwargs)
        return modules.split(args)[0] if modules.found(args) else args, keywords

    def _signature(self, args: tuple[Any, ...], keywords: tuple[str, ...]) -> tuple[Signature, list[Any]]:
        """The signature of a call, as of earlier ones or as far as this rank can tell by itself; and its leaves."""
        leaves, tree = jax.tree.flatten(args)
        tree = (tree, keywords) if keywords else tree
        numbers = self._numbers.get(tree, ())
        values = tuple((i, x) for i, x in enumerate(leaves) if not is_array(x) or i in numbers)
        signature = self._signatures.get((tree, values)) or self._signer.describe(args, keywords)
        return signature, signature.data(leaves)

    def _tell(self, call: int, error: Exception) -> None:
        """The other ranks learn of an error that came before the arguments could be compared."""
        assert self._context is not None
        if self._context.size > 1:
            text = f"{type(error).__name__}: {error}"
            with contextlib.suppress(ValueError):  # this rank raises its own
                self._agreement.check(StepCall(self._name), problem=text)

    def _bind_context(self) -> None:
        if self._context is None:
            self._context = get_context()
            self._mesh = self._mesh or self._context.mesh
            self._placement = Placement(self._context, self._mesh)
            self._signer = Signer(self._name, self._calling, self._batch, self._placement, self._jaxpr)
            self._agreement = _agreement(self._context)
            if self._context.is_root and commlog.asked("comm"):
                on_cpu = self._mesh.devices.flat[0].platform == "cpu"
                self._log = commlog.StepLog(self._name, self._mesh.size, on_cpu)

    def _prepare(
        self, args: tuple[Any, ...], keywords: tuple[str, ...], call: int, other_types: bool = False
    ) -> tuple[Any, list[Any], list[Any]]:
        """The program for these arguments, and their leaves on the mesh.

        Args:
          args: of the step.
          keywords: names of the last arguments.
          call: its number.
          other_types: the call was entered for a program that takes other types than these.
        """
        try:
            leaves, tree = jax.tree.flatten(args)
            tree = (tree, keywords) if keywords else tree
            if other_types:  # two models take turns, say: from now on their types are looked at before a call
                self._varied.add(tree)
            key = (tree, _types(leaves)) if self._varied and tree in self._varied else tree
            if other_types:
                self._latest.pop(tree, None)
                self._latest.pop(key, None)
            latest = self._latest.get(key)
            if latest is None:
                if not self._has_modules and modules.found(args):
                    raise _ModulesError
                latest = _Latest([None] * len(leaves))
            strangers = latest.strangers(leaves, self._placement)
            numbers = self._numbers.get(tree, ())
            constants = [i for i in strangers if not is_array(leaves[i]) or i in numbers]
            values = tuple((i, leaves[i]) for i in constants)
            fresh = False
            if latest.program is None or latest.constants != values:
                latest = None
                signature = self._signatures.get((tree, values))
                if signature is None:
                    fresh, signature = True, self._signer.describe(args, keywords)
                    if signature.numbers:
                        self._numbers[tree] = signature.numbers
                        constants = [i for i, x in enumerate(leaves) if not is_array(x) or i in signature.numbers]
                        values = tuple((i, leaves[i]) for i in constants)
            else:
                signature = latest.signature
        except _ModulesError:
            raise
        except Exception as error:
            self._tell(call, error)
            raise
        if constants:
            gone = set(constants)
            moved = list(itertools.accumulate(int(i not in gone) for i in range(len(leaves))))
            strangers = [moved[i] - 1 for i in strangers if i not in gone]
            leaves = [x for i, x in enumerate(leaves) if i not in gone]

        differs: dict[int, list[int]] | None = None
        if fresh:
            assert self._context is not None
            if self._context.size > 1:
                self._agree(signature, leaves, [leaves[i] for i in signature.batch])
                signature, differs = self._signer.settle(signature, args, call, self._context)
            self._signatures[tree, values] = signature
        batch = [leaves[i] for i in signature.batch]
        known = (signature, trace_settings(), self._debugging, *map(self._placement.batch_key, batch))
        if key is not tree:
            known += key
        if latest is not None and latest.known != known:
            latest = None
        program = latest and latest.program
        changed = program is None or any(not signature.is_batch[i] for i in strangers)
        what = self._agreed.get(known)
        if other_types:  # the others find the same, or that this rank traces a program which they don't
            self._agreement.corrected(self._agreed.setdefault(known, self._kind_of_call(signature, batch)))
        elif what is None or (changed and self._unplaced(signature, leaves)) or not self._agreement.known(call, what):
            what = self._agreed.setdefault(known, self._agree(signature, leaves, batch))
            self._agreement.compared(call, what)
        if changed:
            program = self._choose(signature, leaves)
            self._place(program, leaves, call, differs)
            self._latest[key] = _Latest(_expected(program, constants), program, signature, values, known)
        assert program is not None
        state = list(signature.pick_state(leaves))
        for i in program.padded:
            state[i] = state[i].array
        if any(map(_is_deleted, state)):
            raise RuntimeError("Array has been deleted")
        if program.donates and len(set(map(id, state))) < len(state):
            state = _without_aliases(state)
        return program, state, self._placement.batch_argument(batch, program.batch)

    def _unplaced(self, signature: Signature, leaves: Sequence[Any]) -> bool:
        return any(self._placement.layout(leaves[i]) is ELSEWHERE for i in signature.state)

    def _choose(self, signature: Signature, leaves: Sequence[Any]) -> Program:
        """The program for leaves that come as these do: in shards stays in shards, the rest is as the step wants it."""
        assert self._mesh is not None
        assert self._context is not None
        trace = self._traced_as(signature, leaves)
        layouts: list[Any] = list(trace.layouts)
        for i in signature.state:
            how = self._placement.layout(leaves[i])
            layouts[i] = how if isinstance(how, Layout) else layouts[i]
        key = (trace, *layouts)
        if key not in self._programs:
            communicator, mesh = self._context.rules or self._context.communicator, self._mesh
            self._programs[key] = self._program(
                trace, signature, self._signer.types(signature, leaves), layouts, mesh, communicator, self._traced
            )
        return self._programs[key]

    def _jaxpr(self, signature: Signature, types: Sequence[Any]) -> StepJaxpr:
        """The step for leaves of these types, traced once."""
        call = (signature.tree, signature.keywords, signature.numbers)
        key = (call, trace_settings(), self._debugging, *((a.shape, a.dtype, a.weak_type) for a in types))
        if key not in self._jaxprs:
            assert self._mesh is not None
            check = self._check_finite or self._debugging is not None
            self._jaxprs[key] = jaxpr_of(self._step, signature, types, self._mesh, self._axis_name, check)
        return self._jaxprs[key]

    def _traced_as(self, signature: Signature, leaves: Sequence[Any]) -> Traced:
        assert self._mesh is not None
        types = self._signer.types(signature, leaves)
        step = self._jaxpr(signature, types)
        key = (signature, id(step))
        if key not in self._traces:
            self._traces[key] = traced(step, signature, types, self._mesh)
        return self._traces[key]

    def _program(
        self,
        trace: Traced,
        signature: Signature,
        avals: Sequence[Any],
        layouts: Sequence[Layout | None],
        mesh: Mesh,
        communicator: str | Rules,
        told: Any = None,
    ) -> Program:
        allowed = self._donate
        donate = [  # an error must not cost the state
            i for _, at, name in signature.arguments for i in at
            if not trace.checked and (allowed if isinstance(allowed, bool) else name in allowed)
        ]  # fmt: skip
        bucket_bytes = self._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(communicator, mesh)
        compress = _COMPRESSIONS[self._compress] if self._compress else None
        name = getattr(self._step, "__name__", "step")
        return Program(trace, signature, avals, layouts, mesh, communicator, donate, bucket_bytes, compress, told, name)

    def ahead(self, mesh: Mesh, args: tuple[Any, ...], level: int | None = None, scale: float = 1) -> Ahead:
        """The step for other devices than this job's, which need not be here; nothing is sent, no array is made.

        Args:
          mesh: of them.
          args: arrays or `jax.ShapeDtypeStruct`s; those of the batch with the examples of all devices together.
          level: of ZeRO, in place of that which the step says.
          scale: times as many examples as those of the batch.

        Raises:
          ValueError: the batch can't be divided over the devices.
        """
        self._bind_context()
        signature, leaves = self._signature(*self._arguments(args, {}))
        avals = [abstract(x) for x in leaves]
        for i in signature.batch if scale != 1 else ():
            shape = avals[i].shape
            avals[i] = jax.ShapeDtypeStruct((round(shape[0] * scale), *shape[1:]), avals[i].dtype)
        names = [signature.names[i] for i in signature.batch]
        if problem := batch_problem(names, [avals[i] for i in signature.batch], [1] * len(names)):
            raise ValueError(problem)
        step = jaxpr_of(self._step, signature, avals, mesh, self._axis_name, self._check_finite)
        trace = traced(step, signature, avals, mesh, level)
        layouts = list(trace.layouts)
        for i in signature.state:
            if in_shards(leaves[i]):
                layouts[i] = layouts[i] or choose(avals[i].shape, mesh.size)
        program = self._program(trace, signature, avals, layouts, mesh, "xla")
        splits = dict(zip(signature.batch, program.batch, strict=True))
        held = []
        for i, (a, how) in enumerate(zip(avals, layouts, strict=True)):
            split = NamedSharding(mesh, P(AXIS)) if i in splits else sharding(mesh, how)
            shape = how.physical(a.shape) if how else a.shape
            if i in splits:
                shape = (splits[i].chunk * mesh.size, *shape[1:])
            held.append(jax.ShapeDtypeStruct(shape, a.dtype, sharding=split, weak_type=a.weak_type))
        lowered = program.ahead("lower", [held[i] for i in signature.state], [held[i] for i in signature.batch])
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held]
        roles = [*map(trace.marks.roles.get, range(len(held)))]
        return Ahead(lowered, frozenset(trace.marks.levels), "parameter" in roles, tuple(
            Held(name, "batch" if is_batch else role or "", size)
            for name, is_batch, role, size in zip(signature.names, signature.is_batch, roles, sizes, strict=True)
        ))  # fmt: skip

    def _traced(self, program: ClosedJaxpr, placed: Placed | None) -> None:
        """A program is about to be compiled."""
        from jaxdist.explain import table  # it decorates steps

        assert self._context is not None
        self._agreement.traced(self._name, program, functools.partial(constants, program))
        if self._log is not None:
            self._log.traced(program)
        if placed is None or not self._context.is_root:
            return
        if commlog.asked("placements"):
            commlog.say(f"step {self._name!r}:\n{table(report.rows(placed))}", "placements")
        elif not self._told and (text := report.warning(placed)):
            self._told = True
            _log.warning("step %r: %s", self._name, text)

    def _place(self, program: Program, leaves: list[Any], call: int, differs: dict[int, list[int]] | None) -> None:
        """Bring the state's leaves to where `program` takes them; `differs`: as of `Signer.settle`, if it was asked."""
        elsewhere = [i for i in program.signature.state if self._placement.layout(leaves[i]) is not program.layouts[i]]
        if not elsewhere:
            return
        self._compare(program, elsewhere, leaves, call, differs)
        placed = self._placement.place_state([leaves[i] for i in elsewhere], [program.layouts[i] for i in elsewhere])
        for i, x in zip(elsewhere, placed, strict=True):
            leaves[i] = x

    def _compare(
        self,
        program: Program,
        elsewhere: Sequence[int],
        leaves: Sequence[Any],
        call: int,
        differs: dict[int, list[int]] | None,
    ) -> None:
        """The root's state is everyone's: what the step only reads must be the same everywhere, and else it is said."""
        context = self._context
        assert context is not None
        read, names = set(program.unreturned()).intersection(elsewhere), program.signature.names
        if context.size == 1 or (differs is None and not read):
            return
        if differs is None:
            mine = {i: checksum(leaves[i]) for i in sorted(read)}
            everyone = context.control.exchange(
                f"read-only state of step {self._name}, call {call}", mine, context.timeout
            )
            differs = {
                i: others for i, own in everyone[0].items()
                if (others := [rank for rank, theirs in enumerate(everyone) if theirs.get(i) != own])
            }  # fmt: skip
        for i in sorted(read & differs.keys()):
            raise ValueError(
                f"step {self._name!r}: state leaf {names[i]} is not the same on rank 0 and rank "
                f"{list_ranks(differs[i])}, and the step does not return it. If each rank has its own part of it, it "
                "belongs to the batch: name its argument in batch_argnums"
            )
        differ = [i for i in elsewhere if i in differs]
        if differ and context.is_root:
            also = f" (and {len(differ) - 1} other leaves)" if len(differ) > 1 else ""
            _log.warning(
                "step %r: state leaf %s%s is not the same on rank 0 and rank %s: all go on with that of rank 0",
                self._name, names[differ[0]], also, list_ranks(differs[differ[0]]),
            )  # fmt: skip

    def _kind_of_call(self, signature: Signature, batch: Sequence[Any]) -> StepCall:
        names = [signature.names[i] for i in signature.batch]
        return StepCall(self._name, tuple(zip(names, map(_type_of, batch), strict=True)))

    def _agree(self, signature: Signature, leaves: Sequence[Any], batch: Sequence[Any]) -> StepCall:
        """Compare what this rank comes with and what the others do."""
        names = [signature.names[i] for i in signature.batch]
        problem = self._placement.batch_problem(names, batch)
        entries: list[tuple[str, str]] = []
        for name, is_batch, x in zip(signature.names, signature.is_batch, leaves, strict=True):
            kind = _type_of(x)
            if is_batch:
                entries.append((f"batch leaf {name}", kind))
                continue
            how = self._placement.layout(x)
            where = "" if how is ELSEWHERE else " on the mesh" if how is None else f" in shards along axis {how.dim}"
            entries.append((f"state leaf {name}", kind + where))
            if not problem and (stranger := self._placement.stranger(x)):
                problem = f"state leaf {name} {stranger}"
        what = self._kind_of_call(signature, batch)
        self._agreement.check(what, tuple(entries), problem)
        return what


class Method(Generic[R]):
    """A decorated step of a class, of one of its objects."""

    def __init__(self, step: DataParallel[Any, R], instance: Any):
        self.step, self.instance = step, instance
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self.step(self.instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(self.step, name), self.instance)


class _ModulesError(Exception):
    """There are objects of nnx among the arguments."""


class Held(NamedTuple):
    """An argument of a step, as a device holds it.

    Attributes:
      name: of the leaf.
      role: ``"batch"``, what `jaxdist.zero` is given it as (``"state"``, ``"parameter"``), or ``""``.
      bytes: on a device.
    """

    name: str
    role: str
    bytes: int


@dataclass(frozen=True)
class Ahead:
    """A step for devices that need not be here.

    Attributes:
      lowered: as of ``jax.jit(step).lower``.
      levels: of the uses of `jaxdist.zero` in the step, as it was written.
      knows_parameters: whether `jaxdist.zero` is told which arguments are the parameters.
      arguments: of the step.
    """

    lowered: Any
    levels: frozenset[int]
    knows_parameters: bool
    arguments: tuple[Held, ...]


@dataclass
class _Latest:
    """What a step was last called with, for arguments of one structure.

    Attributes:
      expected: for each leaf how it is kept on the mesh; `_NEITHER` for those of the batch and constants.
      constants: the leaves that are no arrays.
      known: structure and types of what the ranks have agreed on.
    """

    expected: Sequence[Any]
    program: Program | None = None
    signature: Any = None
    constants: tuple[Any, ...] = ()
    known: Any = None
    _shardings: Sequence[Any] | None = None
    _strangers: Sequence[int] = ()

    @functools.cached_property
    def _pick_state(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        return picker([i for i, how in enumerate(self.expected) if how is not _NEITHER])

    def strangers(self, leaves: Sequence[Any], placement: Placement) -> Sequence[int]:
        """Positions of the leaves that are not kept as expected, all those of the batch and constants among them."""
        try:  # in the steady state one look at each leaf of the state, and no line of Python
            shardings = list(map(sharding_of, self._pick_state(leaves)))
        except AttributeError:  # a leaf that is not on any device
            return placement.misplaced(leaves, self.expected)
        if self._shardings is None or not all(map(operator.is_, shardings, self._shardings)):
            self._strangers, self._shardings = placement.misplaced(leaves, self.expected), shardings
        return self._strangers


def _type_of(x: Any) -> str:
    # As it travels: with jax_enable_x64 on one rank alone float64 of NumPy is not the same everywhere.
    dtype = (
        jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True) if hasattr(x, "dtype") else type(x).__name__
    )
    kind = f"{dtype}[{','.join(map(str, np.shape(x)))}]"
    return kind + (f" of {x.total} in all" if isinstance(x, Part) else "")


def _types(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.shape, x.dtype, getattr(x, "weak_type", None)) if is_array(x) else None for x in leaves)


def _expected(program: Program, constants: Sequence[int]) -> list[Any]:
    signature = program.signature
    expected = [_NEITHER if b else how for b, how in zip(signature.is_batch, program.layouts, strict=True)]
    for i in constants:
        expected.insert(i, _NEITHER)
    return expected


_NEITHER = object()
_is_deleted = operator.methodcaller("is_deleted")


def _agreement(context: Context) -> Agreement:
    """The one of this job."""
    agreement = getattr(context, "agreement", None)
    if agreement is None:
        agreement = context.agreement = Agreement(context)  # type: ignore[attr-defined]
    return agreement


def _several(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, (int, str)) else tuple(given)


def _without_aliases(state: list[Any]) -> list[Any]:
    """Donating one buffer twice is an error: the second reference (an average that starts as the weights) is copied."""
    seen: set[int] = set()
    out = []
    for x in state:
        twin = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        out.append(jnp.copy(x) if twin else x)
    return out


def _decorated_alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return functools.update_wrapper(DataParallel(*args, **kwargs), args[0])


def _is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether jax is tracing: under `jax.grad`, `jax.eval_shape`, inside another step."""
    return inside_step() or (
        not trace_state_clean() and any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
    )
