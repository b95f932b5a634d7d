"""Infer: how each value of a step is placed, and in which form each operation takes its operands.

Nothing is traced. Every rank infers the same: nothing depends on the order of a set or on an address.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxdist.machine import VIRTUAL, Machine
from jaxdist.mesh import MODEL, Axis
from jaxdist.placements.model.block import Block, Node, flatten
from jaxdist.placements.model.strategy import MeshAxis, Propagation, itemsize, nbytes
from jaxdist.placements.model.values import Form, Partial, Placement, Split, form, in_one_collective, tile, wide
from jaxdist.placements.search.marks import slices_wanted
from jaxdist.placements.search.options import best
from jaxdist.placements.search.owners import with_owners


class Infer:
    """Settles placements over one axis of a mesh."""

    def __init__(
        self,
        axis: Axis,
        shard_dim: Callable[[tuple[int, ...]], int | None],
        level: int | None = None,
        machine: Machine = VIRTUAL,
        split: str | None = None,
        outer_axes: Sequence[Axis] = (),
        inner_axes: Sequence[Axis] = (),
    ):
        self.axis = MeshAxis(axis.name, axis.size, tuple(outer_axes), tuple(inner_axes), machine)
        self.devices, self.split = axis.size, split
        # Along the model axis parameters come in slices: products with these are not work on whole matrices.
        self._may_own = axis.name != MODEL or split == "owners"
        # The dimension along which to shard an array of a shape, or None: state is sharded along the last axis only.
        self.shard_dim = (lambda shape: None) if inner_axes else shard_dim
        self._shard_dim_on_last_axis, self._level, self.link = shard_dim, level, machine.link(axis)
        # One jaxpr may run in both passes: shards are fetched in each, and only backward sums are gradients.
        self._blocks: dict[tuple[int, bool], tuple[Any, Block]] = {}
        self._placed: dict[Any, Propagation] = {}
        self._slices_wanted: dict[Block, dict[int, int]] = {}

    def over(self, mesh: Sequence[Axis], k: int) -> "Infer":
        """Return an `Infer` over axis `k` of a mesh; `jaxdist.zero` slices along the last axis."""
        return Infer(
            mesh[k], self._shard_dim_on_last_axis, self._level, self.axis.machine, self.split, mesh[:k], mesh[k + 1 :]
        )

    def block(self, closed: ClosedJaxpr, backward: bool = False) -> Block:
        """Return the block of a jaxpr; each is flattened once."""
        key = (id(closed.jaxpr), backward)
        if key not in self._blocks:
            self._blocks[key] = closed, flatten(closed, backward)  # keeps the id unique
        return self._blocks[key][1]

    def place(
        self,
        block: Block,
        ins: Sequence[Placement],
        wants: Sequence[Form | None] | None = None,
        may_stay_partial: frozenset[int] = frozenset(),
    ) -> Propagation:
        """Settle the placements of a block: at the least cost, with owners where they pay.

        Args:
          block: the operations.
          ins: the placements of the inputs.
          wants: the forms in which to return outputs, or None to return them unchanged.
          may_stay_partial: outputs that a surrounding loop adds up. A body that two loops share is placed for each.
        """
        key: Any = block, tuple(ins), may_stay_partial
        if key not in self._placed:
            placed = best(self, block, ins, may_stay_partial)
            if self._may_own and (owned := with_owners(self, placed)) is not None:
                # In `owned` a component is one operation: a surrounding loop asks for the count from before.
                placed = replace(best(self, owned, ins, may_stay_partial), matrices=placed.matrices)
            self._placed[key] = placed
        if wants is None:
            return self._placed[key]
        returning_key = (*key, tuple(wants))
        if returning_key not in self._placed:
            # This changes messages only: the placements are shared.
            self._placed[returning_key] = self._placed[key].returning(self, wants)
        return self._placed[returning_key]

    def slices_wanted(self, block: Block) -> dict[int, int]:
        """Map each value that leads to a mark of `jaxdist.zero` to the dimension to split."""
        if block not in self._slices_wanted:
            self._slices_wanted[block] = slices_wanted(self, block)
        return self._slices_wanted[block]

    def level(self, node: Node) -> int:
        """Return the level of a mark; 0 disables it."""
        level_of_mark, role = node.eqn.params["level"], node.eqn.params["role"]
        return level_of_mark if self._level is None or role == "requested" else self._level

    def shard(self, dim: int, size: int) -> Split:
        """Return the slices of a marked value along a dimension."""
        return tile(dim, size, self.devices, of_state=True)

    # --- the cost of changing a form

    def reshard(self, placement: Placement, target: Form, aval: Any) -> str:
        """Return the collective that brings a value into a form, or "" if none is needed."""
        if isinstance(placement, Partial):
            if isinstance(target, Partial):
                return "" if target.unreduced_axes == placement.unreduced_axes else "all-reduce"
            scattered = isinstance(target, Split) and in_one_collective(placement, target, self.devices, aval.dtype)
            return "reduce-scatter" if scattered else "all-reduce"
        if isinstance(placement, Split) and not placement.whole and form(placement) != target:
            if isinstance(target, Partial) and placement.outer == 1:
                return ""  # a slice among zeros is a summand
            if isinstance(target, Split) and in_one_collective(placement, target, self.devices, aval.dtype):
                return "all-to-all"
            return "all-gather"
        return ""

    def sent(self, placement: Placement, target: Form, aval: Any) -> float:
        """Return the bytes that a device sends to bring a value into a form."""
        kind = self.reshard(placement, target, aval)
        return self.link.sent(kind, nbytes(aval)) if kind else 0

    def message_bytes(self, kind: str, placement: Placement, target: Form, aval: Any) -> int:
        """Return the bytes of a whole value in a message: with padding, in the type in which it is added."""
        split = placement if isinstance(placement, Split) else target
        shape = list(aval.shape)
        # Slices are sent with their padding, summands without any.
        if isinstance(split, Split) and kind != "all-reduce":
            shape[split.dim] = split.rows * self.devices
        adds = isinstance(placement, Partial) and not placement.bits
        return math.prod(shape) * itemsize(wide(aval.dtype) if adds else aval.dtype)
