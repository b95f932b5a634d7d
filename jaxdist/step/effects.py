"""What a step changes outside of itself: it would be lost, as under `jax.jit`, and is refused. In the batch, of which
there is another one in each call, a step may work as it likes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jaxdist.errors import StepError
from jaxdist.step import modules
from jaxdist.step.signature import Signature, leaf_name

_DEPTH = 3  # how far a tracer is looked for in containers and objects
_MOST = 1000  # and among how many entries of each: what is added stands last


class Change(NamedTuple):
    """A result that a step has put into one of its arguments."""

    name: str  # of the leaf
    leaf: int | None  # its position among the arguments' leaves; None: it is a new one
    argument: int  # position of the argument


def apart(args: Any) -> Any:
    """Arguments in containers of their own, as `jax.jit` makes them; objects of nnx, which are changed, as they are."""
    return jax.tree.map(
        lambda x: x if modules.found(x) else jax.tree.map(lambda leaf: leaf, x), args, is_leaf=lambda x: x is not args
    )


def changes(names: Sequence[str], given: Any, args: Sequence[Any], result: Any) -> list[Change]:
    """Look at what a step has done to its arguments, while it is traced."""
    before = dict(given[0])
    places = {path: i for i, path in enumerate(before)}
    found = []
    returned, structures = {id(x) for x in jax.tree.leaves(result)}, set(_structures(result))
    for path, leaf in jax.tree_util.tree_leaves_with_path(args, is_leaf=modules.is_state):
        if isinstance(leaf, Tracer) and before.get(path) is not leaf and id(leaf) not in returned:
            if any(leaf is x for x in before.values()):  # moved, not new
                continue
            if jax.tree.structure(args[path[0].idx]) in structures:  # it was a place to work in
                continue
            found.append(Change(leaf_name(names, path), places.get(path), path[0].idx))
    return found


def refuse_changes(found: Sequence[Change], signature: Signature) -> None:
    """Let a step change the batch, and nothing else."""
    for name, leaf, argument in found:
        leaves = signature.arguments[argument][1] if leaf is None else [leaf]
        if not any(signature.is_batch[i] for i in leaves):
            raise StepError(
                f"the step changes its argument {name} in place, and does not return it: the change would be lost. "
                "Return what is to be kept, or work in a copy, dict(state) say. (A batch may be changed: if it is one, "
                "say so by batch_argnums=)"
            )


def refuse_kept(step: Callable[..., Any]) -> None:
    """Look at what a step has put elsewhere, while it is traced."""
    for name, value in _outside(step):
        if (where := _holds_tracer(value, _DEPTH)) is not None:
            raise StepError(
                f"the step keeps a result in {name}{where}, outside of itself: there it is not a number, but a "
                "tracer of JAX. Return it, for example as an aux value, and keep it after the call"
            )


def _structures(tree: Any) -> Iterator[Any]:
    """The structures of a tree and of all that is in it."""
    yield jax.tree.structure(tree)
    top = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    for child in top if len(top) > 1 or (top and top[0] is not tree) else ():
        yield from _structures(child)


def _outside(step: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What a step closes over: variables of functions around it, its own object, the globals that it names."""
    function = inspect.unwrap(getattr(step, "func", step))
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield type(owner).__name__, owner
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty
            continue
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _holds_tracer(value: Any, depth: int) -> str | None:
    """Where in a value a tracer is; None: nowhere."""
    if isinstance(value, Tracer):
        return ""
    if not depth or isinstance(value, (str, bytes, type, jax.Array)) or inspect.ismodule(value) or callable(value):
        return None
    if isinstance(value, dict):
        parts: Iterator[tuple[str, Any]] = ((f"[{k!r}]", v) for k, v in list(value.items())[-_MOST:])
    elif isinstance(value, (list, tuple, set)):
        parts = ((f"[{i}]", v) for i, v in enumerate(list(value)[-_MOST:]))
    elif hasattr(value, "__dict__"):
        parts = ((f".{k}", v) for k, v in list(vars(value).items()))
    else:
        return None
    return next((name + rest for name, v in parts if (rest := _holds_tracer(v, depth - 1)) is not None), None)
