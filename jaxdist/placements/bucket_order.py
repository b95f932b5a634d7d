"""Which collectives share a bucket, and when each bucket is sent."""

from __future__ import annotations

import itertools
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
    """The equations in an order to evaluate them in, with the collectives in buckets.

    Each bucket of reductions as soon as the backward pass has made its last member; everything else when it is needed,
    a bucket of gathers with the first of its members.
    """
    needs = _needs(eqns)
    collectives = _collectives(eqns, needs)

    def limit(c: _Collective) -> int:
        if not c.gathers:
            return bucket_bytes
        return min(bucket_bytes, ahead if c.needed < len(eqns) else 4 * ahead)

    buckets = _buckets(collectives, limit)
    together = {c.at: bucket for bucket in buckets for c in bucket}
    done: set[int] = set()
    out: list[JaxprEqn | Bucket] = []

    def members(i: int) -> list[int]:
        return [c.at for c in together[i]] if i in together else [i]

    def place(i: int) -> float:
        return together[i][0].needed - 0.5 if i in together and together[i][0].gathers else i

    def emit(i: int) -> None:
        """Append an equation, with its bucket, after what that needs."""
        missing, todo = set[int](), [j for k in members(i) for j in needs[k]]
        while todo:
            j = todo.pop()
            if j not in done and j not in missing:
                missing.update(members(j))
                todo.extend(k for one in members(j) for k in needs[one])
        for j in sorted(missing, key=place):
            if j not in done:  # a cheap operation on a shard may stand later than the first use of what is gathered
                emit(j)
        done.update(members(i))
        out.append(_bucket(together[i], eqns) if i in together else eqns[i])

    reductions = [bucket[0].at for bucket in buckets if not bucket[0].gathers]
    others = [i for i in range(len(eqns)) if i not in together]
    for i in (*reductions, *others, *together):  # last, gathers of which nothing follows
        if i not in done:
            emit(i)
    return out


def _needs(eqns: Sequence[JaxprEqn]) -> list[set[int]]:
    """Of each equation, the positions of those that must be evaluated before it; effects keep their order."""
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [{producer[v] for v in e.invars if not isinstance(v, Literal) and v in producer} for e in eqns]
    effects = [i for i, eqn in enumerate(eqns) if has_effect(eqn)]
    for before, i in itertools.pairwise(effects):
        needs[i].add(before)
    return needs


def _collectives(eqns: Sequence[JaxprEqn], needs: Sequence[set[int]]) -> list[_Collective]:
    needed = [len(eqns)] * len(eqns)
    for i in reversed(range(len(eqns))):
        for j in needs[i]:
            needed[j] = min(needed[j], i)
    found: list[_Collective] = []
    follows, ready = [0] * len(eqns), [0] * len(eqns)  # a bit for each collective
    for i, eqn in enumerate(eqns):
        for j in needs[i]:
            follows[i] |= follows[j]
        made = max((ready[j] for j in needs[i]), default=-1)
        if eqn.primitive in FUSED:
            before = [c for k, c in enumerate(found) if follows[i] >> k & 1]
            follows[i] = 1 << len(found)
            found.append(_Collective(i, made, needed[i], before, eqn))
        ready[i] = made if eqn.primitive.name in CHEAP else i
    _set_levels(found)
    return found


def _bucket(members: Sequence[_Collective], eqns: Sequence[JaxprEqn]) -> Bucket:
    first = min(c.needed for c in members)
    use = eqns[first] if members[0].gathers and first < len(eqns) else None
    return Bucket([c.eqn for c in members], sum(c.bytes for c in members), use)


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
