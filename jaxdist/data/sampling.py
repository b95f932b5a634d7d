"""The order of examples in an epoch, and each rank's rows of a batch."""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from jaxdist.device_map import Share

EXACT = 1 << 22  # longest epoch ordered by a permutation in memory (32 MiB), not by a hash
MOST = 1 << 32  # examples that the hash can order


@dataclass(frozen=True)
class Place:
    """The start of a batch."""

    epoch: int = 0
    position: int = 0  # examples of the epoch before it, over all ranks
    inner: str = ""  # of a stream, as text: see `jaxdist.data.reader.resumption`; "" at the start of an epoch


@dataclass(frozen=True)
class Sampling:
    """The numbers that determine which examples each rank reads."""

    length: int  # number of examples in the data set
    batch_size: int  # examples of all ranks per step
    share: Share  # of each batch, that this rank reads
    shuffle: bool  # whether each epoch has its own order
    seed: int  # seed of that order
    keep: bool  # whether to keep the partial last batch

    def steps(self, position: int) -> int:
        """Return the number of steps from a position to the end of the epoch."""
        left = self.length - position
        return -(-left // self.batch_size) if self.keep else left // self.batch_size

    def seek(self, at: Place, step: int) -> Place:
        """Return the place `step` batches after a place."""
        first = self.steps(at.position)
        if step < first:
            return Place(at.epoch, at.position + step * self.batch_size)
        further, step = divmod(step - first, self.steps(0))
        return Place(at.epoch + 1 + further, step * self.batch_size)

    def of(self, length: int) -> "Sampling":
        """Return this sampling for `length` examples in their order."""
        return dataclasses.replace(self, length=length, shuffle=False)

    def size(self, position: int) -> int:
        """Return the number of examples in the batch at a position, of all ranks."""
        return min(self.batch_size, self.length - position)

    def examples(self, epoch: int, position: int) -> np.ndarray:
        """Return the indices of this rank's examples of a batch."""
        rows = self.share.rows(self.size(position))
        places = np.arange(position + rows.start, position + rows.stop)
        if not self.shuffle:
            return places
        if self.length <= EXACT:
            return _permutation(self.length, self.seed, epoch)[places]
        from grain.experimental import index_shuffle  # slow to import, and on short data sets

        key = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return np.array([index_shuffle(int(i), max_index=self.length - 1, seed=key, rounds=4) for i in places])


@functools.lru_cache(maxsize=4)
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)
