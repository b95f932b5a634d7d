"""Collectives between processes, outside a step: the ranks agree on the call, then run a program.

The program is a function of `jaxdist.collectives.in_step`, over the first device of each process.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist import compat
from jaxdist.agreement.description import Description, difference
from jaxdist.agreement.ledger import Entry, Ledger
from jaxdist.collectives import in_step
from jaxdist.collectives.arguments import checked, describe, each, flat
from jaxdist.communicators import lowering
from jaxdist.errors import ControlError, in_words
from jaxdist.mesh import AXIS, mesh_of
from jaxdist.runtime import gloo
from jaxdist.runtime.context import Context, map_of

_ADVICE = "Nothing was sent. Every rank must pass the same shapes and dtypes"

Program = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class Outside:
    """The collectives of one context."""

    def __init__(self, ctx: Context):
        self._ctx = ctx
        self._number = 0
        self._ledger = ctx.only(Ledger)
        self._planned = functools.lru_cache(maxsize=1024)(self._plan)
        self._first = map_of(ctx.mesh).first_devices

    @compat.under_no_mesh
    def run(self, kind: str, tree: Any, arguments: dict[str, Any]) -> Any:
        """Make a call, and return this process's result with the structure of the tree."""
        with self._ledger:
            self._number += 1
            try:
                structure, names, arrays = flat(kind, tree)
                if arguments.get("op") in ("sum", "prod"):
                    _refuse_what_is_summed(kind, jax.tree.leaves(tree))
                options = tuple(checked(kind, arguments, self._ctx.size).items())
                types = tuple((x.shape, x.dtype) for x in arrays)
                description, results = self._planned(kind, options, names, types)
                jax.block_until_ready(arrays)
            except Exception as error:
                self._agree(Description(kind, problem=in_words(error)))
                raise
            self._agree(description)
            with self._ctx.watchdog.call(str(description)) as active:
                parts = results(arrays) if arrays else []
            active.finish(self._ledger.output)
            return jax.tree.unflatten(structure, parts)

    def _plan(
        self, kind: str, of: tuple[tuple[str, Any], ...], names: tuple[str, ...], types: tuple[Any, ...]
    ) -> tuple[Description, Callable[[Sequence[Any]], list[jax.Array]]]:
        """Return what must be equal on all ranks, and the call itself."""
        ctx, options, arrays = self._ctx, dict(of), [jax.ShapeDtypeStruct(*one) for one in types]
        given = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        description = describe(f"{kind}({given})", names, arrays)
        groups = options.pop("groups")
        members = tuple(range(ctx.size)) if groups is None else next((g for g in groups if ctx.rank in g), (ctx.rank,))
        if "root" in options:
            options["root"] %= len(members)  # a rank alone is its own root
        root = members[options["root"]] if kind in ("reduce", "gather") else None
        devices = tuple(self._first[r] for r in members)
        communicator = ctx.communicator if len(members) > 1 else "xla"
        function, program = _program(kind, tuple(options.items()), devices, communicator)
        each(kind, names, arrays, functools.partial(jax.eval_shape, function))  # raises JAX's error
        return description, functools.partial(self._run, program, root in (None, ctx.rank))

    def _agree(self, mine: Description) -> None:
        """Wait for all ranks; raise unless all make the same call (a rank with a problem returns)."""
        ctx, number = self._ctx, f"eager collective {self._number}"
        what, entry = f"{mine} ({number})", Entry(mine.fingerprint.to_bytes(8, "little"), str(mine))
        try:
            everyone = ctx.control.exchange("an eager collective", mine, ctx.timeout, what)
        except ControlError as error:
            raise ControlError(f"{what}: not every rank came to it. {error}") from None
        if mine.problem:
            return
        if len(set(everyone)) > 1:
            raise ValueError(f"rank {ctx.rank}, {number}: {difference(everyone, _ADVICE)}")
        self._ledger.enter(entry)

    def _run(self, program: Program, gets: bool, arrays: Sequence[Any]) -> list[jax.Array]:
        """Run a program; without a part in its result, this rank keeps its own arrays."""
        device = self._first[self._ctx.rank]
        parts = [out.addressable_data(0) for out in program([jax.device_put(x, device) for x in arrays])]
        self._ledger.output = parts[0]
        if not gets:
            return [x if isinstance(x, jax.Array) else jnp.array(x) for x in arrays]  # NumPy's may change
        if device.platform != "cpu":
            return parts
        # An array like the user's own, not bound to a device. It shares memory, which is the user's alone to drop.
        parts = [jax.device_put(np.asarray(part)) for part in parts]
        self._ledger.output = None
        return parts


@functools.lru_cache(maxsize=1024)
def _program(
    kind: str, options: tuple[tuple[str, Any], ...], devices: tuple[Any, ...], communicator: str
) -> tuple[Callable[[Any], Any], Program]:
    """Return a call between devices, for the types of one array; and its program, for each process's arrays."""
    mesh = mesh_of({AXIS: -1}, devices)
    if kind == "gather":  # whose zeros, for the others, nobody gets: to choose between floats changes the bits of NaN
        kind, options = "allgather", (("axis", 0),)
    own = NamedSharding(mesh, P())  # a lie that spares a reshape: each device holds its own
    on_each = functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    function = functools.partial(getattr(in_step, kind, lambda x: x), **dict(options), groups=None)

    def local(*xs: Any) -> list[Any]:
        closed = jax.make_jaxpr(lambda *xs: [function(x) for x in xs])(*xs)
        return lowering(communicator, mesh).run(closed, *xs)

    jitted = jax.jit(on_each(local))

    def run(xs: Sequence[jax.Array]) -> Sequence[jax.Array]:
        inputs = [jax.make_array_from_single_device_arrays(x.shape, own, [x]) for x in xs]
        if len(devices) > 1 and communicator != "mpi" and devices[0].platform == "cpu":
            gloo.connect(mesh, mesh.axis_names)
        return jitted(*inputs)

    return on_each(function), run


def _refuse_what_is_summed(kind: str, leaves: Sequence[Any]) -> None:
    """Refuse step results, which cover the whole batch already: a common slip of DDP users."""
    if any(isinstance(x, jax.Array) and x.is_fully_replicated and not x.is_fully_addressable for x in leaves):
        raise ValueError(
            f"jaxdist.{kind} of an array that every process has in full, such as a step's result: it covers the "
            "whole batch already, so a sum over ranks would count it once per rank. Omit the call (or pass "
            "np.asarray(x), if you want that sum)"
        )
