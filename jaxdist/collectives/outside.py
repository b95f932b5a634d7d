"""Collectives between processes, outside a step: the ranks agree on the call, then run a program.

The program is a function of `jaxdist.collectives.in_step`, over one device per process.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.agreement.description import Description, difference
from jaxdist.agreement.ledger import Entry, Ledger
from jaxdist.agreement.turns import Turns
from jaxdist.collectives import in_step
from jaxdist.collectives.arguments import checked, describe, flat, text
from jaxdist.collectives.mpi import HostMpi, reduces
from jaxdist.communicators import lowering
from jaxdist.errors import ControlError, in_words
from jaxdist.ir.interpreter import retrace
from jaxdist.mesh import AXIS
from jaxdist.runtime import gloo
from jaxdist.runtime.context import Context, get_context

_ADVICE = "Nothing was sent. Every rank must pass the same shapes and dtypes"
_LINEAR = ("allreduce", "allgather", "reduce_scatter", "all_to_all")


def collective(kind: str, tree: Any, arguments: dict[str, Any]) -> Any:
    """Run a collective, and return this process's result with the structure of the tree."""
    outside = get_context().only(Outside)
    leaves, structure = jax.tree.flatten(tree)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
    if not traced or kind not in _LINEAR or arguments.get("op", "sum") not in ("sum", "avg"):
        return outside.run(kind, tree, arguments)

    # `jax.grad` traces some leaves, and passes their values to these functions.
    def forward(xs: list[Any]) -> list[Any]:
        given = dict(zip(traced, xs, strict=True))
        whole = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.leaves(outside.run(kind, jax.tree.unflatten(structure, whole), arguments))

    def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        types = tuple((leaves[i].shape, leaves[i].dtype) for i in traced)
        return (outside.run(kind, [cotangents[i] for i in traced], arguments, types),)

    function = jax.custom_vjp(forward)
    function.defvjp(lambda xs: (forward(xs), None), backward)
    return jax.tree.unflatten(structure, function([leaves[i] for i in traced]))


Program = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class _Plan(NamedTuple):
    """The facts about a call that follow from its arguments and types."""

    description: Description
    members: tuple[int, ...]  # the ranks that exchange with this one
    root: int | None  # the only rank that gets the result; others keep their arrays
    op: str  # MPI's operation on host memory, or "" to run a program
    program: Program


class Outside:
    """The collectives of one context."""

    def __init__(self, ctx: Context):
        self._ctx = ctx
        self._debug = os.environ.get("JAXDIST_DEBUG", "0") not in ("", "0")
        self._number = 0
        self._lock = threading.Lock()  # threads must keep one order on all ranks
        self._turns, self._ledger = ctx.only(Turns), ctx.only(Ledger)
        self._remembered = functools.lru_cache(maxsize=1024)(self._plan)
        self._first = {d.process_index: d for d in reversed(ctx.devices)}  # of each process
        self._mpi = HostMpi(ctx) if ctx.communicator == "mpi" and ctx.size > 1 else None

    @compat.under_no_mesh
    def run(self, kind: str, tree: Any, arguments: dict[str, Any], types: tuple[Any, ...] | None = None) -> Any:
        """Make a call; with `types`, its gradient for arrays of these types, given cotangents."""
        with self._lock:
            self._number += 1
            self._turns.begin()
            try:
                structure, arrays = flat(kind, tree)
                if types is None and arguments.get("op") in ("sum", "prod"):
                    _refuse_what_is_summed(kind, jax.tree.leaves(tree))
                known = all(type(v) in (str, int, type(None)) for v in arguments.values())
                make = self._remembered if known else self._plan
                of = tuple((x.shape, x.dtype) for x in arrays) if types is None else types
                plan = make(kind, tuple(arguments.items()), structure, of, types is not None)
                jax.block_until_ready(arrays)
            except Exception as error:
                self._agree(Description(kind, problem=in_words(error)))
                raise
            self._agree(plan.description)
            return jax.tree.unflatten(structure, self._results(plan, arrays) if arrays else [])

    def _plan(
        self, kind: str, arguments: tuple[tuple[str, Any], ...], structure: Any, types: tuple[Any, ...], backward: bool
    ) -> _Plan:
        ctx, arrays = self._ctx, [jax.ShapeDtypeStruct(*each) for each in types]
        options = checked(kind, dict(arguments), ctx.size, structure, arrays)
        description = describe("gradient of " * backward + text(kind, options), structure, arrays)
        groups = options.pop("groups")
        members = tuple(range(ctx.size)) if groups is None else next((g for g in groups if ctx.rank in g), (ctx.rank,))
        if "root" in options:
            options["root"] %= len(members)  # a rank alone is its own root
        root = members[options["root"]] if kind in ("reduce", "gather") else None
        whole = self._mpi is not None and kind == "allreduce" and groups is None and not backward
        op = options["op"] if whole and all(reduces(options["op"], x.dtype) for x in arrays) else ""
        devices = tuple(self._first[r] for r in members)
        communicator = ctx.communicator if len(members) > 1 else "xla"
        program = _program(kind, tuple(options.items()), backward, types, devices, communicator)
        return _Plan(description, members, root, op, program)

    def _agree(self, mine: Description) -> None:
        """Wait for all ranks; raise unless all make the same call (a rank with a problem returns)."""
        ctx, number = self._ctx, f"eager collective {self._number}"
        what, entry = f"{mine} ({number})", Entry(mine.fingerprint.to_bytes(8, "little"), str(mine))
        if self._debug:
            ctx.control.say(f"{number}: {mine.problem or mine}")
        if not mine.problem:
            self._ledger.announce(entry)
        same = self._mpi.same(mine.fingerprint, what) if self._mpi else ctx.size == 1
        if mine.problem or not same:
            try:
                everyone = ctx.control.exchange("an eager collective", mine, ctx.timeout, what)
            except ControlError as error:
                raise ControlError(f"{what}: not every rank came to it. {error}") from None
            if mine.problem:
                return
            if len(set(everyone)) > 1:
                raise ValueError(f"rank {ctx.rank}, {number}: {difference(everyone, lambda _: _ADVICE)}")
        self._ledger.enter(entry)

    def _results(self, plan: _Plan, arrays: Sequence[Any]) -> list[jax.Array]:
        if self._mpi and plan.op:
            return [self._mpi.allreduce(np.asarray(x), plan.op) for x in arrays]
        device = self._first[self._ctx.rank]
        parts = [out.addressable_data(0) for out in plan.program([jax.device_put(x, device) for x in arrays])]
        self._turns.dispatched(parts[0])
        if plan.root not in (None, self._ctx.rank):
            return [x if isinstance(x, jax.Array) else jnp.array(x) for x in arrays]  # NumPy's may change
        # On CPUs, return an array like the user's own, not bound to a device. It shares memory.
        return [jax.device_put(np.asarray(part)) for part in parts] if device.platform == "cpu" else parts


@functools.lru_cache(maxsize=1024)
def _program(
    kind: str,
    options: tuple[tuple[str, Any], ...],
    backward: bool,
    types: tuple[Any, ...],
    devices: tuple[Any, ...],
    communicator: str,
) -> Program:
    """Build the program of a call between devices; each process passes the arrays of its device."""
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    each = NamedSharding(mesh, P())  # a lie that spares a reshape: each device holds its own
    function = functools.partial(getattr(in_step, kind, lambda x: x), **dict(options), groups=None)

    def one(x: Any, of: Any) -> Any:
        return jax.linear_transpose(function, jax.ShapeDtypeStruct(*of))(x)[0] if backward else function(x)

    def local(*xs: Any) -> list[Any]:
        closed = retrace(lambda *xs: [one(x, of) for x, of in zip(xs, types, strict=True)], xs)
        return lowering(communicator, mesh).run(closed, *xs)

    jitted = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))

    def run(xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        inputs = [jax.make_array_from_single_device_arrays(x.shape, each, [x]) for x in xs]
        if len(devices) > 1 and communicator != "mpi" and devices[0].platform == "cpu":
            gloo.connect(mesh, mesh.axis_names)
        return jitted(*inputs)

    return run


def _refuse_what_is_summed(kind: str, leaves: Sequence[Any]) -> None:
    """Refuse step results, which cover the whole batch already: a common slip of DDP users."""
    if any(isinstance(x, jax.Array) and x.is_fully_replicated and not x.is_fully_addressable for x in leaves):
        raise ValueError(
            f"jaxdist.{kind} of an array that every process has in full, such as a step's result: it covers the "
            "whole batch already, so a sum over ranks would count it once per rank. Omit the call (or pass "
            "np.asarray(x), if you want that sum)"
        )
