"""Run owners: operands go to them and results come back, each way in one all-to-all for each dtype on the wire.

For four devices, where d0 owns matrix A and d2 owns B; ``A1`` is the slice of A that d1 has::

    device   sends to d0, d1, d2, d3      has after the all-to-all    returns in the same way
    d0       A0   -   B0   -              A0 A1 A2 A3                 a slice of the result of A to each
    d1       A1   -   B1   -              nothing                     zeros
    d2       A2   -   B2   -              B0 B1 B2 B3                 a slice of the result of B to each
    d3       A3   -   B3   -              nothing                     zeros
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.communicators import exchange
from jaxdist.ir.primitives import joined, slices
from jaxdist.placements.model.block import Node
from jaxdist.placements.model.strategy import DeviceContext, Sends, Strategy
from jaxdist.placements.model.values import REPLICATED, Form, Placement, Split, form, local_shape
from jaxdist.placements.rules.context import RuleContext, special
from jaxdist.placements.search.owners.assignment import Owned, Work, owners_p


@special(owners_p.name)
def _owners(ctx: RuleContext, node: Node, ins: Sequence[Placement]) -> Strategy:
    assert isinstance(node, Owned)
    first = node.works[0]
    if first.owner is None:  # a stack
        placed = first.placed
        run = lambda device, node, xs: device.inlined(placed, xs)
        return Strategy(placed.in_forms, placed.out_placements, run, bodies=[placed])
    infer, avals = ctx.infer, ctx.block.avals

    def sliced(i: int) -> Any:
        dim = infer.shard_dim(avals[i].shape)
        return REPLICATED if dim is None else infer.shard(dim, avals[i].shape[dim])

    def arriving_form(i: int, p: Placement) -> Form:
        if not isinstance(p, Split) or p.whole:
            return REPLICATED
        return form(p if p.is_tile(ctx.n) else sliced(i))

    in_forms = [arriving_form(i, p) for i, p in zip(node.ins, ins, strict=True)]
    out_placements: list[Placement] = [sliced(o) for o in node.outs]
    by_owner: dict[int, list[Work]] = {}
    for work in node.works:
        by_owner.setdefault(cast(int, work.owner), []).append(work)
    # Owners work side by side: the step takes as long as the one with most to do.
    busiest = max(by_owner.values(), key=lambda works: sum(work.seconds for work in works))
    arriving = {i: target for i, target in zip(node.ins, in_forms, strict=True) if isinstance(target, Split)}
    leaving = dict(zip(node.outs, out_placements, strict=True))
    sent = {k: list(dict.fromkeys(i for work in works for i in work.component.ins if i in arriving))
           for k, works in by_owner.items()}  # fmt: skip
    returned = {k: [o for work in works for o in work.component.outs] for k, works in by_owner.items()}
    there = _Parcels(sent, {i: (target.shape(avals[i].shape), avals[i].dtype) for i, target in arriving.items()})
    back = _Parcels(
        returned, {o: (local_shape(avals[o].shape, target), avals[o].dtype) for o, target in leaving.items()}
    )
    # Each device sends a row to each, also to those that own nothing.
    sends = [Sends("all-to-all", size * ctx.n**2, of_state=True) for size in (*there.row_bytes(), *back.row_bytes())]
    owners = _Run(by_owner, arriving, leaving, there, back, ctx.n)
    return Strategy(in_forms, out_placements, owners, bodies=[work.placed for work in busiest], sends=sends)


@dataclass(frozen=True)
class _Run:
    """Send operands to owners, run the work, and return the results."""

    works: dict[int, list[Work]]  # by owner
    arriving: dict[int, Split]  # the slices of each operand that is sent
    leaving: dict[int, Placement]  # the form in which each result is left
    there: "_Parcels"
    back: "_Parcels"
    parts: int  # number of devices that share a matrix

    def __call__(self, device: DeviceContext, node: Node, xs: list[Any]) -> Sequence[Any]:
        held, there, back = dict(zip(node.ins, xs, strict=True)), self.there, self.back

        def run_works(owner: int, arrived: Parcels) -> Parcels:
            """Run the work of an owner between the two exchanges; -1 owns nothing."""
            whole_values = dict(held)
            for i, parts in there.opened(owner, arrived):
                whole_values[i] = joined(parts, self.arriving[i].dim, self.arriving[i].size)
            rows: dict[int, Any] = {}
            for work in self.works.get(owner, ()):
                results = device.inlined(work.placed, [whole_values[i] for i in work.component.ins])
                for o, x in zip(work.component.outs, results, strict=True):
                    target = self.leaving[o]
                    whole = not isinstance(target, Split)
                    rows[o] = jnp.stack([x] * self.parts) if whole else slices(x, target.dim, self.parts)
            return back.closed(owner, rows, self.parts)

        owners = sorted(self.works)
        others = [-1] if len(owners) < self.parts else []  # they own nothing, and return zeros
        # All devices run one program: each takes the branch of the owner that it is.
        branches = [functools.partial(run_works, k) for k in (*owners, *others)]
        turn = [owners.index(k) if k in self.works else len(owners) for k in range(self.parts)]
        parcels = [there.closed(k, {i: held[i][None] for i in self.arriving}, 1) for k in range(self.parts)]
        sent = {key: jnp.concatenate([row[key] for row in parcels]) for key in there.widths}
        trade = lambda x: lax.all_to_all(x, device.axis, split_axis=0, concat_axis=0, tiled=True)
        arrived = jax.tree.map(trade, sent)
        returned = jax.tree.map(trade, lax.switch(jnp.asarray(turn)[device.index], branches, arrived))
        results_by_value: dict[int, Any] = {}
        for k in owners:
            row = {key: lax.slice_in_dim(x, k, k + 1) for key, x in returned.items()}
            results_by_value.update((o, parts[0]) for o, parts in back.opened(k, row))
        return [results_by_value[o] for o in node.outs]


Parcels = dict[str, Any]  # arrays with one row per device, by dtype on the wire


class _Parcels:
    """The messages between an owner and each device: the position of each value in a row."""

    def __init__(self, contents: dict[int, list[int]], types: dict[int, tuple[tuple[int, ...], Any]]):
        self._types = types
        self._places: dict[int, list[tuple[int, str, int]]] = {}
        self.widths: dict[str, int] = {}
        for owner, values in contents.items():
            ends: dict[str, int] = {}
            for i in values:
                shape, dtype = types[i]
                # By the dtype on the wire: float16 and bfloat16 are both sent as uint16, in one message.
                key = exchange.bits(jnp.zeros((), dtype))[0].dtype.name
                self._places.setdefault(owner, []).append((i, key, ends.get(key, 0)))
                ends[key] = ends.get(key, 0) + math.prod(shape)
            for key, end in ends.items():
                self.widths[key] = max(end, self.widths.get(key, 0))

    def row_bytes(self) -> list[int]:
        """Return the bytes of a row, for each dtype on the wire."""
        return [width * np.dtype(key).itemsize for key, width in self.widths.items()]

    def closed(self, owner: int, values: dict[int, Any], rows: int) -> Parcels:
        """Pack an owner's values, row first, into rows; for a device that owns nothing, pack zeros."""
        parts: dict[str, list[Any]] = {key: [] for key in self.widths}
        for i, key, _ in self._places.get(owner, ()):
            parts[key].append(exchange.bits(jnp.asarray(values[i]))[0].reshape(rows, -1))
        out = {}
        for key, width in self.widths.items():
            row = jnp.concatenate(parts[key], 1) if parts[key] else jnp.zeros((rows, 0), key)
            out[key] = jnp.pad(row, [(0, 0), (0, width - row.shape[1])])
        return out

    def opened(self, owner: int, rows: Parcels) -> Iterator[tuple[int, Any]]:
        """Yield each value of an owner, with the rows as its first dimension."""
        for i, key, start in self._places.get(owner, ()):
            shape, dtype = self._types[i]
            raw = lax.slice_in_dim(rows[key], start, start + math.prod(shape), axis=1)
            back = exchange.bits(jnp.zeros((), dtype))[1]
            yield i, back(raw.reshape(len(raw), *shape))
