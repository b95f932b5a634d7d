"""Read a loader's batches from any position on: by index, or sequentially."""

import functools
import inspect
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist import compat
from jaxdist.data.sampling import Place, Sampling
from jaxdist.data.sources import Arrays, as_text, digest, of_text, open_epoch, stacked
from jaxdist.errors import DataError


class Read(NamedTuple):
    """A batch."""

    batch: Any  # this rank's rows
    size: int  # examples of all ranks
    at: Place  # its start
    then: Place  # the start of the next batch
    digest: int = 0  # of all examples of a stream so far, to compare between ranks


@dataclass(frozen=True)
class Reader:
    """Batches of a source from any position on, through all epochs."""

    source: Any
    sampling: Sampling
    window: int | None  # examples of a stream to shuffle together; None to read by index
    transform: Callable[..., Any] | None
    workers: int
    prefetch: int
    compare: bool  # whether other ranks read the stream too

    @property
    def streams(self) -> bool:
        """Check whether the source can only be read in order."""
        return self.window is not None

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the properties that a state must share to fit."""
        length = {} if self.streams else {"length": self.sampling.length}
        return length | {"seed": self.sampling.seed, "shuffle": self.window if self.streams else self.sampling.shuffle}

    def start(self, place: Place) -> Any:
        """Return an iterator over batches (`Read`), with ``close``."""
        if self.streams:
            batches = self._in_order(place)
            read: Callable[[int], Read] = lambda _: next(batches)
        else:
            read = functools.partial(self._by_index, place)
        if not self.workers and not self.prefetch:
            return (read(step) for step in itertools.count())
        import grain  # slow to import

        unread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        steps = grain.MapDataset.range(sys.maxsize).map(read).to_iter_dataset(unread)
        if not self.workers:  # a thread that does not keep the process alive
            return grain.experimental.ThreadPrefetchDatasetIterator(iter(steps), self.prefetch)
        compat.start_tracker()
        steps = steps.mp_prefetch(grain.multiprocessing.MultiprocessingOptions(self.workers, max(1, self.prefetch)))
        return iter(steps.map(lambda read: jax.tree.map(compat.forget_name, read)))

    def _by_index(self, start: Place, step: int) -> Read:
        """Return the batch `step` batches after a position; also called in workers."""
        sampling, source = self.sampling, self.source
        at, then = sampling.seek(start, step), sampling.seek(start, step + 1)
        indices = sampling.examples(at.epoch, at.position)
        if isinstance(source, Arrays) and self.transform is None:
            batch = jax.tree.map(lambda x: x[indices], source.tree)
        else:
            grain = sys.modules.get("grain")
            # By grain's convention an index past the end belongs to a later epoch: it draws different random numbers.
            past = at.epoch * sampling.length if grain and isinstance(source, grain.MapDataset) else 0
            read = indices.tolist() or [at.position]
            # A generator: in grain, StopIteration would end the data of a worker.
            batch = stacked([*((i, self._transformed(source[past + i], at.epoch, i)) for i in read)], len(indices))
        return Read(batch, sampling.size(at.position), at, then)

    def _in_order(self, at: Place) -> Iterator[Read]:
        """Yield a stream's batches from a position on. Each rank reads all, and keeps its rows."""
        whole, total = self.sampling.batch_size, 0
        while True:
            examples = self._examples(at)
            rows = list(itertools.islice(examples, whole))
            expected = resumption(at)[2]
            if expected is not None and (not rows or digest(rows[0][0]) != expected):
                raise DataError(
                    f"the stream does not match the state: the example at position {at.position} of epoch {at.epoch} "
                    "is missing or not the expected one. A stream must have the same order each time it is read; "
                    "random changes belong in transform="
                )
            if not self._enough(rows) and not at.position:  # a restart may leave too little
                raise ValueError(
                    f"epoch {at.epoch} of the stream has {len(rows)} examples, fewer than one batch ({whole}): no "
                    "step would run. Use a smaller batch_size or tail='keep'"
                )
            while self._enough(rows):
                further = list(itertools.islice(examples, whole))
                then = Place(at.epoch + 1)
                if self._enough(further):
                    example, start, state = further[0]
                    then = Place(at.epoch, at.position + whole, repr((start, state, digest(example))))
                for example, *_ in rows if self.compare else ():
                    total = zlib.crc32(digest(example).to_bytes(4, "big"), total)
                here = self.sampling.of(at.position + len(rows))
                mine = here.examples(at.epoch, at.position)
                read = [(i, rows[i - at.position][0]) for i in mine.tolist() or [at.position]]
                batch = stacked([(i, self._transformed(example, at.epoch, i)) for i, example in read], len(mine))
                yield Read(batch, len(rows), at, then, total)
                rows, at = further, then
            at = Place(at.epoch + 1) if at.position else at

    def _enough(self, rows: list[Any]) -> bool:
        return bool(rows) if self.sampling.keep else len(rows) == self.sampling.batch_size

    def _examples(self, at: Place) -> Iterator[tuple[Any, int, str | None]]:
        """Yield the rest of an epoch: each example, a position to resume from, and grain's state there, if any."""
        import grain

        start, state, _ = resumption(at)
        examples = open_epoch(self.source, at.epoch)
        exact = isinstance(examples, grain.DatasetIterator)
        if exact and state is not None:
            examples.set_state(of_text(state))
        skip = at.position - start
        while True:
            # Not Hugging Face's, which omits the shuffle buffer, or points to the next chunk.
            now = as_text(examples.get_state()) if exact else None  # it may change in place
            back, saved = (0, None) if now is None else (start, now)
            rows = list(itertools.islice(examples, self.window or self.sampling.batch_size))
            if self.window:
                rng = np.random.default_rng([self.sampling.seed, at.epoch, start // self.window])
                rows = [rows[i] for i in rng.permutation(len(rows))]
            for example in rows[skip:]:
                yield example, back, saved
            if not rows:
                return
            start, skip = start + len(rows), max(0, skip - len(rows))

    def _transformed(self, example: Any, epoch: int, i: int) -> Any:
        if self.transform is None:
            return example
        if self._takes_rng:
            return self.transform(example, np.random.default_rng([self.sampling.seed, epoch, i]))
        return self.transform(example)

    @functools.cached_property
    def _takes_rng(self) -> bool:
        try:
            parameters = inspect.signature(self.transform).parameters.values()  # type: ignore[arg-type]
        except ValueError:  # functions in C
            return False
        return sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in parameters) > 1


def resumption(at: Place) -> tuple[int, str | None, int | None]:
    """Return where to resume a stream, the state there (None: reread), and the next example's digest."""
    if not at.inner:
        return 0, None, None
    found = of_text(at.inner)
    if not isinstance(found, tuple) or len(found) != 3:
        raise ValueError(f"not the state of a stream: {at.inner[:80]!r}")
    return found
