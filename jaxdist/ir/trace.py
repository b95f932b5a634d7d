"""Trace a step to a jaxpr, as one device with the whole batch runs it: axes of the mesh have size one."""

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.core import primitives as p

from jaxdist import compat
from jaxdist.errors import StepError
from jaxdist.ir.interpreter import Interpreter, axes_of, groups_of, subjaxprs
from jaxdist.mesh import AXIS, MODEL, SEQUENCE
from jaxdist.text import say_once

_step: ContextVar[Any] = ContextVar("jaxdist_inside_step", default=None)
_KNOWN = (AXIS, MODEL, SEQUENCE)


def inside_step() -> bool:
    """Check whether the current code is being traced as part of a decorated step."""
    return _step.get() is not None


def current_step() -> Any:
    """Return the decorated step that is being traced (a `jaxdist.compilation.finite.Findings`), if any."""
    return _step.get()


def on_device() -> bool:
    """Check whether code is being traced per device (`jaxdist.per_device`, `jax.shard_map`)."""
    return not compat.manual_axes().isdisjoint(_KNOWN)


compat.ignore_shardings(
    lambda: None if (step := _step.get()) is None else step.mesh,
    lambda: say_once("shardings that a step names are ignored: jaxdist divides its values itself", logging.INFO),
)


@contextlib.contextmanager
def stepping(step: Any) -> Iterator[None]:
    """Trace as part of a step within this context."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def trace(
    fun: Callable[..., Sequence[Any]], args: Sequence[Any]
) -> tuple[ClosedJaxpr, str, Sequence[tuple[float, str]]]:
    """Trace with axes of size one, and remove them; also return the axis, and what sums over it are divided by."""
    names, axis = [*_KNOWN], AXIS
    while True:
        try:
            closed = jax.make_jaxpr(fun, axis_env=[(name, 1) for name in names])(*args)
            break
        except NameError as error:
            found = re.search(r"unbound axis name:? ([^\s.]+)", str(error))
            if found is None or (name := found[1].strip("'\"")) in names:
                raise
            if axis != AXIS:
                raise StepError(
                    f"the step names two unbound axes, {axis!r} and {name!r}: only one can be the axis of data "
                    f"parallelism. Bind the other (jax.vmap(axis_name={name!r}), jax.shard_map)"
                ) from None
            names.append(axis := name)
            logging.getLogger("jaxdist").info("treating the unbound axis %r as the data axis, of size one", name)
    axes = [(name, 1) for name in names]
    divided = list(_divided(closed.jaxpr, set(names)))
    for rewrite in (Interpreter({compat.composite_p: compat.expanded}), Alone(names)):
        if any(map(rewrite.touches, closed.eqns)):
            closed = jax.make_jaxpr(functools.partial(rewrite.run, closed), axis_env=axes)(*closed.in_avals)
    return closed, axis, divided


def with_axis(fun: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``fun(*args)`` on arrays or tracers; a data axis that it names has size one."""
    try:
        return fun(*args)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
    leaves, tree = jax.tree.flatten(args)
    out_tree: list[Any] = []

    def flat(*xs: Any) -> list[Any]:
        outs, structure = jax.tree.flatten(fun(*jax.tree.unflatten(tree, xs)))
        out_tree.append(structure)
        return outs

    closed, *_ = trace(flat, [jax.typeof(x) for x in leaves])
    return jax.tree.unflatten(out_tree[-1], jaxpr_as_fun(closed)(*leaves))


_COLLECTIVES = {
    p.psum_p, p.pmax_p, p.pmin_p, p.all_gather_p, p.all_to_all_p, p.ppermute_p, p.axis_index_p, compat.psum_invariant_p,
    compat.reduce_scatter_p, compat.pvary_p, compat.all_gather_invariant_p, *compat.other_collectives(),
}  # fmt: skip


def _divided(jaxpr: Jaxpr, names: set[str]) -> Iterator[tuple[float, str]]:
    """Yield the divisors of sums over one of the axes, with the user's lines."""
    sums: set[Any] = set()
    gathered: dict[Any, int] = {}  # with the dimension of the devices
    for eqn in jaxpr.eqns:
        name, read = eqn.primitive.name, [v for v in eqn.invars if not isinstance(v, Literal)]
        taken = not sums.isdisjoint(read)
        over = not names.isdisjoint(axes_of(eqn))
        if over and name.startswith("all_gather") and not eqn.params["tiled"]:
            gathered[eqn.outvars[0]] = eqn.params["all_gather_dimension"]
        elif (
            (over and name.startswith(("psum", "reduce_scatter")))
            or (taken and name == "convert_element_type")
            or (name == "reduce_sum" and any(gathered.get(v) in eqn.params["axes"] for v in read))
        ):
            sums.update(eqn.outvars)
        elif taken and name in ("div", "mul"):
            numbers = (v.val for v in eqn.invars if isinstance(v, Literal) and np.ndim(v.val) == 0 and v.val)
            yield from ((float(abs(n if name == "div" else 1 / n)), compat.user_line(eqn)) for n in numbers)
        for sub in subjaxprs(eqn):
            yield from _divided(sub.jaxpr, names)


class Alone(Interpreter):
    """Evaluates a jaxpr without its collectives over an axis of size one."""

    def __init__(self, names: Sequence[str]):
        super().__init__({})
        self.names = set(names)

    def touches(self, eqn: JaxprEqn) -> bool:
        """Check whether it is, or contains outside a `shard_map`, a collective over one of the axes."""
        if eqn.primitive in _COLLECTIVES:
            return not self.names.isdisjoint(axes_of(eqn))
        return eqn.primitive.name != "shard_map" and any(
            map(self.touches, itertools.chain.from_iterable(sub.eqns for sub in subjaxprs(eqn)))
        )

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive not in _COLLECTIVES or not self.touches(eqn):
            return super().eval_eqn(eqn, *args)
        others = tuple(a for a in axes_of(eqn) if a not in self.names)
        if others:
            key = "axes" if "axes" in eqn.params else "axis_name"
            return compat.bind(eqn, {**eqn.params, key: others}, args)
        name, params = eqn.primitive.name, eqn.params
        if any(len(g) > 1 for g in groups_of(eqn) or ()):
            raise self._beyond(eqn, "groups of several devices")
        if name == "axis_index":
            return [jnp.int32(0)]
        if name == "ppermute":
            if any(pair != (0, 0) for pair in map(tuple, params["perm"])):
                raise self._beyond(eqn, f"the permutation {params['perm']}")
            return [x if params["perm"] else jnp.zeros_like(x) for x in args]
        if name.startswith("all_gather") and not params["tiled"]:
            return [jnp.expand_dims(x, params["all_gather_dimension"]) for x in args]
        if name == "reduce_scatter" and not params["tiled"]:
            return [lax.squeeze(x, (params["scatter_dimension"],)) for x in args]
        if name == "all_to_all" and not params["tiled"]:
            return [jnp.moveaxis(x, params["split_axis"], params["concat_axis"]) for x in args]
        return list(args)

    def _beyond(self, eqn: JaxprEqn, what: str) -> StepError:
        return StepError(
            f"{eqn.primitive.name} at {compat.user_line(eqn)} names {what}, but inside a step the axis has size one, "
            "as on one device. Code for each device belongs in jaxdist.per_device"
        )
