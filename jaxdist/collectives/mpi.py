"""Eager collectives as MPI calls on host buffers, between processes.

Reductions of large arrays are exchanges of parts that each rank adds up: faster than the all-reduce and, by far, the
reduce-scatter of Open MPI, right for NaNs, and possible in dtypes that MPI does not know. No message is larger than
1 GiB, so counts of 32 bits will do.
"""

from __future__ import annotations

import atexit
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist import compat
from jaxdist.collectives.call import Call, Group, gathered_shape, positive, split
from jaxdist.collectives.numerics import Reduction, reduction
from jaxdist.collectives.pieces import as_bytes, bounds_of, pieces_of, rounds_of
from jaxdist.collectives.pool import Pool
from jaxdist.control.channel import ControlError

_SEGMENT = 1 << 18  # bytes received at once to be added up: they stay in a core's cache
_PART = 1 << 19  # bytes a rank adds up, from which on an exchange of parts is faster than MPI's all-reduce
_GATHERED = 1 << 20  # bytes that a rank may gather to reduce what MPI can't
_SMALL = 1 << 20  # bytes a rank sends, up to which MPI's all-gather is used
_SPINS = 200  # tests (0.1 ms) before a rank that waits lets others have its core
_NAP = 1e-3  # seconds of sleep at most between two tests
_ELSEWHERE = 2.0  # seconds after which a rank seen in another call is not just ahead of this one
_WAITING = "waiting for an eager collective"  # tag of the exchange that finds out who is missing
_TAG = 7000  # of our messages between pairs; those of steps have tag 0


class MpiWire:
    """The MPI side of eager collectives."""

    in_programs = False

    def __init__(self, ctx: Any, timeout: float):
        from jaxdist.communicators.mpi_groups import world
        from jaxdist.connectors.mpi import load

        self._mpi = load()
        self._ctx, self._control, self._timeout = ctx, ctx.control, timeout
        self._pool = Pool()
        self._pairs = world(ctx.rank)  # shared with steps: our messages have tags of their own
        self._comm: Any = None  # for collectives: those of steps run in XLA's threads, in no order with ours
        self._comms: dict[tuple[int, ...], Any] = {}
        self._mine, self._all = np.empty(4, np.int64), np.empty(4, np.int64)
        self._broken = ""
        self._sent: list[tuple[Any, Any, int]] = []  # (requests, what they read, to whom)

    # --- agreement

    def differ(self, fingerprint: int, sequence: int, what: Callable[[], str]) -> bool:
        """Whether the ranks' fingerprints or sequence numbers differ; waits for all ranks."""
        if self._broken:
            raise ControlError(
                f"rank {self._ctx.rank}: {what()} comes after one that failed ({self._broken}): the ranks' calls no "
                "longer fit together, start the job again"
            )
        if self._comm is None:  # making a communicator knows no timeout: see first that everyone is there
            self._control.exchange("the first eager collective", None, self._timeout)
            # Of the communicator that the group is from: MPICH 4.0 crashes on another one's.
            self._comm = self._pairs.Create_group(self._pairs.Get_group(), _TAG)
        if _WAITING in self._control.notices:
            self._ask(what())  # the others gave up before this rank came
        self._mine[:] = fingerprint, ~fingerprint, sequence, ~sequence
        request = self._comm.Iallreduce(self._mine, self._all, op=self._mpi.MAX)
        try:
            self._wait(request.Test, bool, lambda: self._ask(what()))
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            raise
        high, low, last, first = self._all.tolist()
        return high != ~low or last != ~first

    def _wait(
        self,
        done: Callable[[], Any],
        hopeless: Callable[[dict[str, Any]], Any],
        ask: Callable[[], None],
    ) -> None:
        """Until `done()`. After the timeout, or soon if the others' notices look `hopeless`, `ask` raises or not."""
        for _ in range(_SPINS):
            if done():
                return
        notices = self._control.notices
        start = asked = time.monotonic()
        since = None  # when things began to look hopeless
        while not done():
            now = time.monotonic()
            since = (since or now) if notices and hopeless(notices) else None
            gave_up = _WAITING in notices
            if now - asked > self._timeout - self._grace or (since and (gave_up or now - since > _ELSEWHERE)):
                if done():
                    return
                ask()
                asked, since = now, None
            time.sleep(min(_NAP, (now - start) / 10))

    @property
    def _grace(self) -> float:
        return min(1.0, self._timeout / 4)

    def _ask(self, what: str) -> None:
        """Who is missing? Raises, unless everyone waits as this rank does."""
        try:
            self._control.exchange(_WAITING, None, self._grace)
        except ControlError as error:
            raise ControlError(
                f"{what}: not every rank came to it (timeout: {self._timeout:g} s; see jaxdist.init). {error}"
            ) from None

    # --- collectives

    def load(self, leaf: Any) -> np.ndarray:
        """A leaf as a C-contiguous host array; waits until it is computed, copies nothing on CPUs."""
        x = np.asarray(leaf)
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)

    def run(self, call: Call, leaves: Sequence[np.ndarray], group: Group) -> list[jax.Array | None]:
        """The results; None where this rank's own value stays. All ranks of the group are in this call."""
        if not leaves:
            return []
        compat.release_dropped()  # the pages of the last result, still in the cache, serve for this one
        comm = self._comm_of(group)
        method: Any = getattr(self, f"_{call.kind}")
        outs = [method(call, x, comm, group) for x in leaves]
        return [out if out is None else compat.adopt(out) for out in outs]

    def _comm_of(self, group: Group) -> Any:
        if group.n == self._ctx.size and group.ranks == tuple(range(group.n)):
            return self._comm
        if group.ranks not in self._comms:
            # Create_group keeps the order of the list, and only the group's ranks take part.
            members = self._comm.Get_group().Incl(list(group.ranks))
            self._comms[group.ranks] = self._comm.Create_group(members, _TAG)
        return self._comms[group.ranks]

    def _allreduce(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray:
        how = reduction(call.op, x.dtype)
        out = self._pool.take(x.shape, how.out)
        if not x.size:
            return out
        if how.native and x.nbytes < _PART * group.n:
            comm.Allreduce(x, out, op=self._op(call.op))
        elif x.nbytes * group.n <= _GATHERED:
            everyones = self._pool.take((group.n, *x.shape), x.dtype)
            comm.Allgather(as_bytes(x), as_bytes(everyones))
            how.finish(how.ufunc.reduce(everyones.astype(how.sums_in, copy=False), axis=0), group.n, out)
        else:
            bounds = bounds_of(x.size, group.n)
            flat = out.reshape(-1)
            self._reduce_parts(x.reshape(-1), bounds, how, flat[slice(*bounds[group.me])], comm, group)
            for to, source in rounds_of(group):
                self._move(comm, [(flat[slice(*bounds[group.me])], to)], [(flat[slice(*bounds[source])], source)])
        return out

    def _reduce(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray | None:
        how = reduction(call.op, x.dtype)
        is_root = group.me == call.root
        out = self._pool.take(x.shape, how.out) if is_root else None
        if not x.size:
            return out
        if how.native and x.nbytes < _PART * group.n:
            comm.Reduce(x, out, op=self._op(call.op), root=call.root)
            return out
        bounds = bounds_of(x.size, group.n)
        lo, hi = bounds[group.me]
        part = self._pool.take((hi - lo,), how.out) if out is None else out.reshape(-1)[lo:hi]
        self._reduce_parts(x.reshape(-1), bounds, how, part, comm, group)
        if out is None:
            self._move(comm, [(part, call.root)], [])
        else:
            whole = out.reshape(-1)
            self._move(comm, [], [(whole[slice(*b)], i) for i, b in enumerate(bounds) if i != group.me])
        return out

    def _reduce_scatter(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray:
        how = reduction(call.op, x.dtype)
        parts = self._parts(x, positive(call.axis, x.ndim), group.n)
        out = self._pool.take(parts.shape[1:], how.out)
        if out.size:
            bounds = bounds_of(x.size, group.n)
            self._reduce_parts(parts.reshape(-1), bounds, how, out.reshape(-1), comm, group)
        return out

    def _allgather(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray:
        axis = positive(call.axis, x.ndim)
        out = self._pool.take(gathered_shape(x.shape, axis, group.n), x.dtype)
        if not out.size:
            return out
        parts, store = self._received(out, axis, group.n)
        if x.nbytes <= _SMALL:
            comm.Allgather(as_bytes(x), as_bytes(parts))
        else:
            np.copyto(parts[group.me], x.reshape(parts.shape[1:]))
            for to, source in rounds_of(group):
                self._move(comm, [(x, to)], [(parts[source], source)])
        store()
        return out

    def _all_to_all(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray:
        sent = self._parts(x, positive(call.split_axis, x.ndim), group.n)
        axis = positive(call.concat_axis, x.ndim)
        out = self._pool.take(gathered_shape(sent.shape[1:], axis, group.n), x.dtype)
        if not out.size:
            return out
        parts, store = self._received(out, axis, group.n)
        np.copyto(parts[group.me], sent[group.me])
        for to, source in rounds_of(group):
            self._move(comm, [(sent[to], to)], [(parts[source], source)])
        store()
        return out

    def _broadcast(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray | None:
        is_root = group.me == call.root
        out = None if is_root else self._pool.take(x.shape, x.dtype)
        for piece in pieces_of(as_bytes(x if out is None else out)):
            comm.Bcast(piece, root=call.root)
        return out

    def _gather(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray | None:
        if group.me != call.root:
            self._move(comm, [(x, call.root)], [])
            return None
        out = self._pool.take(gathered_shape(x.shape, 0, group.n), x.dtype)
        parts = out.reshape(group.n, *x.shape)
        self._move(comm, [], [(parts[i : i + 1], i) for i in range(group.n) if i != group.me])
        parts[group.me] = x
        return out

    def _scatter(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray:
        parts = split(x, 0, group.n)
        out = self._pool.take(parts.shape[1:], x.dtype)
        if group.me == call.root:
            self._move(comm, [(parts[i], i) for i in range(group.n) if i != group.me], [])
            np.copyto(out, parts[group.me])
        else:
            self._move(comm, [], [(out, call.root)])
        return out

    def _permute(self, call: Call, x: np.ndarray, comm: Any, group: Group) -> np.ndarray:
        out = self._pool.take(x.shape, x.dtype)
        sources = [s for s, d in call.perm if d == group.me]
        targets = [d for s, d in call.perm if s == group.me]
        if sources == [group.me]:
            np.copyto(out, x)
            return out
        if not sources:
            out[...] = np.zeros((), x.dtype)
        self._move(comm, [(x, to) for to in targets], [(out, source) for source in sources])
        return out

    # --- building blocks

    def _op(self, op: str) -> Any:
        return getattr(self._mpi, {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}[op])

    def _parts(self, x: np.ndarray, axis: int, n: int) -> np.ndarray:
        """`split`, contiguous."""
        parts = split(x, axis, n)
        if parts.flags.c_contiguous:
            return parts
        copy = self._pool.take(parts.shape, x.dtype)
        np.copyto(copy, parts)
        return copy

    def _received(self, out: np.ndarray, axis: int, n: int) -> tuple[np.ndarray, Callable[[], None]]:
        """Where `n` slices of `out` along `axis` are received, and what puts them in place then."""
        places = split(out, axis, n)
        if places.flags.c_contiguous:
            return places, lambda: None
        parts = self._pool.take(places.shape, out.dtype)
        return parts, lambda: np.copyto(places, parts)

    def _reduce_parts(
        self, x: np.ndarray, bounds: Sequence[tuple[int, int]], how: Reduction, out: np.ndarray, comm: Any, group: Group
    ) -> None:
        """Into `out`: my part of `x`, reduced over the group. Each segment is added up while the next one travels."""
        lo, hi = bounds[group.me]
        wide = how.sums_in
        total = out if out.dtype == wide else self._pool.take(out.shape, wide)
        step = max(1, _SEGMENT // x.itemsize)
        scratch = self._pool.take((2, min(step, max(1, hi - lo))), x.dtype)
        ends = [(i, min(i + step, hi - lo)) for i in range(0, hi - lo, step)]
        so_far = x[lo:hi]
        for to, source in rounds_of(group):

            def receive(k: int, source: int = source) -> Any:
                start, end = ends[k]
                return comm.Irecv(as_bytes(scratch[k % 2, : end - start]), source)

            sends = [comm.Isend(as_bytes(x[i : min(i + step, bounds[to][1])]), to) for i in range(*bounds[to], step)]
            coming = receive(0) if ends else None
            for k, (start, end) in enumerate(ends):
                assert coming is not None
                coming.Wait()
                coming = receive(k + 1) if k + 1 < len(ends) else None
                theirs = scratch[k % 2, : end - start].astype(wide, copy=False)
                how.ufunc(so_far[start:end].astype(wide, copy=False), theirs, out=total[start:end])
            self._mpi.Request.Waitall(sends)
            so_far = total
        if max(b - a for a, b in bounds) > step:
            # A sender hears that its message has arrived when the receiver's MPI gets to tell it, and after so many of
            # them that may be in its next call: who is done must not be away before the others are.
            comm.Barrier()
        how.finish(total, group.n, out)

    def _move(
        self, comm: Any, sends: Sequence[tuple[np.ndarray, int]], recvs: Sequence[tuple[np.ndarray, int]]
    ) -> None:
        """Contiguous arrays to and from positions of `comm`, all at once."""
        requests = [comm.Irecv(piece, source) for x, source in recvs for piece in pieces_of(as_bytes(x))]
        requests += [comm.Isend(piece, to) for x, to in sends for piece in pieces_of(as_bytes(x))]
        self._mpi.Request.Waitall(requests)

    # --- between two

    def send(self, header: Any, leaves: Sequence[np.ndarray], to: int) -> None:
        """Starts to send; the leaves must not change until they are received."""
        self._sent = [s for s in self._sent if not self._mpi.Request.Testall(s[0])]
        if not self._sent:
            atexit.unregister(self._finish_sends)
            atexit.register(self._finish_sends)  # runs before the context says goodbye
        head = np.frombuffer(pickle.dumps((header, [x.nbytes for x in leaves])), np.uint8)
        requests = [self._pairs.Isend(head, to, _TAG)]
        requests += [self._pairs.Isend(piece, to, _TAG + 1) for x in leaves for piece in pieces_of(as_bytes(x))]
        self._sent.append((requests, (head, leaves), to))

    def recv(self, source: int, what: str, accept: Callable[[Any], Sequence[jax.ShapeDtypeStruct]]) -> list[jax.Array]:
        """What `source` sends next; `accept` raises if its header is not as expected, and the data are dropped."""
        status = self._mpi.Status()

        def ask() -> None:
            raise ControlError(
                f"rank {self._ctx.rank}: {what}: {self._control.who(source)} sent nothing within {self._timeout:g} s, "
                "or has left. Each recv needs a send on the other rank"
            )

        self._wait(
            lambda: self._pairs.Iprobe(source, _TAG, status),
            lambda notices: source in notices.get("bye", ()),
            ask,
        )
        head = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._pairs.Recv(head, source, _TAG)
        header, sizes = pickle.loads(head.data)
        try:
            outs = [self._pool.take(like.shape, np.dtype(like.dtype)) for like in accept(header)]
        except Exception:
            for size in sizes:
                self._receive(self._pool.take((size,), np.dtype(np.uint8)), source)
            raise
        for out in outs:
            self._receive(out, source)
        return [compat.adopt(out) for out in outs]

    def _receive(self, out: np.ndarray, source: int) -> None:
        for piece in pieces_of(as_bytes(out)):
            self._pairs.Recv(piece, source, _TAG + 1)

    def _finish_sends(self) -> None:
        """At the end of the script: what was sent must stay in memory until it is received."""
        for requests, _, to in self._sent:
            try:
                self._wait(
                    lambda requests=requests: self._mpi.Request.Testall(requests),
                    lambda notices, to=to: to in notices.get("bye", ()),
                    lambda to=to: _never_received(self._ctx.rank, self._control.who(to)),
                )
            except ControlError as error:
                print(f"[jaxdist] {error}", file=sys.stderr, flush=True)


def _never_received(rank: int, who: str) -> None:
    raise ControlError(f"rank {rank}: {who} did not receive what was sent to it (jaxdist.send)")
