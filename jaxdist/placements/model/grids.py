"""Pallas kernels by their grids: the axes of a grid are loops, and say which blocks of the operands a step takes.

A kernel runs once for each point of its grid, on the blocks that index maps give. An axis of the grid is a factor if a
device may run some of its steps alone: its index goes, unchanged or divided by a number, into one dimension of each
array that it touches, the body does not look at it, and steps leave nothing for others. `jax.vmap` of a kernel adds
such an axis. For two devices, in a grid of (4, 3)::

    x: f32[32,6]  blocks (8, 2), at (i, j)   f32[16,6]  axis 0 goes through dimension 0, a block of 8 rows per step
    b: f32[6]     blocks (2,), at (j,)       f32[6]     whole
    y: f32[4,6]   blocks (1, 2), at (i, j)   f32[2,6]

Source: the documentation of `jax.experimental.pallas`, "Grids and BlockSpecs".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from jaxdist import compat
from jaxdist.placements.model.factors import FACTORS, Dims, Factors, Params, Shapes
from jaxdist.placements.model.kernel_bodies import divided, why_dependent, why_no_sum
from jaxdist.placements.model.values import Split

Places = dict[tuple[int, int], tuple[int, int]]  # by array and dimension, a block's entries, and the steps it is for


def by_grid(params: Params, ins: Shapes, outs: Shapes) -> Factors:
    """Return the axes of a kernel's grid along which its steps are independent, as factors."""
    mapping, arrays = params["grid_mapping"], [*ins, *outs]
    first = len(arrays) - len(mapping.block_mappings)  # operands before those with blocks: lengths of axes, tables
    dims: list[list[int | None]] = [[None] * len(shape) for shape in arrays]
    units, why = dict[tuple[int, int], Fraction](), dict[tuple[int, int], str]()
    summed, together = set[int](), dict[int, int]()
    for axis in range(len(mapping.grid)):
        places, reasons = _places(params, axis, first, len(ins))
        kept = {k - len(ins) for k in range(len(ins), len(arrays)) if all(array != k for array, _ in places)}
        no_sum = why_no_sum(params, axis, kept) if places and kept else ""
        is_sum = bool(kept) and not no_sum
        dependent = [*reasons, *why_dependent(params, axis, kept, is_sum)] if places else []
        shared = [f"all steps along axis {axis} of its grid write to one result, and {no_sum}"] if no_sum else []
        for k, d in places:
            if not dependent and dims[k][d] is None:
                dims[k][d], units[k, d] = axis, Fraction(*places[k, d])
                if places[k, d][1] > 1:  # no device has a part of a block
                    together[axis] = math.lcm(together.get(axis, 1), places[k, d][1])
                summed |= {axis} if is_sum else set()
            if whys := [*reasons, *shared, *dependent]:
                why[k, d] = whys[0]
    # `counts_padding`: a step on padding adds its term to a sum, and zeros in its operands may not make that zero.
    both: tuple[Dims, ...] = tuple(map(tuple, dims))
    return Factors(
        both[: len(ins)], both[len(ins) :], dict.fromkeys(summed, "sum"), counts_padding=True,
        params=_shorter(both, units), units=units, together=together, why=why,
    )  # fmt: skip


def _places(params: Params, axis: int, first: int, operands: int) -> tuple[Places, list[str]]:
    """Return the dimensions that an axis of a grid goes through, and why they can't be cut, if so."""
    mapping = params["grid_mapping"]
    places, reasons = Places(), list[str]()
    if not isinstance(mapping.grid[axis], int):
        return places, reasons  # it depends on values
    for k, block in enumerate(mapping.block_mappings, first):
        indices = divided(compat.closed(block.index_map_jaxpr), axis, mapping.grid[axis])
        if len(indices) != len(block.block_shape):  # a slice of a size of its own takes two
            reasons += ["a block has a size that depends on values"] if any(indices) else []
            continue
        for d, by in enumerate(indices):
            if by == 0:
                continue
            size, entries = compat.block_size(block.block_shape[d]), block.array_aval.shape[d]
            places[k, d] = size or 1, max(by, 1)
            if by < 0 or size is None:
                reasons.append(f"a block's place is a function of program_id({axis})")
            elif -(-entries // size) * by != mapping.grid[axis]:
                reasons.append(f"axis {axis} of its grid does not go through dimension {d} once")
        if sum(array == k for array, _ in places) > 1:
            reasons.append(f"axis {axis} of its grid goes through several dimensions of an array")
    # The operand and the result share a buffer: a step that reads elsewhere than it writes may find there what another
    # step wrote, and on several devices other steps come before it.
    for k, result in params["input_output_aliases"]:
        taken = [(d, unit) for (array, d), unit in places.items() if array == first - mapping.num_index_operands + k]
        made = [(d, unit) for (array, d), unit in places.items() if array == operands + result]
        if taken != made:
            reasons.append("it changes an operand in place that other steps read")
    return places, reasons


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
            # Unscaled, the estimate would tell the compiler that a device's part costs as much as the whole kernel.
            share = Fraction(split.rows, mapping.grid[axis])
            estimate = replace(estimate, **{f.name: round(getattr(estimate, f.name) * share) for f in fields(estimate)})
        out_avals = tuple(cut(aval, len(dims) - count + o) for o, aval in enumerate(params["out_avals"]))
        shorter = mapping.replace(grid=grid, block_mappings=blocks)
        return {**params, "grid_mapping": shorter, "out_avals": out_avals, "cost_estimate": estimate}

    return params_of


FACTORS["pallas_call"] = by_grid
