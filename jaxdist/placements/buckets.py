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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist.ir.interpreter import contains, has_effect, live, subjaxprs, with_bodies
from jaxdist.ir.primitives import all_reduce_p, first_entry, gather_shards_p, joined, reduce_shard_p, slices
from jaxdist.mesh import AXIS

# What may stand between what makes a tensor and its collective without making that later.
_CHEAP = {
    "mul", "div", "neg", "convert_element_type", "reshape", "squeeze", "transpose", "broadcast_in_dim", "copy",
}  # fmt: skip
_FORM = {"reshape", "squeeze", "transpose", "copy"}
_MANY = 8
"""Pieces of a bucket for which `_pieces_of_one_kernel` pays."""
_FUSED = {all_reduce_p, reduce_shard_p, gather_shards_p}


class Fuse:
    """Puts the collectives of a program into buckets. Everything else of it stays as it is, but for the order.

    Args:
      bucket_bytes: on the wire, of a full bucket. 0: each tensor travels alone.
      devices: of the axis.
      ahead: how many bytes may be gathered before they are used.
      barriers: whether the compiler keeps to ``lax.optimization_barrier``. XLA's for CPUs drops it before it merges
        equal operations and decides on an order; there a gather is made to depend on what has to come before it.
    """

    def __init__(self, bucket_bytes: int, devices: int, ahead: int = 0, barriers: bool = True):
        self.bucket_bytes, self.devices, self.ahead, self.barriers = bucket_bytes, devices, ahead, barriers

    def __call__(self, closed: ClosedJaxpr, nested: bool = False) -> ClosedJaxpr:
        """The program with its collectives in buckets.

        Args:
          closed: the program.
          nested: it is the body of a loop or branch.
        """
        jaxpr = closed.jaxpr
        producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        pace = _Pace(self.ahead, None if self.barriers or not nested else _given(jaxpr))
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
        fused = jaxpr.replace(eqns=out, constvars=list(constants), debug_info=None)
        return ClosedJaxpr(fused, list(constants.values()))

    def _within(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation with the collectives of its bodies in buckets."""
        if not any(contains(sub, _FUSED) for sub in subjaxprs(eqn)):
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
        traced = jax.make_jaxpr(run, axis_env=[(AXIS, self.devices)])(*(v.aval for v in operands))
        constants.update(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        names = dict(zip(traced.jaxpr.invars, operands, strict=True))
        names.update(zip(traced.jaxpr.outvars, (eqn.outvars[0] for eqn in eqns), strict=True))

        def named(atoms: Sequence[Any]) -> list[Any]:
            return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]

        return [eqn.replace(invars=named(eqn.invars), outvars=named(eqn.outvars)) for eqn in traced.eqns]

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

    Args:
      ahead: in bytes.
      first: what the first gather has to wait for.
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
    while v in producers and producers[v].primitive.name in _FORM and not isinstance(producers[v].invars[0], Literal):
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


@dataclass
class _Collective:
    """One collective of a jaxpr.

    Attributes:
      at: its position.
      level: how many collectives it follows from, in the longest chain.
      ready: the position of the equation that makes its operand, but for cheap ones after it.
      needed: that of the first one that takes its result.
    """

    at: int
    level: int
    ready: int
    needed: int
    eqn: JaxprEqn

    @property
    def gathers(self) -> bool:
        return self.eqn.primitive is gather_shards_p

    @property
    def kind(self) -> tuple[Any, ...]:
        aval: Any = self.eqn.invars[0].aval
        params = {k: v for k, v in self.eqn.params.items() if k not in ("dim", "size")}
        return self.eqn.primitive, aval.dtype, tuple(sorted(params.items()))

    @property
    def bytes(self) -> int:
        aval: Any = self.eqn.outvars[0].aval if self.gathers else self.eqn.invars[0].aval
        return aval.size * jnp.dtype(self.eqn.params.get("wire") or aval.dtype).itemsize

    @property
    def order(self) -> tuple[int, int, int]:
        return self.level, self.needed if self.gathers else self.ready, self.at


def _given(jaxpr: Jaxpr) -> Any:
    """An input of a body that is computed just before it: one of its own floats, and no shard."""
    shards = {eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive is gather_shards_p}
    for v in reversed(jaxpr.invars):  # cotangents come last
        aval: Any = v.aval
        if v not in shards and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size:
            return v
    return None


@dataclass
class Bucket:
    """Collectives that travel together.

    Attributes:
      eqns: one or more of one kind.
      bytes: of all of them.
      use: of gathered arrays, the first equation that takes one; None: they are results.
    """

    eqns: list[JaxprEqn]
    bytes: int
    use: JaxprEqn | None = None

    @property
    def gathers(self) -> bool:
        return self.eqns[0].primitive is gather_shards_p


def schedule(eqns: Sequence[JaxprEqn], bucket_bytes: int, ahead: int) -> list[JaxprEqn | Bucket]:
    """The equations in an order to evaluate them in, with the collectives in buckets.

    Args:
      eqns: of a jaxpr, in order.
      bucket_bytes: of a full bucket.
      ahead: how many bytes may be gathered before they are used; of results, before they are complete, four times that.
    """
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [{producer[v] for v in e.invars if not isinstance(v, Literal) and v in producer} for e in eqns]
    needed = [len(eqns)] * len(eqns)
    for i in reversed(range(len(eqns))):
        for j in needs[i]:
            needed[j] = min(needed[j], i)
    last: int | None = None
    for i, eqn in enumerate(eqns):  # effects keep their order
        if has_effect(eqn):
            needs[i] |= set() if last is None else {last}
            last = i
    collectives: list[_Collective] = []
    levels, ready = [0] * len(eqns), [0] * len(eqns)
    for i, eqn in enumerate(eqns):
        level = max((levels[j] for j in needs[i]), default=0)
        made = max((ready[j] for j in needs[i]), default=-1)
        fusible = eqn.primitive in _FUSED and eqn.params["axes"] == (AXIS,)
        if fusible:
            collectives.append(_Collective(i, level, made, needed[i], eqn))
        levels[i] = level + fusible
        ready[i] = made if eqn.primitive.name in _CHEAP else i

    def limit(c: _Collective) -> int:
        if not c.gathers:
            return bucket_bytes
        return min(bucket_bytes, ahead if c.needed < len(eqns) else 4 * ahead)

    # Each bucket of reductions as soon as the backward pass has made its last member; everything else when it is
    # needed, a bucket of gathers with the first of its members.
    buckets = _buckets(collectives, limit)
    gathers = {c.at: bucket for bucket in buckets for c in bucket if c.gathers}
    done: set[int] = set()
    out: list[JaxprEqn | Bucket] = []

    def place(i: int) -> float:
        if i in gathers:
            return gathers[i][0].needed - 0.5
        return i

    def append(bucket: Sequence[_Collective]) -> None:
        first = min(c.needed for c in bucket)
        use = eqns[first] if bucket[0].gathers and first < len(eqns) else None
        out.append(Bucket([c.eqn for c in bucket], sum(c.bytes for c in bucket), use))
        done.update(c.at for c in bucket)

    def emit(targets: Sequence[int]) -> None:
        """Append what the targets need, in order, but not the targets."""
        missing, todo = set(), [j for t in targets for j in needs[t]]
        while todo:
            j = todo.pop()
            if j in done or j in missing:
                continue
            together = [c.at for c in gathers.get(j, ())] or [j]
            missing.update(together)
            todo.extend(k for i in together for k in needs[i])
        for j in sorted(missing, key=place):
            if j in done:
                continue
            if j in gathers:
                emit([c.at for c in gathers[j]])  # a cheap operation on a shard may stand later than the first use
                append(gathers[j])
            else:
                out.append(eqns[j])
                done.add(j)

    for bucket in buckets:
        if not bucket[0].gathers:
            emit([c.at for c in bucket])
            append(bucket)
    for i in range(len(eqns)):
        if i not in done and i not in gathers:
            emit([i])
            out.append(eqns[i])
            done.add(i)
    for i, bucket in gathers.items():
        if i not in done:
            emit([c.at for c in bucket])
            append(bucket)
    return out


def _buckets(collectives: Sequence[_Collective], limit: Callable[[_Collective], int]) -> list[list[_Collective]]:
    open_: dict[Any, list[_Collective]] = defaultdict(list)
    size: dict[Any, int] = defaultdict(int)
    closed: list[list[_Collective]] = []
    for c in sorted(collectives, key=lambda c: c.order):
        key = (c.level, c.kind)
        if c.bytes >= limit(c) or not c.bytes:
            closed.append([c])
            continue
        late = c.gathers and open_[key] and c.ready >= open_[key][0].needed
        if size[key] + c.bytes > limit(c) or late:
            if open_[key]:
                closed.append(open_.pop(key))
            size[key] = 0
        open_[key].append(c)
        size[key] += c.bytes
    closed.extend(bucket for bucket in open_.values() if bucket)
    return sorted(closed, key=lambda bucket: bucket[-1].order)
