"""The body of a Pallas kernel: whether its steps along an axis of the grid depend on each other, or add up."""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxdist import compat
from jaxdist.ir.interpreter import bodies, called, subjaxprs, walk
from jaxdist.placements.model.factors import Params
from jaxdist.placements.model.values import aval_of


def divided(index_map: ClosedJaxpr, axis: int, steps: Any) -> list[int]:
    """Return, for each result of an index map, the number by which it divides the index of an axis.

    That is 0 if it does not depend on the axis, and -1 if it is some other function of it.
    """
    # Of ``lambda i, j: (i // 2, j, i + j)``, for axis 0: 2, 0 and -1. All steps are evaluated: an index map may be any
    # program, and a quotient at its first steps only.
    # The values that depend on the axis alone, for each of its steps, or None if on something else, too.
    values: dict[Var, np.ndarray | None] = {index_map.jaxpr.invars[axis]: np.arange(steps, dtype=np.int32)}
    for eqn in index_map.jaxpr.eqns:
        if not any(isinstance(v, Var) and v in values for v in eqn.invars):
            continue
        operands = [np.full(steps, _value(v)) if isinstance(v, Literal) else values.get(v) for v in eqn.invars]
        results: Sequence[Any] = [None] * len(eqn.outvars)
        if all(operand is not None for operand in operands):
            with jax.ensure_compile_time_eval():
                results = jax.vmap(functools.partial(compat.bind, eqn, eqn.params))(operands)
        values |= zip(eqn.outvars, results, strict=True)
    return [0 if isinstance(v, Literal) or v not in values else _divisor(values[v]) for v in index_map.jaxpr.outvars]


def _divisor(values: np.ndarray | None) -> int:
    if values is None:
        return -1
    if (np.asarray(values) == values[0]).all():
        return 0
    # ``i // 3`` over 6 steps is 0 0 0 1 1 1: the first step with 1 tells the divisor, and all others must agree.
    by = int(np.argmax(np.asarray(values) == 1))
    return by if by and (np.arange(len(values)) // by == values).all() else -1


def why_dependent(params: Params, axis: int, kept: Collection[int], is_sum: bool) -> Iterator[str]:
    """Yield the reasons why steps along an axis depend on each other.

    Args:
      params: the parameters of the kernel's equation.
      axis: an axis of its grid.
      kept: results that all steps along the axis write to.
      is_sum: whether `why_no_sum` has shown that these are sums.
    """
    mapping, body = params["grid_mapping"], compat.closed(params["jaxpr"])
    visible = [g for g in range(len(mapping.grid)) if g not in mapping.vmapped_dims]
    for eqn, _ in walk(body):
        name = eqn.primitive.name
        if name == "program_id" and not is_sum and visible[eqn.params["axis"]] == axis:
            yield f"the kernel reads program_id({eqn.params['axis']})"
        if others := {type(effect).__name__ for effect in eqn.effects} - _EFFECTS:
            yield f"the kernel's {name} has an effect ({min(others)})"
        if any(word in name for word in _ACROSS):
            yield f"the kernel uses {name}"
    operands = mapping.num_index_operands + mapping.num_inputs
    taken, results = body.jaxpr.invars[:operands], body.jaxpr.invars[operands:]
    if any(type(e).__name__ in ("WriteEffect", "AccumEffect") and e.input in taken for e in body.jaxpr.effects):
        yield "the kernel writes to an operand"
    # Steps run in the order of the grid: a device that starts in its middle lacks what the steps before it would leave.
    # Memory that the steps share: a step must not read a value that an earlier one left there.
    shared = [v for k, v in enumerate(results) if (k in kept and not is_sum) or k >= mapping.num_outputs]
    memory, written = dict(zip(shared, shared, strict=True)), Written()
    # ``pl.when(pl.program_id(1) == 0)`` clears an accumulator for the later steps of its row: so the first of a row is
    # looked at alone, and what it writes is there for the others.
    independent = _writes_first(body.jaxpr, memory, {}, written, [k for k, g in enumerate(visible) if g > axis])
    # In later steps of inner axes, a result's block may differ from the one written to in the first of them.
    maps = [compat.closed(block.index_map_jaxpr) for block in mapping.block_mappings[mapping.num_inputs :]]
    inner = [(g, n) for g, n in enumerate(mapping.grid) if g > axis]
    moving = {results[k] for k in kept if any(not isinstance(n, int) or any(divided(maps[k], g, n)) for g, n in inner)}
    if not independent or not _writes_first(body.jaxpr, memory, {}, written - moving, ()):
        yield "a step may read memory that an earlier one wrote"


_EFFECTS = {"ReadEffect", "WriteEffect", "AccumEffect", "DebugEffect", "OrderedDebugEffect"}
# Names of what reaches beyond a step and has no effect of its own: copies, perhaps to other devices, random numbers.
_ACROSS = ("device_id", "dma", "prng")
Written = set[Var]  # memory that has been written to as a whole


def _writes_first(
    jaxpr: Jaxpr, memory: Mapping[Var, Var], known: dict[Var, Any], written: Written, at_start_of: Collection[int]
) -> bool:
    """Check that a step reads only scratch memory that it wrote before, and add the memory it writes to `written`.

    Args:
      jaxpr: the kernel's body, or a part.
      memory: the scratch memory that it sees, by variable.
      known: numbers that are known; those that follow are added.
      written: see above.
      at_start_of: axes of the grid along which this is the first step.
    """
    for eqn in jaxpr.eqns:
        touched = {memory[v] for v in eqn.invars if isinstance(v, Var) and v in memory}
        if not touched:
            _evaluate(eqn, known, at_start_of)
            continue
        # A `swap` returns what was there: only if nobody takes that is it a write and no read. One to a part of the
        # memory leaves the rest as it was, so the whole is not known to be written.
        if eqn.primitive.name == "swap" and not _is_used(eqn, jaxpr):
            written |= touched if compat.is_whole(eqn) else set()
            continue
        programs, one_runs = _programs(eqn, known)
        after = [set(written) for _ in programs]
        for (closed, operands, changing_inputs), seen in zip(programs, after, strict=True):
            # What a loop carries is known before its first turn, and is something else in the second.
            changing = {closed.jaxpr.invars[k] for k in changing_inputs}
            pairs = list(zip(closed.jaxpr.invars, operands, strict=True))
            inner_memory = {v: memory[x] for v, x in pairs if isinstance(x, Var) and x in memory}
            inner_known = {v: _value(x) if isinstance(x, Literal) else known[x] for v, x in pairs
                           if v not in changing and (isinstance(x, Literal) or x in known)}  # fmt: skip
            if not _writes_first(closed.jaxpr, inner_memory, inner_known, seen, at_start_of):
                return False
        if not programs and not touched <= written:
            return False
        # Some branch of a `cond` runs, so what all of them write is written. A loop may have no turn.
        if programs and one_runs:
            written |= set.intersection(*after)
    return True


class _Program(NamedTuple):
    """A program that an equation may run."""

    closed: ClosedJaxpr
    operands: Sequence[Any]
    changing: Sequence[int] = ()  # the inputs that are something else in each turn of a loop


def _programs(eqn: JaxprEqn, known: Mapping[Var, Any]) -> tuple[list[_Program], bool]:
    """Return the programs that an equation may run, and whether it runs one of them for sure."""
    operands = list(eqn.invars)
    if (call := called(eqn)) is not None:
        return [_Program(call, operands)], True
    if eqn.primitive.name == "run_scoped":
        scoped = eqn.params["jaxpr"]  # its constants are the operands, and its inputs new memory
        inner = scoped.replace(constvars=[], invars=[*scoped.constvars, *scoped.invars])
        return [_Program(ClosedJaxpr(inner, []), [*operands, *scoped.invars])], True
    chosen = bodies(eqn)
    if eqn.primitive.name == "cond":
        choice = _value(operands[0]) if isinstance(operands[0], Literal) else known.get(operands[0])
        chosen = chosen if choice is None else [chosen[min(max(int(choice), 0), len(chosen) - 1)]]
    programs = [_Program(body.closed, [operands[k] for k in body.ins], (*body.carry, *body.xs)) for body in chosen]
    return programs, eqn.primitive.name == "cond"


def _evaluate(eqn: JaxprEqn, known: dict[Var, Any], at_start_of: Collection[int]) -> None:
    """Find the result of an equation of known numbers."""
    if eqn.primitive.name == "program_id":
        if eqn.params["axis"] in at_start_of:
            known[eqn.outvars[0]] = np.zeros((), aval_of(eqn.outvars[0]).dtype)
        return
    values = [_value(v) if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
    is_known = values and all(value is not None for value in values)
    if is_known and len(eqn.outvars) == 1 and not eqn.effects and called(eqn) is None:
        with jax.ensure_compile_time_eval():
            known[eqn.outvars[0]] = compat.bind(eqn, eqn.params, values)[0]


def _value(literal: Literal) -> np.ndarray:
    return np.asarray(literal.val, aval_of(literal).dtype)


def _is_used(eqn: JaxprEqn, jaxpr: Jaxpr) -> bool:
    """Check whether the results of an equation are used in a jaxpr."""
    return any(v in other.invars for other in jaxpr.eqns for v in eqn.outvars) or any(
        v in jaxpr.outvars for v in eqn.outvars
    )


# --- sums


def why_no_sum(params: Params, axis: int, kept: Collection[int]) -> str:
    """Return "" if results that all steps along an axis write to are sums of the steps' terms, else why they aren't.

    A sum is set to zero in the first step, before anything else, and is then only added to::

        @pl.when(pl.program_id(axis) == 0)
        def _():
            total[...] = jnp.zeros_like(total)
        total[...] += jnp.dot(x[...].T, dy[...])
    """
    mapping, body = params["grid_mapping"], compat.closed(params["jaxpr"]).jaxpr
    visible = [g for g in range(len(mapping.grid)) if g not in mapping.vmapped_dims]
    operands = mapping.num_index_operands + mapping.num_inputs
    results = {body.invars[operands + k]: mapping.block_mappings[mapping.num_inputs + k] for k in kept}
    sums = _Sums(axis, visible)
    if problem := sums.why_not(body, {v: v for v in results}):
        return problem
    for v, block in results.items():
        index_map = compat.closed(block.index_map_jaxpr)
        # Along these, several steps write to a block: where it is set to zero, that must be the first of them all.
        shared = {g for g, n in enumerate(mapping.grid) if n != 1 and 1 not in divided(index_map, g, n)}
        if any(g >= axis for g in shared - sums.cleared.get(v, frozenset())):
            return "the first of them does not set it to zero"
    return ""


_Part = tuple[Any, ...]  # of a result: where it is, and how it is indexed


@dataclass
class _Sums:
    """The accesses of a body to results that it should only add to."""

    axis: int
    visible: Sequence[int]  # the axes of the grid that the body sees
    # by result, the axes in whose first step it is set to zero
    cleared: dict[Var, frozenset[int]] = field(default_factory=dict)
    used: set[Var] = field(default_factory=set)  # results that have been read or written to

    def why_not(self, jaxpr: Jaxpr, memory: Mapping[Var, Var]) -> str:
        """Return the first thing in the body, or a part of it, that is more than adding, or "".

        Args:
          jaxpr: the part.
          memory: the results that it sees, by variable.
        """
        totals = dict[Var, _Part]()  # variables that are part of a result with something added to it
        places = dict[Var, int]()  # variables that are the place of the step along an axis
        is_first = dict[Var, frozenset[int]]()  # those that say whether it is the first along some axes
        for eqn in jaxpr.eqns:
            name, operands = eqn.primitive.name, [v for v in eqn.invars if isinstance(v, Var)]
            refs, read = {memory[v] for v in operands if v in memory}, [v for v in operands if v in totals]
            place = [v for v in operands if places.get(v) == self.axis or self.axis in is_first.get(v, ())]
            if name == "program_id":
                places[eqn.outvars[0]] = self.visible[eqn.params["axis"]]
            elif name == "eq" and operands and operands[0] in places and _is_zero(eqn.invars[1], {}):
                is_first[eqn.outvars[0]] = frozenset({places[operands[0]]})
            elif name in ("and", "convert_element_type") and {*operands} <= is_first.keys() and operands == eqn.invars:
                is_first[eqn.outvars[0]] = frozenset[int]().union(*(is_first[v] for v in operands))
            elif name == "cond" and place == eqn.invars[:1]:
                if not self._is_cleared(eqn, memory, is_first.get(place[0], frozenset())):
                    return "the first of them does more than set it to zero"
            elif place or self._reads_place(eqn):
                return "its body depends on the place of the step"
            elif name == "get" and refs:
                totals[eqn.outvars[0]] = _part(eqn, memory, 1)
                self.used |= refs
            # Not of two totals: ``total + total`` doubles what earlier steps have added, on each device only its own.
            elif name in ("add", "add_any") and len(read) == 1:
                totals[eqn.outvars[0]] = totals[read[0]]
            # Back to where it was read: ``total[i] = total[j] + x`` moves what other steps have added.
            elif name == "swap" and refs and read == [eqn.invars[1]] and totals[read[0]] == _part(eqn, memory, 2):
                if _is_used(eqn, jaxpr):
                    return "its body reads its old value"
                self.used |= refs
            elif refs and not read and (programs := _programs(eqn, {})[0]):
                for part, given, _ in programs:
                    pairs = [(v, x) for v, x in zip(part.jaxpr.invars, given, strict=True) if isinstance(x, Var)]
                    if problem := self.why_not(part.jaxpr, {v: memory[x] for v, x in pairs if x in memory}):
                        return problem
            elif refs or read:
                return f"its body does more than add to it ({name})"
        results = [v for v in jaxpr.outvars if isinstance(v, Var)]
        depends = [v for v in results if v in totals or v in is_first or places.get(v) == self.axis]
        return "its body does more than add to it" if depends else ""

    def _is_cleared(self, eqn: JaxprEqn, memory: Mapping[Var, Var], axes: frozenset[int]) -> bool:
        """Check that code for the first step alone sets results to zero, and note which."""
        later, clearing = eqn.params["branches"][0].jaxpr, eqn.params["branches"][-1].jaxpr
        pairs = [(v, x) for v, x in zip(clearing.invars, eqn.invars[1:], strict=True) if isinstance(x, Var)]
        inner = {v: memory[x] for v, x in pairs if x in memory}
        known = dict[Var, Any]()
        for e in clearing.eqns:
            if refs := {inner[v] for v in e.invars if isinstance(v, Var) and v in inner}:
                # Once something has been added, setting it to zero would drop that.
                is_new = not refs & (self.used | self.cleared.keys())
                if not (e.primitive.name == "swap" and is_new and compat.is_whole(e) and _is_zero(e.invars[1], known)):
                    return False
                self.cleared |= dict.fromkeys(refs, axes)
            elif e.effects:
                return False
            else:
                _evaluate(e, known, ())
        return not later.effects and not eqn.outvars

    def _reads_place(self, eqn: JaxprEqn) -> bool:
        return any(
            e.primitive.name == "program_id" and self.visible[e.params["axis"]] == self.axis
            for closed in subjaxprs(eqn)
            for e, _ in walk(closed)
        )


def _part(eqn: JaxprEqn, memory: Mapping[Var, Var], start: int) -> _Part:
    """Return which part of a result an equation reads or writes to; its operands from `start` on are the index."""
    ref, *index = (v.val if isinstance(v, Literal) else v for v in (eqn.invars[0], *eqn.invars[start:]))
    return memory[ref], eqn.params["tree"], *index


def _is_zero(v: Any, known: Mapping[Var, Any]) -> bool:
    value = _value(v) if isinstance(v, Literal) else known.get(v)
    return value is not None and not np.any(value)
