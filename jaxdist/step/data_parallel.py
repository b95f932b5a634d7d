"""`data_parallel`: run a train step that was written for one device on all of them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import commlog, finite, sync
from jaxdist.communicators import default_bucket_bytes
from jaxdist.compat import sharding_of
from jaxdist.context import Context, get_context
from jaxdist.step.agree import Agreement, Description
from jaxdist.step.layouts import Layout, choose, sharding
from jaxdist.step.passes.shards import Gathered
from jaxdist.step.placement import ELSEWHERE, Placement, abstract, batch_problem, in_shards
from jaxdist.step.primitives import AXIS, Op
from jaxdist.step.program import Program, Signature, Static, Traces, is_array, picker

F = TypeVar("F", bound=Callable[..., Any])

Compression = Literal["bf16", "fp16"]
_COMPRESSIONS = {"bf16": "bfloat16", "fp16": "float16"}

_log = logging.getLogger("jaxdist")
_names: dict[str, itertools.count[int]] = {}


@overload
def data_parallel(
    step: F,
    *,
    batch_argnums: int | Sequence[int] = ...,
    reduce: Op = ...,
    donate: bool = ...,
    check_finite: bool = ...,
    check_every: int = ...,
    bucket_bytes: int | None = ...,
    compress: Compression | None = ...,
    enabled: bool = ...,
    mesh: Mesh | None = ...,
) -> F: ...
@overload
def data_parallel(
    *,
    batch_argnums: int | Sequence[int] = ...,
    reduce: Op = ...,
    donate: bool = ...,
    check_finite: bool = ...,
    check_every: int = ...,
    bucket_bytes: int | None = ...,
    compress: Compression | None = ...,
    enabled: bool = ...,
    mesh: Mesh | None = ...,
) -> Callable[[F], F]: ...
def data_parallel(
    step: Callable[..., Any] | None = None,
    *,
    batch_argnums: int | Sequence[int] = -1,
    reduce: Op = "mean",
    donate: bool = True,
    check_finite: bool = False,
    check_every: int = 0,
    bucket_bytes: int | None = None,
    compress: Compression | None = None,
    enabled: bool = True,
    mesh: Mesh | None = None,
) -> Any:
    """Run a pure train step, written for one device, on every device of the job.

    The step computes what it would have computed on one device with the whole batch: each device runs it on its part
    of the batch, gradients of ``jax.grad`` with respect to the state are averaged over the devices, and the new state
    is the same on each (proved when the step is traced, or an error).

    * Each process passes ITS part of the batch (arrays of any kind; the parts are concatenated in rank order), or an
      array that is global already. The parts must have the same shapes.
    * All other arguments are state: any number of pytrees. State that is not on the mesh yet is taken from the root
      rank. A leaf that is no array is a constant of the program.
    * What comes back: the parts of the result that have the structure, shapes and dtypes of a state argument are its
      next value, as global arrays, the same on each device. State that the step computed from local data as a running
      average, ``a * old + b`` (BatchNorm's), is averaged over the devices; any other is refused. Of the rest (aux
      values) what differs between devices is averaged if it is a floating scalar, summed if an integer scalar, and
      concatenated along axis 0 otherwise.

    Inside the step the mesh axis ``"data"`` can be named: ``jax.lax.pmean(x, "data")``, say, or
    ``BatchNorm(axis_name="data")``.

    Args:
      step: ``(*state, batch) -> result``, pure, jit-compatible.
      batch_argnums: position(s) of the batch among the arguments; ``()`` for none.
      reduce: ``"mean"`` if the loss is a mean over the batch; ``"sum"`` if it is a sum (then floating aux scalars are
        summed as well).
      donate: let the new state reuse the memory of the old one, which can't be used afterwards. State that was not on
        the mesh yet is copied and stays usable.
      check_finite: after each call look for NaN and infinity in the result (and what `jaxdist.check_finite` names
        inside the step) and raise, on every rank, naming the first such leaf. Waits for the step to end; the state is
        not donated, so that the one given is still there after the error.
      check_every: after so many calls, and again after as many, compare what the result holds whole on each device,
        bit for bit, over all devices and ranks, as `jaxdist.check_sync` does, and raise on every rank. Waits for that
        step to end. 0: never.
      bucket_bytes: gradients of one dtype travel together in messages of about so many bytes; a larger one travels
        alone. 0: each travels alone. Default: by measurement, see ``jaxdist.communicators.default_bucket_bytes``.
      compress: ``"bf16"`` or ``"fp16"``: wider floating gradients are cast to it on the wire, half the bytes of
        float32. Between CPU processes each device's part is rounded, the parts are added in float32 and their mean is
        rounded again: a relative error of at most 2**-8 (bf16; 2**-10 fp16) of the mean of the parts' magnitudes. On
        GPUs NCCL rounds each partial sum as well. The optimizer sees the gradient's own dtype. Losses, aux values and
        collectives of your own are not compressed.
      enabled: False returns the step itself.
      mesh: the devices to use, one axis named ``"data"``; default: all of the job.

    Returns:
      A function of the same arguments. Its attribute ``lower(*args)`` is that of ``jax.jit``.

    Raises:
      ValueError: (on every rank) a batch that can't be divided over the devices, or ranks whose arguments differ.
      StepError: (when first called) a result would differ between devices.
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
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce={reduce!r}: the losses of the devices are combined by 'mean' or 'sum'")
    if compress not in (None, *_COMPRESSIONS):
        raise ValueError(f"compress={compress!r}: gradients can travel as 'bf16' or 'fp16', or as they are (None)")
    if not (bucket_bytes is None or (type(bucket_bytes) is int and bucket_bytes >= 0)):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: a number of bytes, 0 to send each gradient alone")
    if mesh is not None and mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh has axes {mesh.axis_names}; data_parallel needs one, named {AXIS!r}")

    def decorate(step: Callable[..., Any]) -> Any:
        if not callable(step):
            raise TypeError(f"data_parallel decorates a function, not {step!r}")
        if not enabled:
            return step
        argnums = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
        return functools.update_wrapper(
            DataParallel(step, argnums, reduce, donate, check_finite, check_every, mesh, bucket_bytes, compress), step
        )

    return decorate if step is None else decorate(step)


class DataParallel:
    """A decorated step. Programs are compiled per structure of arguments; jit does the rest per shape."""

    def __init__(
        self,
        step: Callable[..., Any],
        argnums: tuple[int, ...],
        op: Op,
        donate: bool,
        check_finite: bool,
        check_every: int,
        mesh: Mesh | None,
        bucket_bytes: int | None,
        compress: Compression | None,
    ):
        self._step, self._argnums = step, argnums
        self._bucket_bytes, self._compress = bucket_bytes, compress
        self._op: Op = op
        self._donate, self._mesh = donate, mesh
        self._check_finite, self._check_every = check_finite, check_every
        name = getattr(step, "__qualname__", type(step).__name__)
        count = next(_names.setdefault(name, itertools.count()))
        self._name = f"{name}#{count}" if count else name
        self._context: Context | None = None
        self._traces: dict[Signature, Traces] = {}
        self._programs: dict[Any, Program] = {}
        self._signatures: dict[Any, Signature] = {}
        self._latest: dict[Any, _Latest] = {}
        self._agreed: set[Any] = set()
        self._told = False  # what is gathered
        self._log: commlog.StepLog | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # Decorated in a class body: the instance is the first state argument, as for a plain function.
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._bind_context()
        call = self._agreement.enter(self._name)
        try:
            program, state, batch = self._prepare(args, kwargs, call)
            result, found = program(state, batch)
        except BaseException as error:
            self._agreement.failed(self._name, call, error)
            self._agreed.clear()  # the next call finds out whether it failed on every rank
            raise
        self._agreement.returned(self._name, result)
        if self._log is not None:
            self._log.called(call, program, [*state, *batch])
        if found is not None:
            assert self._mesh is not None
            finite.examine(program.checked, found, self._mesh, f"step {self._name!r}, call {call}: ")
        if self._check_every and call % self._check_every == 0:
            assert self._context is not None
            sync.compare(self._context, result, f"check of {self._name} call {call}",
                         f"step {self._name!r}, call {call}: result")  # fmt: skip
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(step).lower``: the step for these arguments, not yet compiled. Nothing is sent."""
        self._bind_context()
        args = _positional(self._step, args, kwargs) if kwargs else args
        signature = self._describe(args)
        leaves = [x for x in jax.tree.leaves(args) if is_array(x)]
        batch = [leaves[i] for i in signature.batch]
        problem = self._placement.batch_problem([signature.names[i] for i in signature.batch], batch)
        if problem:
            raise ValueError(problem)
        program = self._choose(signature, leaves)
        state = [self._placement.abstract_state(leaves[i], program.layouts[i]) for i in signature.state]
        return program.lower(state, [self._placement.abstract_batch(x) for x in batch])

    def _tell(self, call: int, error: Exception) -> None:
        """The other ranks learn of an error that came before the arguments could be compared."""
        assert self._context is not None
        if self._context.size > 1:
            with contextlib.suppress(ValueError):  # this rank raises its own
                self._agreement.check(self._name, call, Description((), f"{type(error).__name__}: {error}"))

    def _bind_context(self) -> None:
        if self._context is None:
            self._context = get_context()
            self._mesh = self._mesh or self._context.mesh
            self._placement = Placement(self._context, self._mesh)
            self._agreement = _agreement(self._context)
            if self._context.is_root and commlog.asked():
                on_cpu = self._mesh.devices.flat[0].platform == "cpu"
                self._log = commlog.StepLog(self._name, self._mesh.size, on_cpu)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: int) -> tuple[Any, list[Any], list[Any]]:
        """The program for these arguments, and their leaves on the mesh."""
        try:
            if kwargs:
                args = _positional(self._step, args, kwargs)
            leaves, tree = jax.tree.flatten(args)
            latest = self._latest.get(tree) or _Latest([None] * len(leaves))
            strangers = latest.strangers(leaves, self._placement)
            constants = [i for i in strangers if not is_array(leaves[i])]
            values = tuple((i, leaves[i]) for i in constants)
            if latest.program is None or latest.constants != values:
                latest = None
                signature = self._signatures.get((tree, values))
                if signature is None:
                    signature = self._signatures[tree, values] = self._describe(args)
            else:
                signature = latest.signature
        except Exception as error:
            self._tell(call, error)
            raise
        if constants:
            gone = set(constants)
            moved = list(itertools.accumulate(int(i not in gone) for i in range(len(leaves))))
            strangers = [moved[i] - 1 for i in strangers if i not in gone]
            leaves = [x for i, x in enumerate(leaves) if i not in gone]

        program = latest and latest.program
        changed = program is None or any(not signature.is_batch[i] for i in strangers)
        batch = [leaves[i] for i in signature.batch]
        known = (signature, *((np.shape(x), getattr(x, "dtype", None)) for x in batch))
        commit = functools.partial(self._agreement.commit, self._name, call)
        if known not in self._agreed or (changed and self._unplaced(signature, leaves)) or not commit():
            self._agree(signature, leaves, batch, call)
            self._agreed.add(known)
            commit()
        if changed:
            program = self._choose(signature, leaves)
            self._place(program, leaves)
            self._latest[tree] = _Latest(_expected(program, constants), program, signature, values)
        assert program is not None
        state = list(signature.pick_state(leaves))
        for i in program.padded:
            state[i] = state[i].array
        if self._donate and len(set(map(id, state))) < len(state):
            state = _without_aliases(state)
        return program, state, self._placement.batch_argument(batch)

    def _unplaced(self, signature: Signature, leaves: Sequence[Any]) -> bool:
        return any(self._placement.layout(leaves[i]) is ELSEWHERE for i in signature.state)

    def _choose(self, signature: Signature, leaves: Sequence[Any]) -> Program:
        """The program for leaves that come as these do: in shards stays in shards, the rest is as the step wants it."""
        assert self._mesh is not None
        assert self._context is not None
        placement = self._placement
        if signature not in self._traces:
            self._traces[signature] = Traces(self._step, signature, self._mesh, self._check_finite)
        traces = self._traces[signature]
        avals = [
            placement.abstract_batch(x) if batch else abstract(x)
            for x, batch in zip(leaves, signature.is_batch, strict=True)
        ]
        layouts: list[Any] = traces.homes(avals)
        for i in signature.state:
            how = placement.layout(leaves[i])
            layouts[i] = how if isinstance(how, Layout) else layouts[i]
        key = (signature, *layouts)
        if key not in self._programs:
            donate = self._donate and not traces(avals).checked  # an error must not cost the state
            self._programs[key] = self._program(traces, layouts, self._context.communicator, donate, self._traced)
        return self._programs[key]

    def _program(
        self, traces: Traces, layouts: Sequence[Layout | None], communicator: str, donate: bool, told: Any = None
    ) -> Program:
        bucket_bytes = self._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(communicator, traces.mesh)
        compress = _COMPRESSIONS[self._compress] if self._compress else None
        return Program(traces, layouts, self._op, communicator, donate, bucket_bytes, compress, told)

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
        signature = self._describe(args)
        leaves = [x for x in jax.tree.leaves(args) if is_array(x)]
        avals = [abstract(x) for x in leaves]
        for i in signature.batch if scale != 1 else ():
            shape = avals[i].shape
            avals[i] = jax.ShapeDtypeStruct((round(shape[0] * scale), *shape[1:]), avals[i].dtype)
        names = [signature.names[i] for i in signature.batch]
        if problem := batch_problem(names, [avals[i] for i in signature.batch], [mesh.size] * len(names)):
            raise ValueError(problem)
        traces = Traces(self._step, signature, mesh, self._check_finite, level)
        layouts = traces.homes(avals)
        for i in signature.state:
            if in_shards(leaves[i]):
                layouts[i] = layouts[i] or choose(avals[i].shape, mesh.size)
        traced = traces(avals)
        held = []
        for a, how, is_batch in zip(avals, layouts, signature.is_batch, strict=True):
            split = NamedSharding(mesh, P(AXIS)) if is_batch else sharding(mesh, how)
            shape = how.physical(a.shape) if how else a.shape
            held.append(jax.ShapeDtypeStruct(shape, a.dtype, sharding=split, weak_type=a.weak_type))
        program = self._program(traces, layouts, "xla", self._donate and not traced.checked)
        lowered = program.lower([held[i] for i in signature.state], [held[i] for i in signature.batch])
        sizes = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held]
        roles = [*map(traced.roles.get, range(len(held)))]
        return Ahead(lowered, traced.levels, "parameter" in traced.roles.values(), tuple(
            Held(name, "batch" if is_batch else role or "", size)
            for name, is_batch, role, size in zip(signature.names, signature.is_batch, roles, sizes, strict=True)
        ))  # fmt: skip

    def _traced(self, program: ClosedJaxpr, gathered: Sequence[Gathered]) -> None:
        """A program is about to be compiled."""
        assert self._context is not None
        self._agreement.traced(self._name, program)
        if self._log is not None:
            self._log.traced(program)
        if gathered and self._context.is_root and not self._told:
            self._told = True
            sizes: dict[str, int] = {}
            for one in gathered:
                sizes[one.primitive] = sizes.get(one.primitive, 0) + one.bytes
            what = ", ".join(f"{name} ({size / 1e6:.3g} MB)" for name, size in sizes.items())
            _log.warning(
                "step %r: each call gathers whole arrays from their shards for what can't be computed on shards: %s",
                self._name,
                what,
            )

    def _place(self, program: Program, leaves: list[Any]) -> None:
        """Bring the state's leaves to where `program` takes them."""
        elsewhere = [i for i in program.signature.state if self._placement.layout(leaves[i]) is not program.layouts[i]]
        placed = self._placement.place_state([leaves[i] for i in elsewhere], [program.layouts[i] for i in elsewhere])
        for i, x in zip(elsewhere, placed, strict=True):
            leaves[i] = x

    def _describe(self, args: tuple[Any, ...]) -> Signature:
        argnums = set()
        for n in self._argnums:
            if not -len(args) <= n < len(args):
                raise TypeError(
                    f"step {self._name!r} got {len(args)} arguments, and batch_argnums={self._argnums} names one that "
                    "is not there: pass the batch, or batch_argnums=() if the step has none"
                )
            argnums.add(n % len(args))
        for n in sorted(argnums):
            for path, leaf in jax.tree_util.tree_leaves_with_path(args[n]):
                if not is_array(leaf):
                    name = _parameter_names(self._step, len(args))[n] + jax.tree_util.keystr(path)
                    raise TypeError(
                        f"batch leaf {name} is {leaf!r}, not an array: what is not one entry an example belongs to "
                        "the state, or batch_argnums names the wrong argument"
                    )
        marked = jax.tree.map(lambda leaf: leaf if is_array(leaf) else Static(leaf), args)
        paths, tree = jax.tree_util.tree_flatten_with_path(marked)
        parameters = _parameter_names(self._step, len(args))
        positions = tuple(path[0].idx for path, _ in paths)
        names = tuple(
            parameters[p] + jax.tree_util.keystr(path[1:]) for p, (path, _) in zip(positions, paths, strict=True)
        )
        return Signature(tree, tuple(p in argnums for p in positions), names)

    def _agree(self, signature: Signature, leaves: Sequence[Any], batch: Sequence[Any], call: int) -> None:
        names = [signature.names[i] for i in signature.batch]
        problem = self._placement.batch_problem(names, batch)
        entries: list[tuple[str, str]] = []
        for name, is_batch, x in zip(signature.names, signature.is_batch, leaves, strict=True):
            kind = f"{getattr(x, 'dtype', type(x).__name__)}[{','.join(map(str, np.shape(x)))}]"
            if is_batch:
                entries.append((f"batch leaf {name}", kind))
                continue
            how = self._placement.layout(x)
            where = "" if how is ELSEWHERE else " on the mesh" if how is None else f" in shards along axis {how.dim}"
            entries.append((f"state leaf {name}", kind + where))
            if not problem and (stranger := self._placement.stranger(x)):
                problem = f"state leaf {name} {stranger}"
        self._agreement.check(self._name, call, Description(tuple(entries), problem))


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
    """

    expected: Sequence[Any]
    program: Program | None = None
    signature: Any = None
    constants: tuple[Any, ...] = ()
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


def _expected(program: Program, constants: Sequence[int]) -> list[Any]:
    signature = program.signature
    expected = [_NEITHER if b else how for b, how in zip(signature.is_batch, program.layouts, strict=True)]
    for i in constants:
        expected.insert(i, _NEITHER)
    return expected


_NEITHER = object()


def _agreement(context: Context) -> Agreement:
    """The one of this job."""
    agreement = getattr(context, "agreement", None)
    if agreement is None:
        agreement = context.agreement = Agreement(context)  # type: ignore[attr-defined]
    return agreement


def _positional(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    bound = inspect.signature(step).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(
            f"a decorated step takes positional arguments; {sorted(bound.kwargs)} can only be passed by keyword"
        )
    return bound.args


def _parameter_names(step: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        names = []
    return [names[i] if i < len(names) else f"argument {i}" for i in range(count)]


def _without_aliases(state: list[Any]) -> list[Any]:
    """Donating one buffer twice is an error: the second reference (an average that starts as the weights) is copied."""
    seen: set[int] = set()
    out = []
    for x in state:
        twin = isinstance(x, jax.Array) and id(x) in seen
        seen.add(id(x))
        out.append(jnp.copy(x) if twin else x)
    return out
