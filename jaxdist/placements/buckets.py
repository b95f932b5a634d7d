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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist.ir.interpreter import contains, inlined, live, subjaxprs, with_bodies
from jaxdist.ir.operations import CHEAP, SHAPE_ONLY
from jaxdist.ir.primitives import all_reduce_p, first_entry, gather_shards_p, joined, reduce_shard_p, slices
from jaxdist.mesh import Axis

FUSED = {all_reduce_p, reduce_shard_p, gather_shards_p}
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
        pace = _Pace(self.ahead, None if self.barriers or not nested else _given(jaxpr))
        result = None  # of those gathered because they are results, the latest: one after another, in less memory
        done, out = {*jaxpr.constvars, *jaxpr.invars}, list[JaxprEqn]()
        constants: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for eqns, use in _Schedule(live(jaxpr), self.bucket_bytes, self.ahead).run():
            cause = None
            if use is not None:
                cause = pace.cause(eqns, use, producers)
            elif _gathers(eqns[0]):
                cause, result = None if self.barriers else result, eqns[0].outvars[0]
            if len(eqns) == 1 and cause not in done:
                out.append(self._within(eqns[0]))
            else:
                out += self._together(eqns, cause if cause in done else None, constants)
            done.update(v for eqn in eqns for v in eqn.outvars)
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


@dataclass
class _Schedule:
    """The operations in an order to run them in, collectives in buckets.

    A collective waits in the bucket of its kind until that is full or its result is needed, and with it what is cheap
    between it and what makes its operand, or takes its result.
    """

    eqns: Sequence[JaxprEqn]
    bucket_bytes: int
    ahead: int

    def run(self) -> Iterator[tuple[list[JaxprEqn], JaxprEqn | None]]:
        """Buckets, and operations alone; of shards that are gathered, with the first operation that takes one."""
        eqns, count = self.eqns, len(self.eqns)
        maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self._needs = [{maker[v] for v in eqn.invars if not isinstance(v, Literal) and v in maker} for eqn in eqns]
        self._needed = [count] * count
        for i in reversed(range(count)):
            for j in self._needs[i]:
                self._needed[j] = i
        waits = self._waiting()
        ready: list[int] = []  # the place of what it waits for
        for i in range(count):
            ready.append(max((ready[j] for j in self._needs[i]), default=-1) if i in waits else i)
        self._done, self._depth = set[int](), [0] * count
        self._open: dict[Any, list[int]] = defaultdict(list)
        for i in sorted(range(count), key=lambda i: (ready[i], i)):
            before = [self._depth[j] + (eqns[j].primitive in FUSED) for j in self._needs[i] if j not in self._done]
            self._depth[i] = max(before, default=0)  # those that follow from each other share no bucket
            if i not in waits:
                yield from self._emit(i)
            elif eqns[i].primitive in FUSED:
                yield from self._enter(i)
        for i in range(count):
            yield from self._emit(i)

    def _waiting(self) -> set[int]:
        """Collectives, and the cheap operations before and after them."""
        found, after = set[int](), set[int]()
        for i in reversed(range(len(self.eqns))):
            if self.eqns[i].primitive in FUSED or (i in after and self.eqns[i].primitive.name in CHEAP):
                found.add(i)
                after |= self._needs[i]
        for i, eqn in enumerate(self.eqns):
            if eqn.primitive.name in CHEAP and not found.isdisjoint(self._needs[i]):
                found.add(i)
        return found

    def _enter(self, i: int) -> Iterator[tuple[list[JaxprEqn], JaxprEqn | None]]:
        """Put a collective into a bucket, and send what is full."""
        bucket, size, limit = self._open[self._kind(i)], _bytes(self.eqns[i]), self._limit(i)
        if _gathers(self.eqns[i]):
            bucket.append(i)
        elif not size or size >= limit:
            yield from self._emit(i)
        else:
            if bucket and sum(_bytes(self.eqns[k]) for k in bucket) + size > limit:
                yield from self._emit(bucket[0])
            self._open[self._kind(i)].append(i)

    def _emit(self, i: int) -> Iterator[tuple[list[JaxprEqn], JaxprEqn | None]]:
        if i in self._done:
            return
        members = self._bucket(i) if self.eqns[i].primitive in FUSED else [i]
        self._done.update(members)
        for j in sorted(j for k in members for j in self._needs[k]):
            yield from self._emit(j)
        use = min(self._needed[k] for k in members)
        taken = _gathers(self.eqns[i]) and use < len(self.eqns)
        yield [self.eqns[k] for k in members], self.eqns[use] if taken else None

    def _bucket(self, i: int) -> list[int]:
        """What travels with a collective: of reductions all that wait, of gathers those that are needed next."""
        bucket = self._open[self._kind(i)]
        if not _gathers(self.eqns[i]):
            members = list(bucket) if i in bucket else [i]
        else:
            members, size = [i], _bytes(self.eqns[i])
            for k in sorted(set(bucket) - {i}, key=lambda k: (self._needed[k], k)):
                more, limit = _bytes(self.eqns[k]), self._limit(k)
                if 0 < more < limit and size + more > limit:
                    break
                if 0 < more < limit and size:
                    members.append(k)
                    size += more
        self._open[self._kind(i)] = [k for k in bucket if k not in members]
        return members

    def _kind(self, i: int) -> tuple[Any, ...]:
        eqn = self.eqns[i]
        params = {k: v for k, v in eqn.params.items() if k not in ("dim", "size")}
        return eqn.primitive, eqn.invars[0].aval.dtype, tuple(sorted(params.items())), self._depth[i]  # type: ignore[attr-defined]

    def _limit(self, i: int) -> int:
        if not _gathers(self.eqns[i]):
            return self.bucket_bytes
        return min(self.bucket_bytes, self.ahead if self._needed[i] < len(self.eqns) else 4 * self.ahead)


def _gathers(eqn: JaxprEqn) -> bool:
    return eqn.primitive is gather_shards_p


def _bytes(eqn: JaxprEqn) -> int:
    """Of the whole array."""
    aval: Any = eqn.outvars[0].aval if _gathers(eqn) else eqn.invars[0].aval
    return aval.size * jnp.dtype(eqn.params.get("wire") or aval.dtype).itemsize


def _given(jaxpr: Jaxpr) -> Any:
    """An input of a body that is computed just before it: one of its own floats, and no shard."""
    shards = {eqn.invars[0] for eqn in jaxpr.eqns if _gathers(eqn)}
    for v in reversed(jaxpr.invars):  # cotangents come last
        aval: Any = v.aval
        if v not in shards and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size:
            return v
    return None


class _Pace:
    """When to gather what is used within the step: at most so many bytes before it is used.

    Nothing that a gather of stored shards takes has to be computed first: without more XLA would do all of them first,
    and one for the forward and the backward pass.
    """

    def __init__(self, ahead: int, first: Any):
        self.ahead, self.first = ahead, first
        self._gathered: list[tuple[int, Any]] = []  # its bytes, and what the first use of it takes besides

    def cause(self, bucket: Sequence[JaxprEqn], use: JaxprEqn, producers: Mapping[Any, JaxprEqn]) -> Any:
        """The variable that has to be computed before `bucket` is gathered, if there is one."""
        own = size = sum(map(_bytes, bucket))
        cause = self.first
        for earlier, taken in reversed(self._gathered):
            if size >= self.ahead and taken is not None:
                cause = taken
                break
            size += earlier
        computed = [
            v
            for v in use.invars
            if not isinstance(v, Literal) and v in producers and not _gathers(producers[v])
            and jnp.issubdtype(v.aval.dtype, jnp.floating) and v.aval.size  # type: ignore[attr-defined]
        ]  # fmt: skip
        self._gathered.append((own, _before_form(computed[0], producers) if computed else None))
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
