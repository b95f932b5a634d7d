"""Values that lead to a mark of `jaxdist.zero`: what is reduced for them goes straight into slices."""

from __future__ import annotations

from typing import Any

from jaxdist.ir.operations import is_elementwise
from jaxdist.placements.block import Block
from jaxdist.placements.values import reshaped


def marked(infer: Any, block: Block) -> dict[int, int]:
    """Of each such value the dimension along which the mark will have it split.

    Args:
      infer: which places the block (`jaxdist.placements.infer.Infer`).
      block: its operations.
    """
    found: dict[int, int] = {}
    for node in reversed(block.nodes):
        if node.name == "jaxdist_shard":
            dim = infer.choose(block.avals[node.ins[0]].shape)
            if dim is not None and node.eqn.params["role"] != "requested" and infer.level(node) > 0:
                found.setdefault(node.ins[0], dim)
            continue
        dims = [found[o] for o in node.outs if o in found]
        if not dims:
            continue
        dim = dims[0]
        if node.name == "transpose":
            found.setdefault(node.ins[0], node.eqn.params["permutation"][dim])
        elif node.name in ("reshape", "squeeze"):
            old, new = (block.avals[i].shape for i in (node.ins[0], node.outs[0]))
            before = reshaped(infer.shard(dim, new[dim]), new, old)
            if before is not None and before.is_tile(infer.devices):
                found.setdefault(node.ins[0], before.dim)
        elif is_elementwise(node.eqn.primitive) or node.name == "jaxdist_all_reduce":
            shape = block.avals[node.outs[0]].shape
            for i in node.ins:
                if block.avals[i].shape == shape:
                    found.setdefault(i, dim)
    return found
