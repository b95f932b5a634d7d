"""The *fuse* pass: send small tensors together, reductions once the last is made, gathers when the first is needed.

Reference: Li et al., *PyTorch Distributed*, VLDB 2020, section 3.2.3 (gradient bucketing).
"""

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxdist.ir.interpreter import contains, has_effect, inlined, live, subjaxprs, with_bodies
from jaxdist.ir.operations import SHAPE_ONLY
from jaxdist.ir.primitives import all_reduce_p, gather_shards_p, joined, reduce_shard_p, slices
from jaxdist.mesh import Axis
from jaxdist.placements.model.values import aval_of

FUSED = {all_reduce_p, reduce_shard_p, gather_shards_p}
_RESULT_FACTOR = 4  # gathered results stay in memory anyway, so their buckets may be this many times larger
_MANY = 8  # number of pieces in a bucket from which `_pieces_of_one_kernel` pays off
# ``unpack(x, sizes)``: pieces of x along its last dimension
_Unpack = Callable[[jax.Array, Sequence[int]], list[jax.Array]]


class Fuse:
    """Group the collectives of a program into buckets; all else only changes its order."""

    def __init__(self, bucket_bytes: int, axes: Sequence[Axis], ahead: int = 0, barriers: bool = True):
        self.bucket_bytes, self.axes, self.ahead, self.barriers = bucket_bytes, axes, ahead, barriers

    def __call__(self, closed: ClosedJaxpr, nested: bool = False) -> ClosedJaxpr:
        """Return the program with its collectives in buckets."""
        jaxpr = closed.jaxpr
        producers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        pace = _Pace(self.ahead, None if self.barriers or not nested else _first_cotangent(jaxpr))
        result: Var | None = None  # the latest gather of a result: these run one by one, to need less memory
        done, out = {*jaxpr.constvars, *jaxpr.invars}, list[JaxprEqn]()
        constants: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        for eqns, use in _scheduled(live(jaxpr), self.bucket_bytes, self.ahead):
            after = None  # the value before which they must not start; None: whenever
            if use is not None:
                after = pace.start_after(eqns, use, producers)
            elif _gathers(eqns[0]):
                after, result = None if self.barriers else result, eqns[0].outvars[0]
            if len(eqns) == 1 and after not in done:
                out.append(self._within(eqns[0]))
            else:
                out += self._together(eqns, after if after in done else None, constants)
            done.update(v for eqn in eqns for v in eqn.outvars)
        fused = jaxpr.replace(eqns=out, constvars=list(constants))
        return ClosedJaxpr(fused, list(constants.values()))

    def _within(self, eqn: JaxprEqn) -> JaxprEqn:
        """Bucket the collectives in the bodies of an equation."""
        if not any(contains(sub.jaxpr, FUSED) for sub in subjaxprs(eqn)):
            return eqn
        return eqn.replace(params=with_bodies(eqn, functools.partial(self, nested=True)))

    def _together(self, eqns: Sequence[JaxprEqn], after: Var | None, constants: dict[Var, Any]) -> list[JaxprEqn]:
        """Trace the equations that replace a bucket; it starts once `after` is known."""

        def run(*operands: jax.Array) -> Sequence[jax.Array]:
            parts = operands if after is None else self._delayed(operands[:-1], operands[-1])
            if len(eqns) == 1:
                return [eqns[0].primitive.bind(*parts, **eqns[0].params)]
            with jax.named_scope(f"bucket_of_{len(eqns)}"):  # for the log of `step.wire`, and for traces
                return _sent_together(parts, eqns, _pieces if self.barriers else _pieces_of_one_kernel)

        operands = [eqn.invars[0] for eqn in eqns] + ([] if after is None else [after])
        emitted, _, held = inlined(run, operands, self.axes, [eqn.outvars[0] for eqn in eqns])
        constants.update(held)
        return emitted

    def _delayed(self, operands: Sequence[jax.Array], after: jax.Array) -> Sequence[jax.Array]:
        """Return the operands of a gather, delayed until `after` is known."""
        if self.barriers:
            return lax.optimization_barrier((*operands, after))[:-1]
        # XLA for CPUs drops barriers before it schedules. This select takes `x` each time, and XLA cannot know that.
        ready = _always(after)  # becomes part of the computation of the operand
        return [lax.select(lax.broadcast(ready, x.shape), x, lax.full_like(x, 0)) for x in operands]


def _scheduled(eqns: Sequence[JaxprEqn], most: int, ahead: int) -> Iterator[tuple[list[JaxprEqn], JaxprEqn | None]]:
    """Yield single operations and buckets of collectives in running order; for a gather, also its first user.

    Operations run as soon as they can, in program order. A collective waits in the bucket of its kind until that is
    full (one that fills it alone is not copied into one), or nothing else can run: the bucket needed first is sent.
    Three gradients of 4 bytes, with room for 8 in a bucket::

        program                     waiting         yielded
        a = ...                                     [a]
        A = all_reduce a            A
        b = ...                     A               [b]
        B = all_reduce b            A B
        c = ...                     A B             [c]
        C = all_reduce c            C               [A, B]: C has no room there
        u = A + B + C               C               [C]: nothing else can run; then [u]

    Gathers wait, too, until nothing else can run: then those that are needed next are sent, as many as may be ahead of
    their use (`_Pace` says when they start). Three weights, at most two ahead::

        program                     waiting         yielded
        A, B, C = all_gather ...    A B C           [A, B]: nothing else can run; their first user is x
        x = f(A)                    C               [x]
        y = g(B, x)                 C               [y]
        z = h(C, y)                                 [C], then [z]
    """
    needs = _needs(eqns)
    users: list[list[int]] = [[] for _ in eqns]
    for i, needed in enumerate(needs):
        for j in needed:
            users[j].append(i)
    missing = list(map(len, needs))
    # A heap of positions: program order, the same on every rank.
    ready = list[int]()
    buckets = _Buckets(eqns, [min(positions, default=len(eqns)) for positions in users], most, ahead)
    enter = lambda i: buckets.add(i) if eqns[i].primitive in FUSED else heapq.heappush(ready, i)
    for i in range(len(eqns)):
        if not missing[i]:
            enter(i)
    while ready or buckets.full or any(buckets.waiting.values()):
        members = buckets.full.pop(0) if buckets.full else [heapq.heappop(ready)] if ready else buckets.pop()
        use = min(buckets.first_use[i] for i in members)
        yield [eqns[i] for i in members], eqns[use] if _gathers(eqns[members[0]]) and use < len(eqns) else None
        for k in (k for i in members for k in users[i]):
            missing[k] -= 1
            if not missing[k]:
                enter(k)


class _Buckets:
    """Collectives that could run, by position in the program."""

    def __init__(self, eqns: Sequence[JaxprEqn], first_use: Sequence[int], most: int, ahead: int):
        self.first_use = first_use  # of each operation: the position of its first user
        self.full = list[list[int]]()  # to send at once
        self.waiting = defaultdict[Hashable, list[int]](list)  # by kind
        self._eqns, self._most, self._ahead = eqns, most, ahead
        self._size = functools.cache(lambda i: _bytes(eqns[i]))

    def _limit(self, i: int) -> int:
        """Return the bytes of a bucket: of gathered values no more than may be on a device before their use."""
        if not _gathers(self._eqns[i]):
            return self._most
        is_result = self.first_use[i] == len(self._eqns)
        return min(self._most, _RESULT_FACTOR * self._ahead if is_result else self._ahead)

    def add(self, i: int) -> None:
        """Put a collective into the bucket of its kind."""
        bucket, size = self.waiting[_kind(self._eqns[i])], self._size(i)
        # A bucket of gathers is divided when it is sent: how much fits depends on the one that is needed first. Empty
        # arrays, and those that fill a message alone, are sent apart.
        if not _gathers(self._eqns[i]):
            if not 0 < size < self._limit(i):
                self.full.append([i])
                return
            if sum(map(self._size, bucket)) + size > self._limit(i):
                self.full.append(bucket[:])
                bucket.clear()
        bucket.append(i)

    def pop(self) -> list[int]:
        """Take the bucket with the collective that is needed first; of gathers, as many as may be sent together."""
        order = lambda i: (self.first_use[i], i)
        first = min((i for bucket in self.waiting.values() for i in bucket), key=order)
        bucket = sorted(self.waiting.pop(_kind(self._eqns[first])), key=order)
        if not _gathers(self._eqns[first]):
            return bucket
        members, size = [first], self._size(first)
        for i in bucket[1:]:
            if 0 < self._size(i) < self._limit(i):
                size += self._size(i)
                if size > self._limit(i):
                    break
                members.append(i)
        self.waiting[_kind(self._eqns[first])] = [i for i in bucket if i not in members]
        return members


def _needs(eqns: Sequence[JaxprEqn]) -> list[set[int]]:
    """Return the positions that must run before each operation; effects keep their order."""
    maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    needs = [{maker[v] for v in eqn.invars if not isinstance(v, Literal) and v in maker} for eqn in eqns]
    effects = [i for i, eqn in enumerate(eqns) if has_effect(eqn)]
    for earlier, later in itertools.pairwise(effects):
        needs[later].add(earlier)
    return needs


def _kind(eqn: JaxprEqn) -> tuple[Hashable, ...]:
    """Return what collectives in one bucket have in common."""
    # Members are flattened to rows (`_sent_together`), so their shapes and dimensions may differ.
    params = {k: v for k, v in eqn.params.items() if k not in ("dim", "size")}
    return eqn.primitive, aval_of(eqn.invars[0]).dtype, tuple(sorted(params.items()))


def _gathers(eqn: JaxprEqn) -> bool:
    return eqn.primitive is gather_shards_p


def _bytes(eqn: JaxprEqn) -> int:
    """Return the size of the whole array."""
    aval = aval_of(eqn.outvars[0] if _gathers(eqn) else eqn.invars[0])
    return aval.size * jnp.dtype(eqn.params.get("wire") or aval.dtype).itemsize


def _first_cotangent(jaxpr: Jaxpr) -> Var | None:
    """Return an input computed just before the body runs: a float, and not a shard."""
    shards = {eqn.invars[0] for eqn in jaxpr.eqns if _gathers(eqn)}
    for v in reversed(jaxpr.invars):  # cotangents come last
        aval = aval_of(v)
        if v not in shards and jnp.issubdtype(aval.dtype, jnp.floating) and aval.size:
            return v
    return None


class _Gather(NamedTuple):
    """A bucket of shards that is gathered."""

    bytes: int
    operand: Var | None  # what its user also takes, if that is computed


class _Pace:
    """Decide when to gather shards that the step uses: at most `ahead` bytes before their use.

    A gather of shards depends on no computation: XLA would run all first, one for the forward and the backward pass. So
    a gather starts after the operand of an earlier gather's user, once the gathers since fit into `ahead` bytes::

        x1 = f(all_gather w1, x0)
        x2 = g(all_gather w2, x1)
        x3 = h(all_gather w3, x2)    starts after x1 if only w3 may be ahead of its use, after x0 if w2 and w3 may
    """

    def __init__(self, ahead: int, first: Var | None):
        self._ahead, self._first = ahead, first  # the first gathers start after `first`, if there is one
        self._gathers = list[_Gather]()  # so far

    def start_after(self, bucket: Sequence[JaxprEqn], use: JaxprEqn, producers: Mapping[Var, JaxprEqn]) -> Var | None:
        """Return the variable that must be computed before `bucket` is gathered, if any."""
        # Gathers run in the order of their use: those after that variable's user are on the device together.
        bucket_size = size = sum(map(_bytes, bucket))
        after = self._first
        for gather in reversed(self._gathers):
            if size >= self._ahead and gather.operand is not None:
                after = gather.operand
                break
            size += gather.bytes
        computed = [
            v
            for v in use.invars
            if not isinstance(v, Literal) and v in producers and not _gathers(producers[v])
            and jnp.issubdtype(aval_of(v).dtype, jnp.floating) and aval_of(v).size
        ]  # fmt: skip
        self._gathers.append(_Gather(bucket_size, _before_reshapes(computed[0], producers) if computed else None))
        return after


def _before_reshapes(v: Var, producers: Mapping[Var, JaxprEqn]) -> Var:
    """Follow changes of shape back from `v`."""
    # XLA folds a reshape into the product that takes it, then drops it, unused, from the barrier.
    while v in producers and producers[v].primitive.name in SHAPE_ONLY:
        operand = producers[v].invars[0]
        if isinstance(operand, Literal) or operand not in producers or _gathers(producers[operand]):
            break
        v = operand
    return v


def _always(x: jax.Array) -> jax.Array:
    """Return a boolean that is always true once `x` is known; XLA cannot simplify it."""
    # By slicing: ``x.reshape(-1)`` may copy, if dimensions are permuted.
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim)).real
    if jnp.issubdtype(first.dtype, jnp.floating):
        wide = first if first.dtype.itemsize >= 4 else first.astype(jnp.float32)
        bits = lax.bitcast_convert_type(wide, jnp.dtype(f"uint{8 * wide.dtype.itemsize}"))
    else:
        bits = first.astype(jnp.uint8)
    one, zero = (lax.full_like(bits, n) for n in (1, 0))
    return lax.ne(lax.bitwise_or(bits, one), zero)


def _sent_together(parts: Sequence[jax.Array], eqns: Sequence[JaxprEqn], unpack: _Unpack) -> list[jax.Array]:
    """Send several arrays in one collective, in rows: one for each device if each gets its own slices."""
    primitive, params, all_params = eqns[0].primitive, dict(eqns[0].params), [eqn.params for eqn in eqns]
    scatters, gathers = primitive is reduce_shard_p, primitive is gather_shards_p
    rows = [slices(x, p["dim"], p["devices"]) for x, p in zip(parts, all_params, strict=True)] if scatters else parts
    shapes = [x.shape[scatters:] for x in rows]
    if scatters or gathers:
        params["dim"] = 0
    if gathers:
        params["size"] = params["devices"]
    # f32[4] and f32[6], scattered over 2 devices, are sent as f32[2, 5]: row d has the slices of device d.
    flat = [x.reshape(params["devices"] if scatters else 1, -1) for x in rows]
    whole = primitive.bind(jnp.concatenate(flat, 1), **params)
    pieces = zip(unpack(whole, [math.prod(shape) for shape in shapes]), shapes, all_params, strict=True)
    if gathers:
        return [joined(piece.reshape(p["devices"], *shape), p["dim"], p["size"]) for piece, shape, p in pieces]
    return [piece.reshape(shape) for piece, shape, _ in pieces]


def _pieces(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Split `x` with static slices (an `_Unpack`)."""
    ends = itertools.accumulate(sizes)
    return [lax.slice_in_dim(x, end - size, end, axis=x.ndim - 1) for end, size in zip(ends, sizes, strict=True)]


def _pieces_of_one_kernel(x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """Split `x` like `_pieces`, but hide the offsets from XLA."""
    # XLA fuses a slice into its consumer, such as an optimizer's update. With known offsets, the
    # updates of equal parameters are separate kernels, 10 ms each to compile; otherwise they are one.
    if len(sizes) < _MANY:
        return _pieces(x, sizes)
    places = [np.uint32(end - size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    places = lax.cond(_always(x), lambda: places, lambda: [place + 1 for place in places])
    return [lax.dynamic_slice_in_dim(x, i, size, axis=x.ndim - 1) for i, size in zip(places, sizes, strict=True)]
