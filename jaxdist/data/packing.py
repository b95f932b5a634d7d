"""`packed`: rows of equal length, filled with documents, by index."""

import operator
from collections.abc import Iterator

import numpy as np

from jaxdist.data.documents import Documents


def packed(documents: Documents, length: int, *, seed: int | None = None) -> "Packed":
    """Pack documents into rows of `length` tokens, as a source for `jaxdist.loader`. Only the last row has padding.

    Args:
      documents: the documents of tokens, which may continue in the next row.
      length: the number of tokens in a row.
      seed: the seed of the order of documents before packing; None keeps it. The loader's `shuffle` orders the rows.

    Returns:
      A source. A row is a dict of int32 arrays ``(length,)``, named as in grain: ``tokens``; ``tokens_segment_ids``,
      numbered from 1 within the row, 0 for padding; and ``tokens_positions`` within the document, in the row.

    Raises:
      ValueError: `length` is not positive, `documents` is empty, or a token does not fit int32.

    Example:
      >>> import numpy as np
      >>> from jaxdist.data import Documents, packed
      >>> rows = packed(Documents(np.arange(1, 8), ends=[3, 5, 7]), 4)
      >>> {name: x.tolist() for name, x in rows[1].items()}
      {'tokens': [5, 6, 7, 0], 'tokens_segment_ids': [1, 2, 2, 0], 'tokens_positions': [0, 0, 1, 0]}
    """
    length = operator.index(length)
    if length < 1:
        raise ValueError(f"packed(length={length}): expected a positive number of tokens")
    if not len(documents.tokens):
        raise ValueError("packed: the documents have no tokens")
    if not np.can_cast(documents.tokens.dtype, np.int32) and documents.tokens.max() > np.iinfo(np.int32).max:
        raise ValueError(f"packed: token {documents.tokens.max()} does not fit int32, the type of rows")
    order = np.arange(len(documents)) if seed is None else np.random.default_rng(seed).permutation(len(documents))
    order = order[documents.lengths[order] > 0]
    return Packed(documents, length, order)


class Packed:
    """Rows of documents, by index; made by `packed`."""

    def __init__(self, documents: Documents, length: int, order: np.ndarray):
        self._documents, self._length = documents, length
        ends = np.cumsum(documents.lengths[order])
        at = np.union1d(ends, np.arange(length, ends[-1], length))  # ends of pieces: of documents and of rows
        froms = np.concatenate([[0], at[:-1]])
        which = np.searchsorted(ends, froms, "right")
        self._starts, self._sizes = documents.ends[order][which] - ends[which] + froms, at - froms
        # The first piece of each row, and the end.
        self._rows = np.append(np.searchsorted(froms, np.arange(0, ends[-1], length)), len(froms))

    def __len__(self) -> int:
        return len(self._rows) - 1

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        pieces = slice(self._rows[index], self._rows[index + 1])
        starts, sizes = self._starts[pieces], self._sizes[pieces]
        tokens, segments, positions = (np.zeros(self._length, np.int32) for _ in range(3))
        at = 0
        for i, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True), 1):
            end = at + size
            tokens[at:end] = self._documents.read(start, start + size)
            segments[at:end], positions[at:end] = i, np.arange(size)
            at = end
        return {"tokens": tokens, "tokens_segment_ids": segments, "tokens_positions": positions}
