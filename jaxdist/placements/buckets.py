"""The *fuse* pass: small tensors travel in buckets, in the order in which the step makes or needs them.

A message costs a latency and a byte a time: many small tensors go faster as one. Collectives of one kind (operation,
dtype, dtype on the wire) are put together until a bucket is full; a tensor that fills a bucket alone travels as it is,
for copying it would cost more than it saves. Two are never in one bucket if one follows from the other.

Reductions start as soon as the backward pass has made the last of their bucket; shards are gathered when the first
whole array of a bucket is needed, and no sooner.

Reference: Li et al., *PyTorch Distributed*, VLDB 2020, section 3.2.3 (gradient bucketing).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxdist.ir.interpreter import contains, inlined, live, subjaxprs, with_bodies
from jaxdist.ir.operations import SHAPE_ONLY
from jaxdist.ir.primitives import all_reduce_p, first_entry, gather_shards_p, joined, reduce_shard_p, slices
from jaxdist.mesh import Axis
from jaxdist.placements.bucket_order import FUSED, Bucket, given, schedule

_MANY = 8
"""Pieces of a bucket for which `_pieces_of_one_kernel` pays."""


class Fuse:
    """Puts the collectives of a program into buckets. Everything else of it stays as it is, but for the order."""

    def __init__(self, bucket_bytes: int, axes: Sequence[Axis], ahead: int = 0, barriers: bool = True):
        self.bucket_bytes, self.axes, self.ahead, self.barriers = bucket_bytes, axes, ahead, barriers

    def __call__(self, closed: ClosedJaxpr, nested: bool = False) -> ClosedJaxpr:
        """The program with its collectives in buckets."""
        jaxpr = closed.jaxpr
        producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        pace = _Pace(self.ahead, None if self.barriers or not nested else given(jaxpr))
        result = None  # of those gathered because they are results, the latest: one after another, in less memory
        done, out = {*jaxpr.constvars, *jaxpr.invars}, list[JaxprEqn]()
        constants: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for item in schedule(live(jaxpr), self.bucket_bytes, self.ahead):
            if isinstance(item, JaxprEqn):
                out.append(self._within(item))
                done.update(item.outvars)
                continue
            if item.use is not None:
                cause = pace.cause(item, producers)
            else:
                cause = result if item.gathers and not self.barriers else None
            if item.gathers and item.use is None:
                result = item.eqns[0].outvars[0]
            if len(item.eqns) == 1 and cause not in done:
                out += item.eqns
            else:
                out += self._together(item.eqns, cause if cause in done else None, constants)
            done.update(eqn.outvars[0] for eqn in item.eqns)
        fused = jaxpr.replace(eqns=out, constvars=list(constants))
        return ClosedJaxpr(fused, list(constants.values()))

    def _within(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation with the collectives of its bodies in buckets."""
        if not any(contains(sub.jaxpr, FUSED) for sub in subjaxprs(eqn)):
            return eqn
        return eqn.replace(params=with_bodies(eqn, functools.partial(self, nested=True)))

    def _together(self, eqns: Sequence[JaxprEqn], cause: Any, constants: dict[Any, Any]) -> list[JaxprEqn]:
        """The equations in whose place a bucket stands, traced alone; it starts when `cause` is known."""

        def run(*operands: Any) -> list[Any]:
            parts: Sequence[Any] = operands
            if cause is not None:
                parts = self._after(operands[-1], operands[:-1])
            if len(eqns) == 1:
                return [eqns[0].primitive.bind(*parts, **eqns[0].params)]
            with jax.named_scope(f"bucket_of_{len(eqns)}"):  # for the log of `step.wire`, and for traces
                return _TOGETHER[eqns[0].primitive](parts, eqns, _pieces if self.barriers else _pieces_of_one_kernel)

        operands = [eqn.invars[0] for eqn in eqns] + ([] if cause is None else [cause])
        made, _, held = inlined(run, operands, self.axes, [eqn.outvars[0] for eqn in eqns])
        constants.update(held)
        return made

    def _after(self, cause: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands of a gather, but not before `cause` is known."""
        if self.barriers:
            return lax.optimization_barrier((*operands, cause))[:-1]
        ready = _always(cause)  # as a part of what computes the operand
        return [jnp.where(ready, x, jnp.zeros_like(x)) for x in operands]


class _Pace:
    """When to gather what is used within the step: at most so many bytes before it is used.

    Nothing that a gather of stored shards takes has to be computed first: without more XLA would do all of them first,
    and one for the forward and the backward pass.
    """

    def __init__(self, ahead: int, first: Any):
        self.ahead, self.first = ahead, first
        self._gathered: list[tuple[int, Any]] = []  # its bytes, and what the first use of it takes besides

    def cause(self, bucket: Bucket, producers: Mapping[Any, JaxprEqn]) -> Any:
        """The variable that has to be computed before `bucket` is gathered, if there is one."""
        assert bucket.use is not None
        size, cause = bucket.bytes, self.first
        for earlier, taken in reversed(self._gathered):
            if size >= self.ahead and taken is not None:
                cause = taken
                break
            size += earlier
        computed = [
            v
            for v in bucket.use.invars
            if not isinstance(v, Literal) and v in producers and producers[v].primitive is not gather_shards_p
            and jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size  # type: ignore[attr-defined]
        ]  # fmt: skip
        self._gathered.append((bucket.bytes, _before_form(computed[0], producers) if computed else None))
        return cause


def _before_form(v: Any, producers: Mapping[Any, JaxprEqn]) -> Any:
    """The value of which `v` is only another form.

    XLA folds a reshape into the product that takes it, and then drops it from the barrier as a value without use.
    """
    while (
        v in producers and producers[v].primitive.name in SHAPE_ONLY and not isinstance(producers[v].invars[0], Literal)
    ):
        before = producers[v].invars[0]
        if before not in producers or producers[before].primitive is gather_shards_p:
            break
        v = before
    return v


def _always(x: Any) -> Any:
    """True when `x` is known; XLA does not know that it always is."""
    first = first_entry(x).real
    if not jnp.issubdtype(first.dtype, jnp.floating):
        return first.astype(jnp.uint8) | 1 != 0
    wide = first if first.dtype.itemsize >= 4 else first.astype(jnp.float32)
    return lax.bitcast_convert_type(wide, jnp.dtype(f"uint{8 * wide.dtype.itemsize}")) | 1 != 0


_Unpack = Callable[[Any, Sequence[int]], list[Any]]
"""``unpack(x, sizes)``: `x` in pieces of these sizes along its last dimension."""


def _reduced_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn], unpack: _Unpack) -> list[Any]:
    """The reduction of several tensors as that of one."""
    whole = all_reduce_p.bind(jnp.concatenate([x.reshape(-1) for x in parts]), **eqns[0].params)
    pieces = unpack(whole, [x.size for x in parts])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)]


def _scattered_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn], unpack: _Unpack) -> list[Any]:
    """This device's slices of several reductions: what goes to one device lies together."""
    params = eqns[0].params
    rows = [slices(x, e.params["dim"], params["devices"]) for x, e in zip(parts, eqns, strict=True)]
    flat = jnp.concatenate([r.reshape(r.shape[0], -1) for r in rows], 1)
    mine = reduce_shard_p.bind(flat, **{**params, "dim": 0})
    pieces = unpack(mine.reshape(-1), [r[0].size for r in rows])
    return [piece.reshape(r.shape[1:]) for piece, r in zip(pieces, rows, strict=True)]


def _gathered_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn], unpack: _Unpack) -> list[Any]:
    """Several arrays from everyone's slices."""
    params = eqns[0].params
    devices = params["devices"]
    flat = jnp.concatenate([x.reshape(1, -1) for x in parts], 1)
    whole = gather_shards_p.bind(flat, **{**params, "dim": 0, "size": devices})
    pieces = unpack(whole, [x.size for x in parts])
    return [
        joined(piece.reshape(devices, *x.shape), e.params["dim"], e.params["size"])
        for piece, x, e in zip(pieces, parts, eqns, strict=True)
    ]


def _pieces(x: Any, sizes: Sequence[int]) -> list[Any]:
    """As `_Unpack`."""
    ends = itertools.accumulate(sizes)
    return [lax.slice_in_dim(x, end - size, end, axis=x.ndim - 1) for end, size in zip(ends, sizes, strict=True)]


def _pieces_of_one_kernel(x: Any, sizes: Sequence[int]) -> list[Any]:
    """As `_pieces`, but XLA is not told where in the bucket they are.

    It makes a slice a part of what takes it, an optimizer's update say. Where it knows the place, the updates of alike
    parameters are kernels of their own, 10 ms each to compile; else they are one.
    """
    if len(sizes) < _MANY:
        return _pieces(x, sizes)
    places = [np.uint32(end - size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    places = lax.cond(_always(x), lambda: places, lambda: [place + 1 for place in places])
    return [lax.dynamic_slice_in_dim(x, i, size, axis=x.ndim - 1) for i, size in zip(places, sizes, strict=True)]


_TOGETHER = {
    all_reduce_p: _reduced_together,
    reduce_shard_p: _scattered_together,
    gather_shards_p: _gathered_together,
}
