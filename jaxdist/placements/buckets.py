"""The *fuse* pass: send small tensors together, reductions once the last is made, gathers when the first is needed.

Reference: Li et al., *PyTorch Distributed*, VLDB 2020, section 3.2.3 (gradient bucketing).
"""

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxdist.ir.interpreter import contains, has_effect, inlined, live, subjaxprs, with_bodies
from jaxdist.ir.operations import SHAPE_ONLY
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, joined, reduce_shard_p, slices
from jaxdist.mesh import Axis

FUSED = {all_reduce_p, reduce_shard_p, gather_shards_p}
_MANY = 8  # number of pieces in a bucket from which `_pieces_of_one_kernel` pays off
_Unpack = Callable[[Any, Sequence[int]], list[Any]]  # ``unpack(x, sizes)``: pieces of x along its last dimension


class Fuse:
    """Group the collectives of a program into buckets; all else only changes its order."""

    def __init__(self, bucket_bytes: int, axes: Sequence[Axis], ahead: int = 0, barriers: bool = True):
        self.bucket_bytes, self.axes, self.ahead, self.barriers = bucket_bytes, axes, ahead, barriers

    def __call__(self, closed: ClosedJaxpr, nested: bool = False) -> ClosedJaxpr:
        """Return the program with its collectives in buckets."""
        jaxpr = closed.jaxpr
        producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        pace = _Pace(self.ahead, None if self.barriers or not nested else _given(jaxpr))
        result = None  # the latest gather of a result: these run one by one, to need less memory
        done, out = {*jaxpr.constvars, *jaxpr.invars}, list[JaxprEqn]()
        constants: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for eqns, use in _scheduled(live(jaxpr), self.bucket_bytes, self.ahead):
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
        """Bucket the collectives in the bodies of an equation."""
        if not any(contains(sub.jaxpr, FUSED) for sub in subjaxprs(eqn)):
            return eqn
        return eqn.replace(params=with_bodies(eqn, functools.partial(self, nested=True)))

    def _together(self, eqns: Sequence[JaxprEqn], cause: Any, constants: dict[Any, Any]) -> list[JaxprEqn]:
        """Trace the equations that replace a bucket; it starts once `cause` is known."""

        def run(*operands: Any) -> list[Any]:
            parts: Sequence[Any] = operands
            if cause is not None:
                parts = self._after(operands[-1], operands[:-1])
            if len(eqns) == 1:
                return [eqns[0].primitive.bind(*parts, **eqns[0].params)]
            with jax.named_scope(f"bucket_of_{len(eqns)}"):  # for the log of `step.wire`, and for traces
                return _sent_together(parts, eqns, _pieces if self.barriers else _pieces_of_one_kernel)

        operands = [eqn.invars[0] for eqn in eqns] + ([] if cause is None else [cause])
        made, _, held = inlined(run, operands, self.axes, [eqn.outvars[0] for eqn in eqns])
        constants.update(held)
        return made

    def _after(self, cause: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the operands of a gather, delayed until `cause` is known."""
        if self.barriers:
            return lax.optimization_barrier((*operands, cause))[:-1]
        ready = _always(cause)  # becomes part of the computation of the operand
        return [jnp.where(ready, x, jnp.zeros_like(x)) for x in operands]


def _scheduled(eqns: Sequence[JaxprEqn], most: int, ahead: int) -> Iterator[tuple[list[JaxprEqn], JaxprEqn | None]]:
    """Yield single operations and buckets of collectives in running order; for a gather, also its first user."""
    # Operations run as soon as they can, in program order. A collective waits in the bucket of its kind until that is
    # full (one that fills it alone is not copied into one), or nothing else can run: the bucket needed first is sent.
    needs = _needs(eqns)
    users: list[list[int]] = [[] for _ in eqns]
    for i, before in enumerate(needs):
        for j in before:
            users[j].append(i)
    needed = [min(own, default=len(eqns)) for own in users]
    missing = list(map(len, needs))
    ready, full, waiting = list[int](), list[list[int]](), defaultdict[Any, list[int]](list)

    def limit(i: int) -> int:
        return min(most, ahead if needed[i] < len(eqns) else 4 * ahead) if _gathers(eqns[i]) else most

    def enter(i: int) -> None:
        if eqns[i].primitive not in FUSED:
            heapq.heappush(ready, i)
            return
        bucket, size = waiting[_kind(eqns[i])], _bytes(eqns[i])
        if not _gathers(eqns[i]):
            if not 0 < size < limit(i):
                full.append([i])
                return
            if sum(_bytes(eqns[k]) for k in bucket) + size > limit(i):
                full.append(bucket[:])
                bucket.clear()
        bucket.append(i)

    def next_bucket() -> list[int]:
        first = min((i for bucket in waiting.values() for i in bucket), key=lambda i: (needed[i], i))
        bucket = sorted(waiting.pop(_kind(eqns[first])), key=lambda i: (needed[i], i))
        members, size = [first], _bytes(eqns[first])
        if not _gathers(eqns[first]):
            return bucket
        for i in bucket[1:]:
            if 0 < _bytes(eqns[i]) < limit(i):
                size += _bytes(eqns[i])
                if size > limit(i):
                    break
                members.append(i)
        waiting[_kind(eqns[first])] = [i for i in bucket if i not in members]
        return members

    for i in range(len(eqns)):
        if not missing[i]:
            enter(i)
    while ready or full or any(waiting.values()):
        members = full.pop(0) if full else [heapq.heappop(ready)] if ready else next_bucket()
        use = min(needed[i] for i in members)
        yield [eqns[i] for i in members], eqns[use] if _gathers(eqns[members[0]]) and use < len(eqns) else None
        for k in (k for i in members for k in users[i]):
            missing[k] -= 1
            if not missing[k]:
                enter(k)


def _needs(eqns: Sequence[JaxprEqn]) -> list[set[int]]:
    """Return the positions that must run before each operation; effects keep their order."""
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [{maker[v] for v in eqn.invars if not isinstance(v, Literal) and v in maker} for eqn in eqns]
    effects = [i for i, eqn in enumerate(eqns) if has_effect(eqn)]
    for before, after in itertools.pairwise(effects):
        needs[after].add(before)
    return needs


def _kind(eqn: JaxprEqn) -> tuple[Any, ...]:
    aval: Any = eqn.invars[0].aval
    params = {k: v for k, v in eqn.params.items() if k not in ("dim", "size")}
    return eqn.primitive, aval.dtype, tuple(sorted(params.items()))


def _gathers(eqn: JaxprEqn) -> bool:
    return eqn.primitive is gather_shards_p


def _bytes(eqn: JaxprEqn) -> int:
    """Return the size of the whole array."""
    aval: Any = eqn.outvars[0].aval if _gathers(eqn) else eqn.invars[0].aval
    return aval.size * jnp.dtype(eqn.params.get("wire") or aval.dtype).itemsize


def _given(jaxpr: Jaxpr) -> Any:
    """Return an input computed just before the body runs: a float, and not a shard."""
    shards = {eqn.invars[0] for eqn in jaxpr.eqns if _gathers(eqn)}
    for v in reversed(jaxpr.invars):  # cotangents come last
        aval: Any = v.aval
        if v not in shards and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size:
            return v
    return None


class _Pace:
    """Decide when to gather shards that the step uses: at most `ahead` bytes before their use."""

    # A gather of shards depends on no computation: XLA would run all first, one for the forward and the backward pass.

    def __init__(self, ahead: int, first: Any):
        self.ahead, self.first = ahead, first
        self._gathered: list[tuple[int, Any]] = []  # bytes, and what its user also takes

    def cause(self, bucket: Sequence[JaxprEqn], use: JaxprEqn, producers: Mapping[Any, JaxprEqn]) -> Any:
        """Return the variable that must be computed before `bucket` is gathered, if any."""
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
    """Follow changes of shape back from `v`."""
    # XLA folds a reshape into the product that takes it, then drops it, unused, from the barrier.
    while v in producers and producers[v].primitive.name in SHAPE_ONLY:
        before = producers[v].invars[0]
        if isinstance(before, Literal) or before not in producers or _gathers(producers[before]):
            break
        v = before
    return v


def _always(x: Any) -> Any:
    """Return a boolean that is always true once `x` is known; XLA cannot simplify it."""
    # By slicing: ``x.reshape(-1)`` may copy, if dimensions are permuted.
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim)).real
    if not jnp.issubdtype(first.dtype, jnp.floating):
        return first.astype(jnp.uint8) | 1 != 0
    wide = first if first.dtype.itemsize >= 4 else first.astype(jnp.float32)
    return lax.bitcast_convert_type(wide, jnp.dtype(f"uint{8 * wide.dtype.itemsize}")) | 1 != 0


def _sent_together(parts: Sequence[Any], eqns: Sequence[JaxprEqn], unpack: _Unpack) -> list[Any]:
    """Send several arrays in one collective, in rows: one for each device if each gets its own slices."""
    primitive, params, eachs = eqns[0].primitive, dict(eqns[0].params), [eqn.params for eqn in eqns]
    scatters, gathers = primitive is reduce_shard_p, primitive is gather_shards_p
    rows = [slices(x, p["dim"], p["devices"]) for x, p in zip(parts, eachs, strict=True)] if scatters else parts
    shapes = [x.shape[scatters:] for x in rows]
    if scatters or gathers:
        params["dim"] = 0
    if gathers:
        params["size"] = params["devices"]
    flat = [x.reshape(params["devices"] if scatters else 1, -1) for x in rows]
    whole = primitive.bind(jnp.concatenate(flat, 1), **params)
    pieces = zip(unpack(whole, [math.prod(shape) for shape in shapes]), shapes, eachs, strict=True)
    if gathers:
        return [joined(piece.reshape(p["devices"], *shape), p["dim"], p["size"]) for piece, shape, p in pieces]
    return [piece.reshape(shape) for piece, shape, _ in pieces]


def _pieces(x: Any, sizes: Sequence[int]) -> list[Any]:
    """Split `x` with static slices (an `_Unpack`)."""
    ends = itertools.accumulate(sizes)
    return [lax.slice_in_dim(x, end - size, end, axis=x.ndim - 1) for end, size in zip(ends, sizes, strict=True)]


def _pieces_of_one_kernel(x: Any, sizes: Sequence[int]) -> list[Any]:
    """Split `x` like `_pieces`, but hide the offsets from XLA."""
    # XLA fuses a slice into its consumer, such as an optimizer's update. With known offsets, the
    # updates of equal parameters are separate kernels, 10 ms each to compile; otherwise they are one.
    if len(sizes) < _MANY:
        return _pieces(x, sizes)
    places = [np.uint32(end - size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    places = lax.cond(_always(x), lambda: places, lambda: [place + 1 for place in places])
    return [lax.dynamic_slice_in_dim(x, i, size, axis=x.ndim - 1) for i, size in zip(places, sizes, strict=True)]
