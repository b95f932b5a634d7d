"""The *fuse* pass: reductions travel in buckets, in the order in which the backward pass makes them.

A message costs a latency and a byte a time: many small tensors go faster as one. Reductions of one kind (operation,
dtype, dtype on the wire) are put together until a bucket is full; one that fills a bucket alone travels as it is, for
copying it would cost more than it saves. Two are never in one bucket if one follows from the other.

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
from jaxdist.step.primitives import AXIS, all_reduce_p

# What may stand between the backward pass and a reduction without making it later.
_CHEAP = {
    "mul", "div", "neg", "convert_element_type", "reshape", "squeeze", "transpose", "broadcast_in_dim", "pvary", "copy",
}  # fmt: skip


class Fuse(Interpreter):
    """Evaluates a traced step with its reductions in buckets.

    Args:
      bucket_bytes: on the wire, of a full bucket. 0: each reduction travels alone.
    """

    def __init__(self, bucket_bytes: int):
        super().__init__({})
        self.rewritten = {all_reduce_p}
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
                outs = _together([read(eqn.invars[0]) for eqn in item], item[0].params)
                env.update(zip((eqn.outvars[0] for eqn in item), outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def eval_eqn(self, eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
        if eqn.primitive is all_reduce_p:
            return [all_reduce_p.bind(*args, **eqn.params)]
        return super().eval_eqn(eqn, *args)


def _together(parts: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The reduction of several tensors as that of one."""
    whole = all_reduce_p.bind(jnp.concatenate([x.reshape(-1) for x in parts]), **params)
    ends = list(itertools.accumulate(x.size for x in parts))
    pieces = [whole[end - x.size : end] for x, end in zip(parts, ends, strict=True)]
    return [piece.reshape(x.shape) for piece, x in zip(pieces, parts, strict=True)]


@dataclass
class _Reduction:
    """One all-reduce of a jaxpr.

    Attributes:
      at: its position.
      level: how many reductions it follows from, in the longest chain.
      ready: the position of the equation that makes its operand.
    """

    at: int
    level: int
    ready: int
    eqn: JaxprEqn

    @property
    def kind(self) -> tuple[Any, ...]:
        aval: Any = self.eqn.invars[0].aval
        return aval.dtype, tuple(sorted(self.eqn.params.items()))

    @property
    def bytes(self) -> int:
        aval: Any = self.eqn.invars[0].aval
        return aval.size * jnp.dtype(self.eqn.params["wire"] or aval.dtype).itemsize


def schedule(eqns: Sequence[JaxprEqn], bucket_bytes: int) -> list[JaxprEqn | list[JaxprEqn]]:
    """The equations in an order to evaluate them in, with the reductions that travel together in lists.

    Args:
      eqns: of a jaxpr, in order.
      bucket_bytes: of a full bucket.
    """
    producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [{producer[v] for v in e.invars if not isinstance(v, Literal) and v in producer} for e in eqns]
    last: int | None = None
    for i, eqn in enumerate(eqns):  # effects keep their order
        if has_effect(eqn):
            needs[i] |= set() if last is None else {last}
            last = i
    reductions: list[_Reduction] = []
    levels, ready = [0] * len(eqns), [0] * len(eqns)
    for i, eqn in enumerate(eqns):
        level = max((levels[j] for j in needs[i]), default=0)
        made = max((ready[j] for j in needs[i]), default=-1)
        fusible = eqn.primitive is all_reduce_p and eqn.params["axes"] == (AXIS,)
        if fusible:
            reductions.append(_Reduction(i, level, made, eqn))
        levels[i] = level + fusible
        ready[i] = made if eqn.primitive.name in _CHEAP else i
    # Each bucket as soon as the backward pass has made its last member; everything else when it is needed.
    done: set[int] = set()
    out: list[JaxprEqn | list[JaxprEqn]] = []

    def emit(targets: Sequence[int]) -> None:
        missing, todo = set(), [j for t in targets for j in needs[t]]
        while todo:
            j = todo.pop()
            if j not in done and j not in missing:
                missing.add(j)
                todo.extend(needs[j])
        out.extend(eqns[j] for j in sorted(missing))
        done.update(missing)

    for bucket in _buckets(reductions, bucket_bytes):
        emit([r.at for r in bucket])
        members = [r.eqn for r in bucket]
        out.append(members if len(members) > 1 else members[0])
        done.update(r.at for r in bucket)
    out.extend(eqns[i] for i in range(len(eqns)) if i not in done)
    return out


def _buckets(reductions: Sequence[_Reduction], bucket_bytes: int) -> list[list[_Reduction]]:
    open_: dict[Any, list[_Reduction]] = defaultdict(list)
    size: dict[Any, int] = defaultdict(int)
    closed: list[list[_Reduction]] = []
    for r in sorted(reductions, key=lambda r: (r.level, r.ready, r.at)):
        key = (r.level, r.kind)
        if r.bytes >= bucket_bytes or not r.bytes:
            closed.append([r])
            continue
        if size[key] + r.bytes > bucket_bytes:
            closed.append(open_.pop(key))
            size[key] = 0
        open_[key].append(r)
        size[key] += r.bytes
    closed.extend(open_.values())
    return sorted(closed, key=lambda bucket: (bucket[-1].level, bucket[-1].ready, bucket[-1].at))
