"""`profile`: a trace of each rank, and how much of the devices' time collectives take."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.runtime.context import get_context

# XLA names an operation after the JAX primitive that it comes from (0.10), or after its own; NCCL its kernels.
_COLLECTIVE = re.compile(
    r"(?P<all_reduce>psum(_invariant)?|pmax|pmin|jaxdist_(group|all)_reduce|jaxdist_mpi_allreduce|all-reduce)"
    r"|(?P<all_gather>all_gather(_invariant)?|jaxdist_all_gather|jaxdist_mpi_allgather|all-gather)"
    r"|(?P<reduce_scatter>reduce_scatter|psum_scatter|jaxdist_reduce_scatter|reduce-scatter)"
    r"|(?P<all_to_all>(ragged_)?all_to_all|jaxdist_mpi_alltoall|(ragged-)?all-to-all)"
    r"|(?P<permute>ppermute|jaxdist_mpi_sendrecv|collective-permute)"
)
_SUFFIX = re.compile(r"(-start|-done)?(\.\d+|\.clone)*$")
_NCCL = re.compile(r"nccl\w*?(AllReduce|AllGather|ReduceScatter|SendRecv|Broadcast|Reduce)")
_Interval = tuple[float, float]


@dataclass(frozen=True)
class Share:
    """The time of one rank's devices, in seconds; of several threads or streams, added up."""

    busy: float  # in operations of compiled programs; what lies in another's time counts once
    collectives: float  # of these, in collectives, with the wait for the other ranks
    kinds: dict[str, int]  # how many there were of each kind

    @property
    def share(self) -> float:
        """Of collectives; 0 if there was nothing."""
        return self.collectives / self.busy if self.busy else 0.0


@contextlib.contextmanager
def profile(path: str | os.PathLike[str], *, python: bool = False) -> Iterator[None]:
    """Trace what the devices of every rank do, and say on the root's standard error what collectives take of it.

    Every rank enters and leaves it; rank r writes into ``path/rank{r}``. TensorBoard reads that (with its plugin
    tensorboard-plugin-profile), https://ui.perfetto.dev the ``perfetto_trace.json.gz`` inside. Entering and leaving
    wait for the work under way on this process's devices. Run the step once before, or its compilation is in the trace.

    What is counted: on each thread (CPU) or stream (GPU) the time in operations of compiled programs, and of these in
    collectives, where the wait for a slower rank is part of the collective. Collectives outside a step that go
    through MPI are no compiled programs, so they are not counted.

    Args:
      path: a folder; made if it is not there.
      python: trace Python's functions as well; they get slower by it.

    Raises:
      OSError: some rank can't write there (on every rank).
      RuntimeError: a profile is under way already.

    Example:
      >>> import jax, jaxdist, tempfile
      >>> with tempfile.TemporaryDirectory() as path, jaxdist.profile(path):
      ...     _ = jax.numpy.ones(3) + 1
    """
    ctx, root = get_context(), Path(path)
    _finish_dispatched()
    folder = root / f"rank{ctx.rank}"

    def prepare() -> Part[None]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            raise OSError(f"traces can't be written there: {error.strerror}: {str(root)!r}") from error
        return Part(None)

    def read() -> Part[None]:
        traces = sorted(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        if not traces:
            raise RuntimeError(f"jax.profiler has left no trace in {folder}")
        return Part(None, told=share(traces[-1]))

    on_every_rank(ctx, "profile", prepare, raises=(OSError,))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    jax.profiler.start_trace(folder, create_perfetto_trace=True, profiler_options=options)
    try:
        yield
        _finish_dispatched()
    finally:
        jax.profiler.stop_trace()
    _, shares = on_every_rank(ctx, "the end of profile", read, raises=(RuntimeError,))
    if ctx.is_root:
        print(_summary(shares, root), file=sys.stderr, flush=True)


def _finish_dispatched() -> None:
    """Wait for the programs under way on this process's devices."""
    jax.block_until_ready([x for x in jax.live_arrays() if not x.is_deleted()])


def share(trace: str | os.PathLike[str]) -> Share:
    """What collectives take of a device's time, by one trace."""
    busy: dict[str, list[_Interval]] = defaultdict(list)
    collectives: dict[str, list[_Interval]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        device = plane.name.startswith("/device:")
        for i, line in enumerate(plane.lines):
            if device and not line.name.startswith(("Stream", "XLA Ops")):
                continue  # what is made of the others: whole modules, steps, names of layers
            where = f"{plane.name}/{i}"
            for event in line.events:
                if event.name.startswith("$") or not (device or any(name == "hlo_op" for name, _ in event.stats)):
                    continue  # Python's functions, XLA's own work on the host
                interval = event.start_ns, event.start_ns + event.duration_ns
                busy[where].append(interval)
                if kind := kind_of(event.name):
                    collectives[where].append(interval)
                    kinds[kind] += 1
    in_all, in_collectives = (sum(map(union, each.values())) / 1e9 for each in (busy, collectives))
    return Share(in_all, in_collectives, dict(kinds.most_common()))


def kind_of(operation: str) -> str | None:
    """Which collective an operation of a trace is, by its name; None: none."""
    found = _COLLECTIVE.fullmatch(_SUFFIX.sub("", operation))
    if found is not None:
        return found.lastgroup
    nccl = _NCCL.match(operation)
    return nccl[1] if nccl else None


def union(intervals: Iterable[_Interval]) -> float:
    """The length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _summary(shares: Sequence[Share], root: Path) -> str:
    busy, collectives = sum(s.busy for s in shares), sum(s.collectives for s in shares)
    if not busy:
        return f"[jaxdist profile] no device ran anything; traces in {root}/rank*"
    each = [s.share for s in shares]
    ranks = f" ({min(each):.0%} to {max(each):.0%} on each rank)" if len(each) > 1 else ""
    kinds = ", ".join(f"{n} {kind}" for kind, n in shares[0].kinds.items()) or "none"
    return (
        f"[jaxdist profile] {collectives / busy:.1%} of the devices' busy time is in collectives{ranks}, with the wait "
        f"for the slowest: {collectives:.3g} s of {busy:.3g} s on {len(shares)} rank(s).\n"
        f"[jaxdist profile] On rank 0: {kinds}. Traces: {root}/rank*"
    )
