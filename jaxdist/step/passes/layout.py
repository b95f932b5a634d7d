"""The *layout* pass: prove of each output of a step that all devices compute the same value, or that they don't.

Each value is R, replicated (every device holds the same), or V, varying. State enters R, the batch V; an equation's
results vary if an operand does; a reduction over the mesh makes R again. JAX's types say the same in a type-checked
trace; this inference is for the others as well, and it knows more of one thing: *how* a value depends on the incoming
state. A running statistic (BatchNorm's mean, the moving average of a loss) is

    new = a * old + b,    a replicated, b computed from this device's part of the batch,

so the mean over the devices of the new values is the new value for the mean of the `b`: averaging is exact. A parameter
moved by a gradient of its own device is no such thing (its `b` depends on `old`), and neither is a total that is added
to (no `a`: it wants the sum over the devices): averaging would hide an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from jaxdist import compat
from jaxdist.errors import StepError
from jaxdist.step.interpreter import INLINED, contains, subjaxprs
from jaxdist.step.primitives import AXIS, all_reduce_p, group_reduce_p


@dataclass(frozen=True)
class Flow:
    """What is known of a value: whether it varies, and on which inputs it depends (bit i: input i).

    Attributes:
      varying: may differ between devices.
      deps: the inputs on which it depends.
      bent: those of them on which it does not depend as ``a * input + b`` with a replicated `a`.
      scaled: those whose `a` is a factor that the step applies: a decay. (A sum that is added to has none.)
    """

    varying: bool = False
    deps: int = 0
    bent: int = 0
    scaled: int = 0

    def __or__(self, other: Flow) -> Flow:
        return Flow(
            self.varying or other.varying,
            self.deps | other.deps,
            self.bent | other.bent,
            self.scaled | other.scaled,
        )

    def through(self, *, varying: bool = False) -> Flow:
        """After a function that is not affine."""
        return Flow(self.varying or varying, self.deps, self.deps)


_CONSTANT = Flow()

COLLECTIVES = {
    all_reduce_p, compat.psum_invariant_p, compat.all_gather_invariant_p, compat.reduce_scatter_p,
    group_reduce_p, p.psum_p, p.pmax_p, p.pmin_p, p.all_gather_p, p.all_to_all_p, p.ppermute_p,
}  # fmt: skip

# f(a x + b) = a' x + b' with the operands' deps kept apart.
_LINEAR = {
    "add", "sub", "add_any", "neg", "reduce_sum", "cumsum", "reshape", "squeeze", "transpose", "broadcast_in_dim",
    "convert_element_type", "copy", "copy_p", "slice", "concatenate", "pad", "rev", "pvary", "real", "imag",
    "reduce_precision", "optimization_barrier", "stop_gradient", "reduce_window_sum", "expand_dims", "jaxdist_expand",
    "jaxdist_shard",
}  # fmt: skip
# Sums over the mesh: linear, and what comes out is replicated. With `groups` each group has its own value.
_MESH_SUMS = {"psum", "psum_invariant", "jaxdist_all_reduce"}
_MESH_OTHER = {"pmax", "pmin", "all_gather", "all_gather_invariant"}
# Differ per device whatever goes in.
_SOURCES = {
    "axis_index",
    "jaxdist_group_reduce",
    "io_callback",
    "ppermute",
    "all_to_all",
    "reduce_scatter",
    "infeed",
    "recv",
}
_FLOAT_ONLY = {"convert_element_type"}  # linear between floats, a step function into integers


def infer(closed: ClosedJaxpr, inputs: Sequence[Flow], varying: set[Any] | None = None) -> list[Flow]:
    """How each output of `closed` follows from its inputs.

    Args:
      closed: the traced step.
      inputs: one `Flow` an input.
      varying: gets the variables, of the jaxprs inside it too, whose values may differ between devices.
    """
    return _infer(closed, inputs, set() if varying is None else varying)


def _infer(closed: ClosedJaxpr, inputs: Sequence[Flow], varying: set[Any]) -> list[Flow]:
    jaxpr = closed.jaxpr
    env = dict.fromkeys(jaxpr.constvars, _CONSTANT)
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Flow:
        return _CONSTANT if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _equation(eqn, [read(a) for a in eqn.invars], varying), strict=True))
    varying.update(v for v, flow in env.items() if flow.varying)
    return [read(v) for v in jaxpr.outvars]


def _join(flows: Sequence[Flow]) -> Flow:
    out = _CONSTANT
    for flow in flows:
        out |= flow
    return out


def _equation(eqn: JaxprEqn, args: list[Flow], varying: set[Any]) -> Sequence[Flow]:
    name = eqn.primitive.name
    if rule := _RULES.get(name):
        return rule(eqn, args)
    if rule := _CONTROL_FLOW.get(name):
        return rule(eqn, args, varying)
    if name in INLINED or name in ("remat2", "checkpoint", "remat"):
        bodies = list(subjaxprs(eqn))
        if bodies and len(bodies[0].invars) == len(args):
            return _infer(ClosedJaxpr(bodies[0], [None] * len(bodies[0].constvars)), args, varying)
    joined = _join(args)
    if name in _LINEAR and not (name in _FLOAT_ONLY and not _is_float(eqn)):
        return [joined] * len(eqn.outvars)
    if name in _MESH_SUMS | _MESH_OTHER:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = axes if isinstance(axes, (tuple, list)) else (axes,)
        whole = AXIS in axes and eqn.params.get("axis_index_groups") is None
        differs = joined.varying and not whole
        bent = joined.bent if name in _MESH_SUMS else joined.deps
        return [Flow(differs, joined.deps, bent, joined.scaled)] * len(eqn.outvars)
    return [joined.through(varying=name in _SOURCES)] * len(eqn.outvars)


def _is_float(eqn: JaxprEqn) -> bool:
    return all(jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact) for v in (*eqn.invars, *eqn.outvars))


def _product(_: JaxprEqn, args: list[Flow]) -> Sequence[Flow]:
    x, y = args
    bent = x.bent | y.bent | (x.deps & y.deps)
    # The coefficient of x's inputs is y: it must be the same on every device.
    bent |= (x.deps if y.varying else 0) | (y.deps if x.varying else 0)
    deps = x.deps | y.deps
    return [Flow(x.varying or y.varying, deps, bent, deps)]


def _quotient(eqn: JaxprEqn, args: list[Flow]) -> Sequence[Flow]:
    return _product(eqn, [args[0], args[1].through()])


def _select(_: JaxprEqn, args: list[Flow]) -> Sequence[Flow]:
    which, *cases = args
    out = _join(cases)
    if which.varying:
        return [out.through(varying=True)]
    return [out | which.through()]


def _scan(eqn: JaxprEqn, args: list[Flow], varying: set[Any]) -> Sequence[Flow]:
    n_consts, n_carry = compat.scan_split(eqn.params)
    body = eqn.params["jaxpr"]
    consts, carry, xs = (
        args[:n_consts],
        args[n_consts : n_consts + n_carry],
        args[n_consts + n_carry :],
    )

    def step(carry: list[Flow]) -> tuple[list[Flow], list[Flow]]:
        outs = _infer(body, [*consts, *carry, *xs], varying)
        return outs[:n_carry], outs[n_carry:]

    carry, ys = _fixpoint(step, carry)
    return [*carry, *ys]


def _while(eqn: JaxprEqn, args: list[Flow], varying: set[Any]) -> Sequence[Flow]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    cond_consts, body_consts, carry = (
        args[:n_cond],
        args[n_cond : n_cond + n_body],
        args[n_cond + n_body :],
    )

    def step(carry: list[Flow]) -> tuple[list[Flow], list[Flow]]:
        (again,) = _infer(cond, [*cond_consts, *carry], varying)
        if again.varying:
            _refuse_collectives(eqn, "lax.while_loop")
        outs = _infer(body, [*body_consts, *carry], varying)
        # How often the body ran decides the result.
        return [(o | again).through() if again.varying else o | again.through() for o in outs], []

    return _fixpoint(step, carry)[0]


def _fixpoint(
    step: Callable[[list[Flow]], tuple[list[Flow], list[Flow]]], carry: list[Flow]
) -> tuple[list[Flow], list[Flow]]:
    while True:
        outs, extra = step(carry)
        joined = [a | b for a, b in zip(carry, outs, strict=True)]
        if joined == carry:
            return carry, extra
        carry = joined


def _cond(eqn: JaxprEqn, args: list[Flow], varying: set[Any]) -> Sequence[Flow]:
    which, *operands = args
    if which.varying:
        _refuse_collectives(eqn, "lax.cond or lax.switch")
    branches = [_infer(branch, operands, varying) for branch in eqn.params["branches"]]
    outs = [_join(flows) for flows in zip(*branches, strict=True)]
    if which.varying:
        return [(o | which).through(varying=True) for o in outs]
    return [o | which.through() for o in outs]


def _refuse_collectives(eqn: JaxprEqn, what: str) -> None:
    """Devices that disagree on whether to enter a collective wait for each other for ever."""
    if any(contains(jaxpr, COLLECTIVES) for jaxpr in subjaxprs(eqn)):
        raise StepError(
            f"a {what} whose condition differs between devices holds a reduction over the devices (of "
            "a gradient, or your own): those that take the other branch would never come to it. "
            "Reduce the condition first, with jax.lax.pmax(condition, 'data') say, or use "
            "jaxdist.value_and_grad in place of jax.value_and_grad, which reduces after the branch"
        )


_RULES: dict[str, Callable[[JaxprEqn, list[Flow]], Sequence[Flow]]] = {
    "mul": _product,
    "div": _quotient,
    "dot_general": _product,
    "select_n": _select,
}
_CONTROL_FLOW: dict[str, Callable[[JaxprEqn, list[Flow], set[Any]], Sequence[Flow]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
