"""The order of the examples in an epoch, and each rank's part of a batch."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

EXACT = 1 << 22  # examples up to which an epoch's order is one permutation in memory (32 MiB), and beyond it a hash
MOST = 1 << 32  # examples that the hash can order


@dataclass(frozen=True)
class Place:
    """Where a batch begins."""

    epoch: int = 0
    position: int = 0  # examples of the epoch before it, of the whole job
    inner: str = ""  # of a stream, as text: see `jaxdist.data.reader.resumption`; "" at the start of an epoch


@dataclass(frozen=True)
class Sampling:
    """The numbers that determine which examples each rank reads."""

    length: int  # examples of the data set
    batch_size: int  # examples of a part
    own: tuple[int, ...]  # the parts of each batch that this rank reads, one after the other
    parts: int  # parts of a batch
    shuffle: bool  # whether each epoch has an order of its own
    seed: int  # of that order
    keep: bool  # whether the tail comes as it is, divided over the ranks

    @property
    def whole(self) -> int:
        """Examples of a step in all parts."""
        return self.batch_size * self.parts

    @property
    def alone(self) -> bool:
        """Whether this rank reads all of a batch."""
        return len(self.own) == self.parts

    def steps(self, position: int) -> int:
        """Steps from a position to the end of the epoch."""
        left = self.length - position
        return -(-left // self.whole) if self.keep else left // self.whole

    def seek(self, at: Place, step: int) -> Place:
        """The place of the batch that comes `step` batches after the one at a place."""
        first = self.steps(at.position)
        if step < first:
            return Place(at.epoch, at.position + step * self.whole)
        further, step = divmod(step - first, self.steps(0))
        return Place(at.epoch + 1 + further, step * self.whole)

    def of(self, length: int) -> Sampling:
        """The same for this many examples in their order."""
        return dataclasses.replace(self, length=length, shuffle=False)

    def tail(self, position: int) -> int:
        """Examples of the batch at a position, if it is a last one that stays smaller than the others; else 0."""
        left = self.length - position
        return left if self.keep and left < self.whole else 0

    def examples(self, epoch: int, position: int) -> np.ndarray:
        """This rank's examples of a batch."""
        left = self.tail(position)
        each = -(-left // self.parts) or self.batch_size
        rows = np.concatenate([part * each + np.arange(each) for part in self.own])
        if left:
            rows = rows[rows < left] if self.alone else np.minimum(rows, left - 1)  # copies of the last one
        return self._order(epoch, position + rows)

    def _order(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return places
        if self.length <= EXACT:
            return _permutation(self.length, self.seed, epoch)[places]
        from grain.experimental import index_shuffle  # slow to import; and to run, on short data sets

        key = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return np.array([index_shuffle(int(i), max_index=self.length - 1, seed=key, rounds=4) for i in places])


@functools.lru_cache(maxsize=4)
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)
