"""Which collectives share a bucket, and when each bucket is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxdist.ir.interpreter import has_effect
from jaxdist.ir.operations import CHEAP
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, reduce_shard_p

FUSED = {all_reduce_p, reduce_shard_p, gather_shards_p}


@dataclass
class _Collective:
    """One collective of a jaxpr."""

    at: int  # its position
    ready: int  # the position of the equation that makes its operand, but for cheap ones after it
    needed: int  # that of the first one that takes its result
    follows: list[_Collective]  # those that it follows from with none between
    eqn: JaxprEqn  # the collective
    level: int = 0  # greater than that of any that it follows from; those of one level may travel together

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
    def order(self) -> tuple[int, int]:
        return self.needed if self.gathers else self.ready, self.at


def given(jaxpr: Jaxpr) -> Any:
    """An input of a body that is computed just before it: one of its own floats, and no shard."""
    shards = {eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive is gather_shards_p}
    for v in reversed(jaxpr.invars):  # cotangents come last
        aval: Any = v.aval
        if v not in shards and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size:
            return v
    return None


@dataclass
class Bucket:
    """Collectives that travel together."""

    eqns: list[JaxprEqn]  # one or more of one kind
    bytes: int  # of all of them
    use: JaxprEqn | None = None  # of gathered arrays, the first equation that takes one; None: they are results

    @property
    def gathers(self) -> bool:
        return self.eqns[0].primitive is gather_shards_p


def schedule(eqns: Sequence[JaxprEqn], bucket_bytes: int, ahead: int) -> list[JaxprEqn | Bucket]:
    """The equations in an order to evaluate them in, with the collectives in buckets."""
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
    follows, ready = [0] * len(eqns), [0] * len(eqns)  # a bit for each collective
    for i, eqn in enumerate(eqns):
        for j in needs[i]:
            follows[i] |= follows[j]
        made = max((ready[j] for j in needs[i]), default=-1)
        if eqn.primitive in FUSED:
            before = [c for k, c in enumerate(collectives) if follows[i] >> k & 1]
            follows[i] = 1 << len(collectives)
            collectives.append(_Collective(i, made, needed[i], before, eqn))
        ready[i] = made if eqn.primitive.name in CHEAP else i
    _set_levels(collectives)

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


def _set_levels(collectives: Sequence[_Collective]) -> None:
    """Gathers as early as they can be; reductions as late, so that gradients of layers that talk to each other share
    buckets: each waits for others anyway, until its bucket is full."""

    def earliest(c: _Collective) -> int:
        return max((one.level + 1 for one in c.follows), default=0)

    for c in collectives:
        c.level = earliest(c)
    latest = dict.fromkeys((c.at for c in collectives), max((c.level for c in collectives), default=0))
    for c in reversed(collectives):
        for one in c.follows:
            latest[one.at] = min(latest[one.at], latest[c.at] - 1)
    for c in collectives:
        c.level = earliest(c) if c.gathers else latest[c.at]


def _buckets(collectives: Sequence[_Collective], limit: Callable[[_Collective], int]) -> list[list[_Collective]]:
    """In an order in which they can be sent: each as early as possible."""
    open_: dict[Any, list[_Collective]] = defaultdict(list)
    size: dict[Any, int] = defaultdict(int)
    closed: list[list[_Collective]] = []
    for c in sorted(collectives, key=lambda c: (c.level, *c.order)):
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
    turn: dict[int, int] = {}  # of each collective: the number of buckets before its own, in the longest chain
    for bucket in sorted(closed, key=lambda bucket: bucket[0].level):
        own = max((turn[one.at] + 1 for c in bucket for one in c.follows), default=0)
        turn.update((c.at, own) for c in bucket)
    return sorted(closed, key=lambda bucket: (turn[bucket[0].at], *bucket[-1].order))
