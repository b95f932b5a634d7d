"""A collective of the user: inside a step or between processes, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxdist.agreement.description import Description
from jaxdist.collectives.arguments import (
    REDUCE,
    checked,
    describe,
    flat,
    of_leaf,
    ranks_of_groups,
    types_of,
)
from jaxdist.collectives.call import Call
from jaxdist.collectives.engine import Eager, Prepared, own
from jaxdist.collectives.numerics import reduction
from jaxdist.errors import StepError
from jaxdist.ir.trace import inside_step, on_device
from jaxdist.runtime.context import get_context


def collective(kind: str, tree: Any, **arguments: Any) -> Any:
    if inside_step() and not on_device():
        raise StepError(
            f"jaxdist.{kind} inside a step, which is what one device does with the whole batch: sums and means over "
            "the batch need no collective. Code for each device belongs in jaxdist.per_device"
        )
    if on_device():
        from jaxdist.collectives import in_step

        structure, leaves = flat(kind, tree)
        call = checked(kind, arguments, in_step.size(), structure, leaves)
        function: Callable[..., Any] = getattr(in_step, kind)
        return jax.tree.unflatten(structure, [function(x, **of_leaf(call, x)) for x in leaves])
    leaves = jax.tree.leaves(tree)
    if any(isinstance(x, Tracer) for x in leaves) and _linear(kind, arguments):
        return _differentiable(kind, tree, arguments)
    return _eagerly(kind, tree, arguments)


def _eagerly(kind: str, tree: Any, arguments: dict[str, Any], backward: bool = False) -> Any:
    ctx = get_context()
    given: list[Any] = []

    def prepare(wire: Any) -> Prepared:
        structure, given[:] = flat(kind, tree)
        if not backward and arguments.get("op") in ("sum", "prod"):
            _refuse_what_is_summed(kind, jax.tree.leaves(tree))
        call, description = (_backward_plan if backward else _plan)(kind, arguments, ctx.size, structure, given)
        return Prepared(call, description, [wire.load(x) for x in given])

    if ctx.size == 1:
        structure, given = flat(kind, tree)
        call, outs = checked(kind, arguments, 1, structure, given), None
    else:
        call, outs = ctx.only(Eager).collective(kind, prepare)
        structure = jax.tree.structure(tree)
    if outs is None:
        outs = [_alone(call, x) for x in given]
    return jax.tree.unflatten(structure, [own(x) if out is None else out for x, out in zip(given, outs, strict=True)])


def _refuse_what_is_summed(kind: str, arrays: Sequence[Any]) -> None:
    """What a decorated step returns is of the whole batch already: the commonest slip of who comes from DDP."""
    if any(isinstance(x, jax.Array) and x.is_fully_replicated and not x.is_fully_addressable for x in arrays):
        raise ValueError(
            f"jaxdist.{kind} of an array that every process has complete, as a decorated step returns it: it is of the "
            "whole batch already, and a sum over the ranks would count it once for each. Leave the call out (or pass "
            "np.asarray(x), if that sum is what you want)"
        )


def _plan(
    kind: str, arguments: dict[str, Any], size: int, structure: Any, arrays: Sequence[Any]
) -> tuple[Call, Description]:
    """A checked call and its description, remembered: with cold caches they take longer than a small message."""
    types = types_of(arrays)
    key = None
    if all(type(v) in (str, int, type(None)) for v in arguments.values()):
        key = (kind, size, tuple(arguments.values()), structure, types)
        if key in _plans:
            return _plans[key]
    call = checked(kind, arguments, size, structure, arrays)
    plan = call, describe(str(call), structure, types)
    if key is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _backward_plan(
    kind: str, arguments: dict[str, Any], size: int, structure: Any, arrays: Sequence[Any]
) -> tuple[Call, Description]:
    """Of the gradient of a call: described by its results, whose shapes are those of the arguments that were checked.

    Between groups of different sizes the cotangents differ in shape.
    """
    groups = ranks_of_groups(arguments.get("groups"), size, ValueError)
    call = Call(
        kind, **{**arguments, "groups": groups, **({"perm": tuple(arguments["perm"])} if kind == "permute" else {})}
    )
    n = call.group(get_context().rank, size).n
    shapes = []
    for x in arrays:
        shape = list(x.shape)
        larger = {"allgather": call.axis, "all_to_all": call.concat_axis}.get(kind)
        smaller = {"reduce_scatter": call.axis, "all_to_all": call.split_axis}.get(kind)
        if smaller is not None:
            shape[smaller] //= n
        if larger is not None:
            shape[larger] *= n
        shapes.append(tuple(shape))
    types = tuple((shape, x.dtype) for shape, x in zip(shapes, arrays, strict=True))
    return call, describe(f"gradient by {call}", structure, types)


_MOST_PLANS = 1024


_plans: dict[Any, tuple[Call, Description]] = {}


def _alone(call: Call, x: Any) -> Any:
    """What a rank by itself gets."""
    x = own(x)
    if call.kind in REDUCE:
        return x.astype(reduction(call.op, x.dtype).out)
    if call.kind in ("allgather", "gather"):
        return x.reshape(1) if not x.ndim else x
    if call.kind == "permute" and not call.perm:
        return jnp.zeros_like(x)
    return x


def _linear(kind: str, arguments: dict[str, Any]) -> bool:
    if kind in ("allreduce", "reduce_scatter"):
        return arguments["op"] in ("sum", "avg")
    return kind in ("allgather", "all_to_all", "permute")


def _differentiable(kind: str, tree: Any, arguments: dict[str, Any]) -> Any:
    """The collective of a tree with leaves that `jax.grad` traces."""
    leaves, structure = jax.tree.flatten(tree)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)]
    scalars = {i for i in traced if not leaves[i].ndim}

    def run(xs: list[Any]) -> list[Any]:
        whole = list(leaves)
        for i, x in zip(traced, xs, strict=True):
            whole[i] = x
        return jax.tree.leaves(_eagerly(kind, jax.tree.unflatten(structure, whole), arguments))

    def backward(_: None, cotangents: list[Any]) -> tuple[list[Any]]:
        cts = _eagerly(*_transposed(kind, [cotangents[i] for i in traced], arguments), backward=True)
        return ([ct.reshape(()) if i in scalars else ct for i, ct in zip(traced, cts, strict=True)],)

    function = jax.custom_vjp(run)
    function.defvjp(lambda xs: (run(xs), None), backward)
    return jax.tree.unflatten(structure, function([leaves[i] for i in traced]))


def _transposed(kind: str, cotangents: list[Any], arguments: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """The call that takes gradients of what `kind` gives back to what it took."""
    groups = {"groups": arguments.get("groups")}
    if kind == "allreduce":
        return kind, cotangents, arguments
    if kind == "allgather":
        return "reduce_scatter", cotangents, {"op": "sum", "axis": arguments["axis"], **groups}
    if kind == "reduce_scatter":
        ctx = get_context()
        n = Call(kind, groups=ranks_of_groups(arguments["groups"], ctx.size, ValueError)).group(ctx.rank, ctx.size).n
        scaled = [ct / n for ct in cotangents] if arguments["op"] == "avg" else cotangents
        return "allgather", scaled, {"axis": arguments["axis"], **groups}
    if kind == "all_to_all":
        split, concat = arguments["split_axis"], arguments["concat_axis"]
        return kind, cotangents, {"split_axis": concat, "concat_axis": split, **groups}
    return kind, cotangents, {"perm": [(d, s) for s, d in arguments["perm"]]}
