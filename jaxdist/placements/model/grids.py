"""Pallas kernels by their grids: the axes of a grid are loops, and say which blocks of the operands a step takes.

A kernel runs once for each point of its grid, on the blocks that index maps give. An axis of the grid is a factor if a
device may run some of its steps alone: its index goes, as it is or divided by a number, into one dimension of each
array that it touches, the body does not look at it, and steps leave nothing for others. `jax.vmap` of a kernel adds
such an axis. For two devices, in a grid of (4, 3)::

    x: f32[32,6]  blocks (8, 2), at (i, j)   f32[16,6]  axis 0 goes through dimension 0, a block of 8 rows a step
    b: f32[6]     blocks (2,), at (j,)       f32[6]     whole
    y: f32[4,6]   blocks (1, 2), at (i, j)   f32[2,6]

Source: the documentation of `jax.experimental.pallas`, "Grids and BlockSpecs".
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxdist import compat
from jaxdist.ir.interpreter import bodies, called, walk
from jaxdist.placements.model.factors import FACTORS, Dims, Factors, Params, Shapes
from jaxdist.placements.model.values import Split, aval_of

Places = dict[tuple[int, int], Fraction]  # by array and dimension, the entries that a step takes


def by_grid(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    """Return the axes of a kernel's grid along which its steps are independent, as factors."""
    mapping, arrays = params["grid_mapping"], [*ins, *outs]
    first = len(arrays) - len(mapping.block_mappings)  # operands before those with blocks: lengths of axes, tables
    dims: list[list[int | None]] = [[None] * len(shape) for shape in arrays]
    units, why = dict[tuple[int, int], Fraction](), dict[tuple[int, int], str]()
    for axis in range(len(mapping.grid)):
        places, reasons = _places(params, axis, first, len(ins))
        kept = {k - len(ins) for k in range(len(ins), len(arrays)) if all(array != k for array, _ in places)}
        reason = next(iter([*reasons, *_of_body(params, axis, kept)]), "") if places else ""
        for k, d in places:
            if not reason and dims[k][d] is None:
                dims[k][d], units[k, d] = axis, places[k, d]
            if reason or kept:
                why[k, d] = reason or f"all steps along axis {axis} of its grid write to one result"
    both: tuple[Dims, ...] = tuple(map(tuple, dims))
    return Factors(both[: len(ins)], both[len(ins) :], units=units, why=why, params=_shorter(both, units))


def _places(params: Params, axis: int, first: int, operands: int) -> tuple[Places, list[str]]:
    """Return the dimensions that an axis of a grid goes through, and why they can't be cut, if so."""
    mapping = params["grid_mapping"]
    places, reasons = Places(), list[str]()
    if not isinstance(mapping.grid[axis], int):
        return places, reasons  # it depends on values
    for k, block in enumerate(mapping.block_mappings, first):
        indices = _divided(compat.closed(block.index_map_jaxpr), axis, mapping.grid[axis])
        if len(indices) != len(block.block_shape):  # a slice of a size of its own takes two
            reasons += ["a block has a size that depends on values"] if any(indices) else []
            continue
        for d, by in enumerate(indices):
            if by == 0:
                continue
            size, entries = compat.block_size(block.block_shape[d]), block.array_aval.shape[d]
            places[k, d] = Fraction(size or 1, max(by, 1))
            if by < 0 or size is None:
                reasons.append(f"a block's place is a function of program_id({axis})")
            elif -(-entries // size) * by != mapping.grid[axis]:
                reasons.append(f"axis {axis} of its grid does not go through dimension {d} once")
        if sum(array == k for array, _ in places) > 1:
            reasons.append(f"axis {axis} of its grid goes through several dimensions of an array")
    for k, result in params["input_output_aliases"]:
        taken = [(d, unit) for (array, d), unit in places.items() if array == first - mapping.num_index_operands + k]
        made = [(d, unit) for (array, d), unit in places.items() if array == operands + result]
        if taken != made:
            reasons.append("it changes an operand in place that other steps read")
    return places, reasons


def _divided(index_map: ClosedJaxpr, axis: int, steps: Any) -> list[int]:
    """Return for each result of an index map by what it divides the index of an axis.

    0: it does not depend on the axis; -1: it is some other function of it.
    """
    # The values that depend on the axis alone, for each of its steps; None: on something else, too.
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
    by = int(np.argmax(np.asarray(values) == 1))
    return by if by and (np.arange(len(values)) // by == values).all() else -1


def _shorter(dims: Sequence[Dims], units: Mapping[tuple[int, int], Fraction]) -> Any:
    """Return the function that gives the parameters of a kernel with fewer steps along an axis, on slices."""

    def params_of(params: Params, axis: int, split: Split) -> Params:
        mapping = params["grid_mapping"]
        first, count = len(dims) - len(mapping.block_mappings), len(params["out_avals"])

        def cut(aval: Any, k: int) -> Any:
            if axis not in dims[k]:
                return aval
            d = dims[k].index(axis)
            shape = list(aval.shape)
            shape[d] = int(split.rows * units[k, d])
            return aval.update(shape=tuple(shape))

        blocks = tuple(
            block.replace(array_aval=cut(block.array_aval, k)) for k, block in enumerate(mapping.block_mappings, first)
        )
        grid = tuple(split.rows if g == axis else n for g, n in enumerate(mapping.grid))
        estimate = params["cost_estimate"]
        if estimate is not None:
            share = Fraction(split.rows, mapping.grid[axis])
            estimate = replace(estimate, **{f.name: round(getattr(estimate, f.name) * share) for f in fields(estimate)})
        out_avals = tuple(cut(aval, len(dims) - count + o) for o, aval in enumerate(params["out_avals"]))
        shorter = mapping.replace(grid=grid, block_mappings=blocks)
        return {**params, "grid_mapping": shorter, "out_avals": out_avals, "cost_estimate": estimate}

    return params_of


# --- what the body may do


def _of_body(params: Params, axis: int, kept: Collection[int]) -> Iterator[str]:
    """Yield the reasons why steps along an axis depend on each other; `kept`: results that all of them write to."""
    mapping, body = params["grid_mapping"], compat.closed(params["jaxpr"])
    if params["mesh"] is not None:
        yield "it is written for a mesh of cores"
    visible = [g for g in range(len(mapping.grid)) if g not in mapping.vmapped_dims]
    for eqn, _ in walk(body):
        name = eqn.primitive.name
        if name in ("program_id", "num_programs") and visible[eqn.params["axis"]] == axis:
            yield f"the kernel reads {name}({eqn.params['axis']})"
        if others := {type(effect).__name__ for effect in eqn.effects} - _EFFECTS:
            yield f"the kernel's {name} has an effect ({others.pop()})"
        if any(word in name for word in _ACROSS):
            yield f"the kernel uses {name}"
    operands = mapping.num_index_operands + mapping.num_inputs
    taken, results = body.jaxpr.invars[:operands], body.jaxpr.invars[operands:]
    if any(type(e).__name__ in ("WriteEffect", "AccumEffect") and e.input in taken for e in body.jaxpr.effects):
        yield "the kernel writes to an operand"
    # Memory that the steps share: what one leaves there, the next one must not read.
    shared = [v for k, v in enumerate(results) if k in kept or k >= mapping.num_outputs]
    memory, written = dict(zip(shared, shared, strict=True)), Written()
    independent = _writes_first(body.jaxpr, memory, {}, written, [k for k, g in enumerate(visible) if g > axis])
    # In later steps of inner axes, a result's block may be another than the one written to in the first of them.
    maps = [compat.closed(block.index_map_jaxpr) for block in mapping.block_mappings[mapping.num_inputs :]]
    inner = [(g, n) for g, n in enumerate(mapping.grid) if g > axis]
    moving = {results[k] for k in kept if any(not isinstance(n, int) or any(_divided(maps[k], g, n)) for g, n in inner)}
    if not independent or not _writes_first(body.jaxpr, memory, {}, written - moving, ()):
        yield "what a step leaves in memory, the next one may read"


_EFFECTS = {"ReadEffect", "WriteEffect", "AccumEffect", "DebugEffect", "OrderedDebugEffect"}
# Names of what reaches beyond a step: other devices and cores, generators of random numbers.
_ACROSS = ("semaphore", "barrier", "remote", "prng", "axis_index", "device_id")
Written = set[Var]  # memory that has been written to as a whole


def _writes_first(
    jaxpr: Jaxpr, memory: Mapping[Var, Var], known: dict[Var, Any], written: Written, first: Collection[int]
) -> bool:
    """Check that a step reads no scratch memory that it has not written to, and add to `written` what it writes.

    Args:
      jaxpr: the kernel's body, or a part.
      memory: the scratch memory that it sees, by variable.
      known: numbers that are known; those that follow are added.
      written: see above.
      first: axes of the grid of which this is the first step.
    """
    for eqn in jaxpr.eqns:
        touched = {memory[v] for v in eqn.invars if isinstance(v, Var) and v in memory}
        if not touched:
            _evaluate(eqn, known, first)
            continue
        if eqn.primitive.name == "swap" and not _is_used(eqn, jaxpr):
            written |= touched if compat.is_whole(eqn) else set()
            continue
        parts, all_run = _parts(eqn, known)
        after = [set(written) for _ in parts]
        for (closed, operands, turns), seen in zip(parts, after, strict=True):
            changing = {closed.jaxpr.invars[k] for k in turns}
            pairs = list(zip(closed.jaxpr.invars, operands, strict=True))
            inner_memory = {v: memory[x] for v, x in pairs if isinstance(x, Var) and x in memory}
            inner_known = {v: _value(x) if isinstance(x, Literal) else known[x] for v, x in pairs
                           if v not in changing and (isinstance(x, Literal) or x in known)}  # fmt: skip
            if not _writes_first(closed.jaxpr, inner_memory, inner_known, seen, first):
                return False
        if not parts and not touched <= written:
            return False
        if parts and all_run:
            written |= set.intersection(*after)
    return True


# A program, its operands, and the inputs that are others in each turn of a loop.
_Program = tuple[ClosedJaxpr, Sequence[Any], Sequence[int]]


def _parts(eqn: JaxprEqn, known: Mapping[Var, Any]) -> tuple[list[_Program], bool]:
    """Return the programs that an equation may run, and whether it runs one of them for sure."""
    operands = list(eqn.invars)
    if (call := called(eqn)) is not None:
        return [(call, operands, ())], True
    if eqn.primitive.name == "run_scoped":
        scoped = eqn.params["jaxpr"]  # its constants are the operands, and its inputs new memory
        inner = scoped.replace(constvars=[], invars=[*scoped.constvars, *scoped.invars])
        return [(ClosedJaxpr(inner, []), [*operands, *scoped.invars], ())], True
    chosen = bodies(eqn)
    if eqn.primitive.name == "cond":
        choice = _value(operands[0]) if isinstance(operands[0], Literal) else known.get(operands[0])
        chosen = chosen if choice is None else [chosen[min(max(int(choice), 0), len(chosen) - 1)]]
    programs: list[_Program] = [
        (body.closed, [operands[k] for k in body.ins], (*body.carry, *body.xs)) for body in chosen
    ]
    return programs, eqn.primitive.name == "cond"


def _evaluate(eqn: JaxprEqn, known: dict[Var, Any], first: Collection[int]) -> None:
    """Find the result of an equation of known numbers."""
    if eqn.primitive.name == "program_id":
        if eqn.params["axis"] in first:
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


FACTORS["pallas_call"] = by_grid
