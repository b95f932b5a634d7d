"""What is reduced straight into slices: what leads to a mark of `jaxdist.zero`, and what is used in slices alone."""

from __future__ import annotations

from typing import Any

from jaxdist.ir.operations import is_elementwise
from jaxdist.placements.block import Block
from jaxdist.placements.run import run_as_is
from jaxdist.placements.values import REPLICATED, Form, Partial, Split, reshaped


def marked(infer: Any, block: Block) -> dict[int, int]:
    """Of each such value the dimension along which the mark will have it split."""
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


def used_in_slices(walk: Any) -> dict[int, Split]:
    """Summands that were added up on every device though one slice each is used, as of the gradient of what was
    gathered; and that slice. What every device computes on the way to it can be cut as well."""
    block, at = walk.block, walk.at
    taken: dict[int, set[Form]] = {i: {REPLICATED} for i in block.outputs}
    found: dict[int, Split] = {}
    for node, strategy in zip(reversed(block.nodes), reversed(walk.placed.strategies), strict=True):
        takes = [to or REPLICATED for to in strategy.takes]
        for i, given in zip(node.outs, strategy.gives, strict=True):
            if isinstance(given, Partial) and (to := _slice(taken.get(i))) and to.is_tile(walk.n):
                found[i] = to
        whole = strategy.run is run_as_is and not any(isinstance(at[i], Split) for i in node.ins)
        to = _slice(taken.get(node.outs[0])) if whole and len(node.outs) == 1 and not node.eqn.effects else None
        described = walk.factors(node) if to else None
        factor = described.results[0][to.dim] if described and to else None
        if described and to and factor is not None:
            takes = [to.at(dims.index(factor)) if factor in dims else REPLICATED for dims in described.operands]
        for i, form_ in zip(node.ins, takes, strict=True):
            taken.setdefault(i, set()).add(form_)
    return found


def _slice(forms: set[Form] | None) -> Split | None:
    """The only form, if that is a slice."""
    only = next(iter(forms)) if forms and len(forms) == 1 else None
    return only if isinstance(only, Split) else None
