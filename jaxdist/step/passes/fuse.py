"""The *fuse* pass: small tensors travel in buckets, in the order in which the step makes or needs them.

A message costs a latency and a byte a time: many small tensors go faster as one. Collectives of one kind (operation,
dtype, dtype on the wire) are put together until a bucket is full; a tensor that fills a bucket alone travels as it is,
for copying it would cost more than it saves. Two are never in one bucket if one follows from the other.

Reductions start as soon as the backward pass has made the last of their bucket; shards are gathered when the first
whole array of a bucket is needed, and no sooner.

Reference: Li et al., *PyTorch Distributed*, VLDB 2020, section 3.2.3 (gradient bucketing).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxdist.step.interpreter import Interpreter, has_effect, live
from jaxdist.step.primitives import AXIS, all_reduce_p, gather_shards_p, joined, reduce_shard_p, slices

# What may stand between the backward pass and a reduction without making it later.
_CHEAP = {
    "mul", "div", "neg", "convert_element_type", "reshape", "squeeze", "transpose", "broadcast_in_dim", "pvary", "copy",
}  # fmt: skip
_FUSED = {all_reduce_p, reduce_shard_p, gather_shards_p}


class Fuse(Interpreter):
    """Evaluates a traced step with its collectives in buckets.

    Args:
      bucket_bytes: on the wire, of a full bucket. 0: each tensor travels alone.
    """

    def __init__(self, bucket_bytes: int):
        super().__init__({})
        self.rewritten = _FUSED
        self.bucket_bytes = bucket_bytes

    def eval_jaxpr(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for item in schedule(live(jaxpr), self.bucket_bytes):
            if isinstance(item, JaxprEqn):
                outs = self.eval_eqn(item, *map(read, item.invars))
                env.update(zip(item.outvars, outs, strict=True))
            else:
                outs = _TOGETHER[item[0].primitive]([read(eqn.invars[0]) for eqn in item], item)
                env.update(zip((eqn.outvars[0] for eqn in item), outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive in _FUSED:
            return [eqn.primitive.bind(*args, **eqn.params)]
        return super().eval_eqn(eqn, *args)


def _reduced_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn]) -> list[Any]:
    """The reduction of several tensors as that of one."""
    whole = all_reduce_p.bind(jnp.concatenate([x.reshape(-1) for x in parts]), **eqns[0].params)
    pieces = _split(whole, [x.size for x in parts])
    return [piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)]


def _scattered_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn]) -> list[Any]:
    """This device's slices of several reductions: what goes to one device lies together."""
    params = eqns[0].params
    rows = [slices(x, e.params["dim"], params["devices"]) for x, e in zip(parts, eqns, strict=True)]
    flat = jnp.concatenate([r.reshape(r.shape[0], -1) for r in rows], 1)
    mine = reduce_shard_p.bind(flat, **{**params, "dim": 0})
    pieces = _split(mine.reshape(-1), [r[0].size for r in rows])
    return [piece.reshape(r.shape[1:]) for piece, r in zip(pieces, rows, strict=True)]


def _gathered_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn]) -> list[Any]:
    """Several arrays from everyone's slices."""
    params = eqns[0].params
    devices = params["devices"]
    flat = jnp.concatenate([x.reshape(1, -1) for x in parts], 1)
    whole = gather_shards_p.bind(flat, **{**params, "dim": 0, "size": devices})
    pieces = _split(whole, [x.size for x in parts])
    return [
        joined(piece.reshape(devices, *x.shape), e.params["dim"], e.params["size"])
        for piece, x, e in zip(pieces, parts, eqns, strict=True)
    ]


def _split(x: Any, sizes: Sequence[int]) -> list[Any]:
    """`x` in pieces of these sizes along its last dimension."""
    ends = itertools.accumulate(sizes)
    return [x[..., end - size : end] for end, size in zip(ends, sizes, strict=True)]


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
      ready: the position of the equation that makes its operand.
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


def schedule(eqns: Sequence[JaxprEqn], bucket_bytes: int) -> list[JaxprEqn | list[JaxprEqn]]:
    """The equations in an order to evaluate them in, with the collectives that travel together in lists.

    Args:
      eqns: of a jaxpr, in order.
      bucket_bytes: of a full bucket.
    """
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [{producer[v] for v in e.invars if not isinstance(v, Literal) and v in producer} for e in eqns]
    needed = [len(eqns)] * len(eqns)
    for i in reversed(range(len(eqns))):
        for j in needs[i]:
            needed[j] = i
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
            at = max(needs[i], default=-1) if eqn.primitive is gather_shards_p else made
            collectives.append(_Collective(i, level, at, needed[i], eqn))
        levels[i] = level + fusible
        ready[i] = made if eqn.primitive.name in _CHEAP else i
    # Each bucket of reductions as soon as the backward pass has made its last member; everything else when it is
    # needed, a bucket of gathers with the first of its members.
    buckets = _buckets(collectives, bucket_bytes)
    gathers = {c.at: bucket for bucket in buckets for c in bucket if c.gathers}
    done: set[int] = set()
    out: list[JaxprEqn | list[JaxprEqn]] = []

    def append(bucket: Sequence[_Collective]) -> None:
        out.append([c.eqn for c in bucket] if len(bucket) > 1 else bucket[0].eqn)
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
        for j in sorted(missing, key=lambda j: gathers[j][0].needed - 0.5 if j in gathers else j):
            if j in done:
                continue
            if j in gathers:
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


def _buckets(collectives: Sequence[_Collective], bucket_bytes: int) -> list[list[_Collective]]:
    open_: dict[Any, list[_Collective]] = defaultdict(list)
    size: dict[Any, int] = defaultdict(int)
    closed: list[list[_Collective]] = []
    for c in sorted(collectives, key=lambda c: c.order):
        key = (c.level, c.kind)
        if c.bytes >= bucket_bytes or not c.bytes:
            closed.append([c])
            continue
        late = c.gathers and open_[key] and c.ready >= open_[key][0].needed
        if size[key] + c.bytes > bucket_bytes or late:
            if open_[key]:
                closed.append(open_.pop(key))
            size[key] = 0
        open_[key].append(c)
        size[key] += c.bytes
    closed.extend(bucket for bucket in open_.values() if bucket)
    return sorted(closed, key=lambda bucket: bucket[-1].order)
