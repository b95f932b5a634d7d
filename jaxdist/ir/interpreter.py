"""Evaluate a jaxpr equation by equation with a table of rules, the basis of every pass."""

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from jaxdist import compat
from jaxdist.mesh import Axis

T = TypeVar("T")

CHECKPOINT = "remat2"  # `jax.checkpoint`, whose operands are its body's
CONTROL_FLOW = frozenset({"scan", "while", "cond", CHECKPOINT})


class Body(NamedTuple):
    """A program inside control flow, with the correspondence of its values to the equation's."""

    closed: ClosedJaxpr
    ins: Sequence[int]  # for each input, the operand
    outs: Sequence[int] = ()  # for each output, the result; a loop's condition has none
    carry: range = range(0)  # inputs that a loop carries: the body's first outputs replace them
    # inputs that are slices of operands, and outputs that are slices of results, along dimension 0
    xs: range = range(0)
    ys: range = range(0)

    def split(self, operands: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
        """Divide operands into constants, carries, and the rest."""
        taken, start, stop = [operands[k] for k in self.ins], self.carry.start, self.carry.stop
        return taken[:start], taken[start:stop], taken[stop:]


def bodies(eqn: JaxprEqn) -> list[Body]:
    """Return the bodies of control flow, else []; for `while`, the condition comes first."""
    params, ins, outs = eqn.params, range(len(eqn.invars)), range(len(eqn.outvars))
    match eqn.primitive.name:
        case "scan":
            consts, carries = compat.scan_split(params)
            carry = range(consts, consts + carries)
            return [Body(params["jaxpr"], ins, outs, carry, ins[carry.stop :], outs[carries:])]
        case "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            tested, taken = [*ins[:first], *ins[first + second :]], ins[first:]
            condition = Body(params["cond_jaxpr"], tested, carry=range(first, len(tested)))
            return [condition, Body(params["body_jaxpr"], taken, outs, range(second, len(taken)))]
        case "cond":  # the first operand chooses
            return [Body(branch, ins[1:], outs) for branch in params["branches"]]
        case "remat2":
            return [Body(compat.closed(params["jaxpr"]), ins, outs)]
    return []


_LONGEST_CALL = 256  # equations: XLA takes long for a call with thousands of operands

Rule = Callable[..., Any]  # ``rule(interpreter, eqn, *args) -> outputs``: one value, or a sequence if there are several

# Calls that only name a piece of the program. They are inlined if a pass acts on their contents.
# Differentiation is over by then, so custom derivatives have had their effect.
INLINED = {
    "jit": "jaxpr",
    "custom_vmap_call": "call",
    **dict.fromkeys(("closed_call", "eval_jaxpr", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}


def subjaxprs(eqn: JaxprEqn) -> Iterator[ClosedJaxpr]:
    """Yield the jaxprs among an equation's parameters, also inside tuples, lists, dictionaries, and records."""
    return _jaxprs(eqn.params.values())


def _jaxprs(values: Iterable[Any]) -> Iterator[ClosedJaxpr]:
    for value in values:
        if type(value) in _PLAIN or (type(value) is tuple and _PLAIN.issuperset(map(type, value))):
            continue
        if isinstance(value, (ClosedJaxpr, Jaxpr)):
            yield compat.closed(value)
        else:
            yield from _jaxprs([item for _, item in _items(value)])


_PLAIN = {bool, int, float, str, type(None)}  # types of most parameters


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and items of a container, and the fields of a record that a package keeps among static parameters."""
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, dict):
        return value.items()
    # A record that can change may refer to itself.
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)] if frozen else ()


Within = tuple[tuple[JaxprEqn, int], ...]  # the equations around one, outermost first, and in which jaxpr of each it is


def walk(program: ClosedJaxpr, within: Within = ()) -> Iterator[tuple[JaxprEqn, Within]]:
    """Yield the live equations of a program in order, and those around each; nested ones before their parent."""
    for eqn in live(program.jaxpr):
        for i, body in enumerate(subjaxprs(eqn)):
            yield from walk(body, (*within, (eqn, i)))
        yield eqn, within


def with_bodies(eqn: JaxprEqn, change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> dict[str, Any]:
    """Return an equation's parameters with each jaxpr among them changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return change(value)
        if isinstance(value, Jaxpr):
            rewritten = change(compat.closed(value))
            if rewritten.consts:  # an open jaxpr has nowhere to hold them
                raise NotImplementedError(f"constants inside {eqn.primitive}")
            return compat.opened(rewritten, len(value.constvars))
        items = {key: new for key, item in _items(value) if (new := changed(item)) is not item}
        return _with_items(value, items) if items else value

    return {name: changed(value) for name, value in eqn.params.items()}


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    """A container or record with some of its items replaced."""
    if isinstance(value, (tuple, list)):
        replaced = [items.get(i, item) for i, item in enumerate(value)]
        return type(value)(*replaced) if hasattr(value, "_fields") else type(value)(replaced)
    if isinstance(value, dict):
        return value | items
    record = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(record, name, item)  # its constructor may not take every field
    return record


def axes_of(eqn: JaxprEqn, unsaid: Any = ()) -> tuple[Any, ...]:
    """Return a collective's axes: names, and numbers of the operand's dimensions added by vmap."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", unsaid))
    return tuple(axes) if isinstance(axes, (tuple, list, frozenset)) else (axes,)


def groups_of(eqn: JaxprEqn) -> Sequence[Sequence[int]] | None:
    """Return a collective's groups of devices, or None if all form one group."""
    return eqn.params.get("axis_index_groups")


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield all equations of a jaxpr and of nested ones, live or not."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in subjaxprs(eqn):
            yield from equations(sub.jaxpr)


def contains(jaxpr: Jaxpr, primitives: Collection[Primitive]) -> bool:
    """Check whether `jaxpr`, or a nested one, binds one of `primitives`."""
    return any(eqn.primitive in primitives for eqn in equations(jaxpr))


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Return the body of a call that may be inlined, else None."""
    body = eqn.params.get(INLINED.get(eqn.primitive.name, ""))
    return None if body is None else compat.closed(body)


def renamed(atoms: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
    """Rename variables; literals and variables without a new name stay unchanged."""
    return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]


def inlined(
    fun: Callable[..., Sequence[Any]], operands: Sequence[Any], axes: Sequence[Axis], results: Sequence[Any] = ()
) -> tuple[list[JaxprEqn], list[Any], dict[Any, Any]]:
    """Return the equations of a function of variables, its results (named `results` if given), and its constants."""
    traced = jax.make_jaxpr(fun, axis_env=list(axes))(*(v.aval for v in operands))
    jaxpr, names = traced.jaxpr, dict(zip(traced.jaxpr.invars, operands, strict=True))
    names.update(zip(jaxpr.outvars, results, strict=False))
    eqns = [eqn.replace(invars=renamed(eqn.invars, names), outvars=renamed(eqn.outvars, names)) for eqn in jaxpr.eqns]
    return eqns, renamed(jaxpr.outvars, names), dict(zip(jaxpr.constvars, traced.consts, strict=True))


class Interpreter:
    """Evaluates jaxprs, replacing primitives by `rules`, also in calls, which it inlines, and in control flow."""

    # Other equations in a row are bound unchanged in one call if they are this many: to trace each
    # anew takes as long as tracing the step.
    worth_a_call: float = 4

    def __init__(self, rules: Mapping[Primitive, Rule]):
        self.rules = dict(rules)

    def run(self, closed: ClosedJaxpr, *args: Any) -> list[Any]:
        """Return the outputs of `closed` at `args`."""
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        eqns = live(jaxpr)
        last = last_uses(eqns, jaxpr.outvars)
        stop = 0
        for part in self._stretches(eqns):
            stop += len(part)
            if len(part) < self.worth_a_call:
                for eqn in part:
                    outs = self.eval_eqn(eqn, *map(read, eqn.invars))
                    env.update(zip(eqn.outvars, outs, strict=True))
                continue
            made = {v for eqn in part for v in eqn.outvars}
            taken = (v for eqn in part for v in eqn.invars if not isinstance(v, Literal) and v not in made)
            ins = list(dict.fromkeys(taken))
            outs = [v for eqn in part for v in eqn.outvars if last.get(v, -1) >= stop]
            effects = frozenset().union(*(eqn.effects for eqn in part))
            body = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=part, effects=effects)
            env.update(zip(outs, compat.call(ClosedJaxpr(body, ()), [env[v] for v in ins]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _stretches(self, eqns: Sequence[JaxprEqn]) -> Iterator[list[JaxprEqn]]:
        """Yield equations in runs to bind unchanged, and every other one alone."""
        # To fetch from the host's memory takes both; a call's types would not have that memory.
        fetches = any(eqn.primitive.name == "device_put" for eqn in eqns)
        alone = {"device_put", "optimization_barrier"} if fetches else set[str]()
        changes = lambda eqn: eqn.primitive.name in alone or has_effect(eqn) or self.touches(eqn)
        for changed, group in itertools.groupby(eqns, changes):
            part, longest = list(group), 1 if changed else _LONGEST_CALL
            yield from (part[i : i + longest] for i in range(0, len(part), longest))

    def rewrite(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """Apply the rules to `closed`, within the shard_map being traced."""
        return jax.make_jaxpr(functools.partial(self.run, closed))(*closed.in_avals)

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        """Return the outputs of one equation."""
        if rule := self.rules.get(eqn.primitive):
            out = rule(self, eqn, *args)
            return out if eqn.primitive.multiple_results else [out]
        if not self.touches(eqn):
            return compat.bind(eqn, eqn.params, args)
        if body := called(eqn):
            with compat.context_of(eqn):
                return self.run(body, *args)
        return self.eval_nested(eqn, *args)

    def eval_nested(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        """Rewrite the jaxprs in an equation and rebind it; inputs and outputs keep their types."""
        return compat.bind(eqn, with_bodies(eqn, self.rewrite), args)

    def touches(self, eqn: JaxprEqn) -> bool:
        """Check whether an equation must be evaluated: it, or one in a nested jaxpr, binds a ruled primitive."""
        return eqn.primitive in self.rules or any(contains(sub.jaxpr, self.rules) for sub in subjaxprs(eqn))


def last_uses(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> dict[Any, int]:
    """Map each variable to the position of its last use; results are used after all equations."""
    uses = (*(eqn.invars for eqn in eqns), results)
    return {v: k for k, atoms in enumerate(uses) for v in atoms if not isinstance(v, Literal)}


def live(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return equations that outputs depend on, marks, and effects other than naming a mesh axis."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        # An optimizer may ignore its parameters, though `jaxdist.zero` decides how they are kept.
        if has_effect(eqn) or eqn.primitive.name == "jaxdist_shard" or any(v in needed for v in eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return kept[::-1]


def has_effect(eqn: JaxprEqn) -> bool:
    """Check whether an equation has effects other than naming a mesh axis."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in eqn.effects)
