"""Host memory for results, used again once no array holds it: page faults of fresh pages cost as much as the wire."""

from __future__ import annotations

import math
import mmap
from collections import defaultdict, deque
from typing import Any

import numpy as np

_SMALL = 1 << 16  # below: malloc, whose pages are warm
_HUGE = 1 << 21  # from here on: huge pages, if the kernel gives some
_ALIGNMENT = 64  # of a buffer that JAX adopts without a copy
_IDLE_BYTES = 1 << 29  # kept at most


class Pool:
    """Buffers by size. What `take` gives comes back by itself, when the last array over it is gone."""

    def __init__(self, idle_bytes: int = _IDLE_BYTES):
        self._idle_bytes = idle_bytes
        self._idle: defaultdict[int, deque[_Block]] = defaultdict(deque)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An uninitialized C-contiguous array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL:
            raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            return raw[start : start + nbytes].view(dtype).reshape(shape)
        step = 1 << max(16, (nbytes - 1).bit_length() - 3)  # at most an eighth too much
        size = -(-nbytes // step) * step
        try:
            block = self._idle[size].pop()
        except IndexError:
            block = _Block(size)
        return np.asarray(_Lease(self, block))[:nbytes].view(dtype).reshape(shape)

    def give(self, block: _Block) -> None:
        """Takes back (from any thread, in the middle of anything: no lock, and single dict and deque calls only)."""
        idle = sum(size * len(blocks) for size, blocks in list(self._idle.items()))
        if idle + block.size <= self._idle_bytes:
            self._idle[block.size].append(block)


class _Block:
    """Pages of this process alone."""

    def __init__(self, size: int):
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(memory, np.uint8)


class _Lease:
    """The owner of an array over a block: NumPy and JAX keep it as long as anything refers to the memory."""

    def __init__(self, pool: Pool, block: _Block):
        self._pool, self._block = pool, block
        self.__array_interface__ = block.bytes.__array_interface__

    def __del__(self) -> None:
        self._pool.give(self._block)
