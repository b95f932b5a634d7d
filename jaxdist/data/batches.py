"""How a loader's batches are read, from a source by index."""

from __future__ import annotations

import inspect
import itertools
import sys
import zlib
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from jaxdist import compat
from jaxdist.data.sampling import Place, Sampling
from jaxdist.step.batch import batch_part

_AT_HAND, _SMALL = 1 << 28, 1 << 20  # bytes of arrays, and of a rank's batch, that need not be read ahead


class BatchReader:
    """The batch of a step that comes so many steps after the start; what grain calls, in whatever process."""

    def __init__(
        self, sampling: Sampling, epoch: int, position: int, source: Any, transform: Callable[..., Any] | None
    ):
        self.sampling, self.start = sampling, (epoch, position)
        self.source, self.transform = source, transform
        self.examples = _grain_dataset(source, transform, sampling.seed)

    @property
    def small(self) -> bool:
        """Whether a batch is there at once."""
        if not isinstance(self.source, Arrays):
            return False
        whole = sum(x.nbytes for x in jax.tree.leaves(self.source.tree))
        return whole <= _AT_HAND and whole * self.sampling.batch_size * len(self.sampling.own) <= _SMALL * len(
            self.source
        )

    def __call__(self, step: int) -> Any:
        epoch, position = self.sampling.seek(*self.start, step)
        indices, real = self.sampling.examples(epoch, position)
        if isinstance(self.source, Arrays) and self.transform is None:
            batch = jax.tree.map(lambda x: x[indices], self.source.tree)
        else:
            batch = stacked([(i, self.example(epoch, i)) for i in indices.tolist()])
        if self.sampling.keep:  # a plain number: grain's workers would lose an attribute of the arrays
            return batch, self.sampling.tail(position) or 0
        return (batch, real.astype(np.float32)) if self.sampling.pad else batch

    def example(self, epoch: int, index: int) -> Any:
        """An example, transformed."""
        if self.examples is not None:
            # By grain's convention an index beyond the end is one of a later epoch: it draws other random numbers.
            return self.examples[epoch * self.sampling.length + index]
        example = self.source[index]
        return example if self.transform is None else self.transform(example)


class Indexed:
    """The batches of a source by index, as the loader reads them."""

    def __init__(
        self,
        source: Any,
        sampling: Sampling,
        transform: Callable[..., Any] | None,
        workers: int,
        prefetch: int,
    ):
        self.source, self.sampling, self.transform = source, sampling, transform
        self.workers, self.prefetch = workers, prefetch

    @property
    def fixed(self) -> dict[str, Any]:
        """What has to be the same for a state to be of this source."""
        return {"length": self.sampling.length, "seed": self.sampling.seed, "shuffle": self.sampling.shuffle}

    def first(self) -> int:
        """A checksum of the first and the last example, which tells a part of the data from all of it."""
        return fingerprint(self.source)

    def start(self, place: Place) -> Any:
        """What the loader reads from a place on, through all epochs: grain's workers live on meanwhile.

        Small batches of arrays in memory come without grain: they are there sooner than it is imported, on each rank.
        """
        sampling = self.sampling
        read = BatchReader(sampling, place.epoch, place.position, self.source, self.transform)
        if not self.workers and self.transform is None and read.small:
            return _Placed((read(step) for step in itertools.count()), sampling, place)
        import grain  # slow to import

        options = grain.ReadOptions(num_threads=min(1, self.prefetch), prefetch_buffer_size=self.prefetch)
        batches = grain.MapDataset.range(sys.maxsize).map(read).to_iter_dataset(options)
        if self.workers:
            from absl import flags

            if not flags.FLAGS.is_parsed():  # grain reads some; programs without absl.app never parse them
                flags.FLAGS.mark_as_parsed()
            compat.start_quiet_tracker()
            processes = grain.multiprocessing.MultiprocessingOptions(self.workers, max(1, self.prefetch))
            batches = batches.mp_prefetch(processes)
            batches = batches.map(lambda read: jax.tree.map(compat.forget_name, read))
        return _Placed(iter(batches), sampling, place)


class _Placed:
    """Batches by index, where each begins, and where the next one does."""

    def __init__(self, batches: Any, sampling: Sampling, place: Place):
        self._batches, self._sampling, self._place = batches, sampling, place

    def __next__(self) -> tuple[Any, Place, Place, int]:
        batch, at = next(self._batches), self._place
        self._place = Place(*self._sampling.seek(at.epoch, at.position, 1))
        return batch, at, self._place, 0

    def close(self) -> None:
        self._batches.close()


def known(sampling: Sampling, read: Any) -> Any:
    """A batch as the loader yields it, from what the reader makes of it."""
    if not sampling.keep:
        return read
    batch, left = read
    return jax.tree.map(lambda x: batch_part(x, left), batch) if left and not sampling.alone else batch


def close(streams: list[Any]) -> None:
    """End what `stream` has started, and forget it."""
    while streams:
        streams.pop().close()


class Arrays:
    """A pytree of arrays with one entry an example, as a source."""

    def __init__(self, tree: Any):
        lengths: dict[int, str] = {}
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = "source" + jax.tree_util.keystr(path)
            if not isinstance(x, (np.ndarray, jax.Array)) or not x.ndim:
                kind = "a scalar" if isinstance(x, (np.ndarray, jax.Array)) else f"a {type(x).__name__}"
                raise TypeError(
                    f"{name} is {kind}: expected an array with one entry an example. (A list is taken for a list of "
                    "examples, a dict or tuple for its parts)"
                )
            lengths.setdefault(len(x), name)
        if len(lengths) != 1:
            found = ", ".join(f"{name} has {n}" for n, name in lengths.items()) or "it has no arrays"
            raise ValueError(f"the arrays of the data set have different numbers of examples: {found}")
        self.tree, (self.length,) = jax.tree.map(np.asarray, tree), lengths

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        # A copy: a transform may write into it.
        return jax.tree.map(lambda x: x[index : index + 1].copy()[0], self.tree)


def open_source(source: Any) -> tuple[Any, int]:
    """A source by index, and its length."""
    if isinstance(source, (np.ndarray, jax.Array, dict, tuple)):
        source = Arrays(source)
    return source, len(source)


def is_stream(source: Any) -> bool:
    """Whether a source has its examples one after the other alone; or is a function that returns such a one."""
    if isinstance(source, np.ndarray | jax.Array | dict | tuple):
        return False
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return False
    if callable(source) and not hasattr(source, "__iter__"):
        return True
    if not hasattr(source, "__iter__"):
        raise TypeError(
            "a loader needs a source with __len__ and __getitem__, an iterable of examples, or a function of the epoch "
            f"that returns one, and this is a {type(source).__name__}"
        )
    check_iterable(source)
    return True


def check_iterable(source: Any) -> None:
    """Refuse what is no iterable, or can be read only once."""
    kind = type(source).__name__
    if not hasattr(source, "__iter__") or isinstance(source, str | bytes):
        raise TypeError(f"a stream needs an iterable of examples, and this is a {kind}")
    if iter(source) is source:
        raise TypeError(
            f"a {kind} can be read once, and a stream is read anew for each epoch and restart: give a function of the "
            "epoch that returns it, or a class with __iter__"
        )


def fingerprint(source: Any) -> int:
    """Tells arrays from others of the same length: of ranks that were given a part each, say."""
    if not isinstance(source, Arrays):
        return 0  # what reads and computes may well do so at random
    ends = [x[[0, -1]] for x in jax.tree.leaves(source.tree) if len(x) and not x.dtype.hasobject]
    return zlib.crc32(b"".join(x.tobytes() for x in ends))


def _grain_dataset(source: Any, transform: Callable[..., Any] | None, seed: int) -> Any:
    """Source and transform as grain's, where that is what they are or need; an example through it costs 20 us more."""
    grain = sys.modules.get("grain")  # slow to import; who has anything of it has imported it
    if grain is None:
        if transform is None or not takes_rng(transform):
            return None
        import grain

    own = isinstance(transform, (grain.transforms.Map, grain.transforms.RandomMap))
    at_random = transform is not None and (
        isinstance(transform, grain.transforms.RandomMap) if own else takes_rng(transform)
    )
    if not (own or at_random or isinstance(source, grain.MapDataset)):
        return None
    examples = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
    if at_random:
        return examples.random_map(cast(Any, transform), seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return examples if transform is None else examples.map(transform)


def takes_rng(transform: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(transform).parameters.values()
    except ValueError:  # of C
        return False
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1


def stacked(examples: list[tuple[int, Any]]) -> Any:
    """A batch of examples, each with its index for messages."""
    (first, like), *_ = examples
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    columns: list[list[np.ndarray]] = [[] for _ in paths]
    for i, example in examples:
        if example is None:
            raise ValueError(
                f"example {i} of the data set is None (filtered out?): filter a stream, as after .to_iter_dataset()"
            )
        leaves, theirs = jax.tree.flatten(example)
        if theirs != structure:
            raise ValueError(f"example {i} of the data set has structure {theirs}, and example {first} {structure}")
        for column, leaf, (path, _) in zip(columns, leaves, paths, strict=True):
            column.append(np.asarray(leaf))
            if column[-1].shape != column[0].shape:
                raise ValueError(
                    f"example{jax.tree_util.keystr(path)} has shape {column[-1].shape} in example {i} of the data set "
                    f"and {column[0].shape} in example {first}: pad or crop them in transform="
                )
    return jax.tree.unflatten(structure, [np.stack(column) for column in columns])
