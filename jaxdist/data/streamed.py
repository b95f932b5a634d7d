"""Batches of a stream. Every rank reads all of it and keeps its own rows: no row depends on the number of ranks."""

from __future__ import annotations

import copy
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import grain
import jax
import numpy as np

from jaxdist.data.batches import check_iterable, stacked, takes_rng
from jaxdist.data.sampling import Place, Sampling

_TUPLE = "tuple of"
_KEPT = "kept are dicts with string keys, lists, tuples, strings, numbers and None"


class Iterated(grain.IterDataset):
    def __init__(self, source: Any, epoch: int):
        super().__init__()
        self._source, self._epoch = source, epoch

    def __iter__(self) -> grain.DatasetIterator:
        if iter(self._source) is self._source:  # of a function of the epoch, which gives a new one each time
            return _Counting(self._source)
        source = copy.copy(self._source)  # where it stands is of this iterator alone
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._epoch)
        return _Counting(source)


class _Counting(grain.DatasetIterator):
    """An iterable's examples, and how many were given.

    Its own ``state_dict`` is not asked: Hugging Face's leaves out what waits in the buffer of a shuffle, or stands at
    the next chunk (https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration).
    """

    def __init__(self, source: Any):
        super().__init__()
        self._source, self._examples, self._given = source, iter(source), 0

    def __next__(self) -> Any:
        example = next(self._examples)
        self._given += 1
        return example

    def get_state(self) -> dict[str, Any]:
        return {"given": self._given}

    def set_state(self, state: dict[str, Any]) -> None:
        self._examples, self._given = iter(self._source), state["given"]
        read = sum(1 for _ in itertools.islice(self._examples, self._given))
        if read < self._given:
            raise ValueError(
                f"the stream has fewer than the {self._given} examples that were read of it: it is another"
            )


class Streamed:
    """The batches of a stream: what the loader reads where there is no access by index."""

    def __init__(
        self,
        source: Any,
        sampling: Sampling,
        window: int,
        transform: Callable[..., Any] | None,
        prefetch: int,
        checked: bool,
    ):
        self.source, self.sampling, self.window = source, sampling, window
        self.prefetch, self.checked = prefetch, checked
        own = {grain.transforms.RandomMap: "random_map", grain.transforms.Map: "map"}
        name = next((name for kind, name in own.items() if isinstance(transform, kind)), "")
        how = getattr(transform, name) if name else transform
        at_random = name == "random_map" or (not name and how is not None and takes_rng(how))
        self._random, self._map = (how, None) if at_random else (None, how)

    @property
    def fixed(self) -> dict[str, Any]:
        """What has to be the same for a state to be of this stream."""
        return {"seed": self.sampling.seed, "shuffle": self.window}

    def first(self) -> int:
        """A checksum of the first example, which tells parts of a stream from all of it."""
        for example in self._examples(0, shuffled=False):
            return _checksum(example)
        raise ValueError("the stream has no examples")

    def start(self, place: Place) -> Any:
        """What the loader reads from a place on: batches, where each begins, where the next one does, a checksum."""
        batches = _Batches(self._all(place))
        if not self.prefetch:
            return batches
        return grain.experimental.ThreadPrefetchDatasetIterator(cast(Any, batches), self.prefetch)

    def _examples(self, epoch: int, shuffled: bool = True) -> grain.DatasetIterator | _Windows:
        by_epoch = callable(self.source) and not hasattr(self.source, "__iter__")
        source: Any = self.source(epoch) if by_epoch else self.source
        if isinstance(source, grain.MapDataset):
            source = source.to_iter_dataset()
        if not isinstance(source, grain.IterDataset):
            if not (by_epoch and hasattr(source, "__next__")):
                check_iterable(source)
            source = Iterated(source, epoch)
        examples = iter(source)
        return _Windows(examples, self.window, (self.sampling.seed, epoch)) if self.window and shuffled else examples

    def _all(self, at: Place) -> Iterator[tuple[Any, Place, Place, int]]:
        whole, check = self.sampling.whole, 0
        resumed = at.position > 0
        while True:
            examples = self._examples(at.epoch)
            if at.inner:
                try:
                    state = of_text(at.inner)
                except ValueError:
                    raise ValueError(f"not the state of a stream: {at.inner[:80]!r}") from None
                examples.set_state(state)
            rows = _next(examples, whole)
            if not self._enough(rows) and not resumed:
                needed = f"fewer than one batch of all ranks ({whole})"
                raise ValueError(
                    f"epoch {at.epoch} of the stream has {len(rows)} examples, {needed}: there would be no step. Use a "
                    "smaller batch_size or tail='keep'"
                )
            resumed = False
            while self._enough(rows):
                inner = as_text(examples.get_state()) if len(rows) == whole else ""
                further = _next(examples, whole) if len(rows) == whole else []
                more = self._enough(further)
                then = Place(at.epoch, at.position + whole, inner) if more else Place(at.epoch + 1)
                for row in rows if self.checked else ():
                    check = zlib.crc32(_checksum(row).to_bytes(4, "big"), check)
                yield self._own(rows, at), at, then, check
                rows, at = further, then
            at = Place(at.epoch + 1) if at.position else at

    def _enough(self, rows: list[Any]) -> bool:
        return bool(rows) if self.sampling.pad or self.sampling.keep else len(rows) == self.sampling.whole

    def _own(self, rows: list[Any], at: Place) -> Any:
        """This rank's of a batch's rows, as a reader by index gives them."""
        here = self.sampling.of(len(rows))
        places, real = here.examples(0, 0)
        batch = stacked([(at.position + i, self._transformed(rows[i], at, i)) for i in places.tolist()])
        if here.keep:
            return batch, here.tail(0) or 0
        return (batch, real.astype(np.float32)) if here.pad else batch

    def _transformed(self, example: Any, at: Place, i: int) -> Any:
        if self._random:
            return self._random(example, np.random.default_rng([self.sampling.seed, at.epoch, at.position + i]))
        return self._map(example) if self._map else example


class _Windows:
    """Examples, shuffled in windows. (Grain's takes 6 ms an example in windows of ten.)"""

    def __init__(self, examples: grain.DatasetIterator, window: int, seed: tuple[int, ...]):
        self._examples, self._window, self._seed = examples, window, seed
        self._number, self._at, self._rows = -1, 0, []
        self._start: Any = None  # of the window

    def __iter__(self) -> _Windows:
        return self

    def __next__(self) -> Any:
        if self._at == len(self._rows):
            self._fill(self._number + 1)
        if not self._rows:
            raise StopIteration
        self._at += 1
        return self._rows[self._at - 1]

    def _fill(self, number: int) -> None:
        self._number, self._at, self._start = number, 0, copy.deepcopy(self._examples.get_state())
        rows = _next(self._examples, self._window)
        order = np.random.default_rng([*self._seed, number]).permutation(len(rows))
        self._rows = [rows[i] for i in order]

    def get_state(self) -> dict[str, Any]:
        return {"window": self._number, "position": self._at, "start": self._start}

    def set_state(self, state: dict[str, Any]) -> None:
        self._examples.set_state(state["start"])
        self._fill(state["window"])
        self._at = state["position"]


class _Batches:
    """An iterator as grain's threads take it: one with a state, which is not used."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def get_state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass

    def close(self) -> None:
        pass


def as_text(state: Any) -> str:
    """A stream's state as JSON, with a mark on tuples: grain's packing reads a list otherwise."""

    def marked(x: Any, at: str = "") -> Any:
        if isinstance(x, tuple | list):
            items = [marked(one, f"{at}[{i}]") for i, one in enumerate(x)]
            return {_TUPLE: items} if isinstance(x, tuple) else items
        if isinstance(x, dict):
            for name in x:
                if not isinstance(name, str):
                    raise TypeError(
                        f"the state of the stream has the key {name!r} in its entry {at or '(top)'}: {_KEPT}"
                    )
            return {name: marked(one, f"{at}[{name!r}]") for name, one in x.items()}
        if isinstance(x, np.bool_ | np.integer | np.floating):
            return x.item()
        if x is None or isinstance(x, bool | int | float | str):
            return x
        raise TypeError(f"the state of the stream has a {type(x).__name__} at {at or 'the top'}: {_KEPT}")

    return json.dumps(marked(state))


def of_text(text: str) -> Any:
    """The state that `as_text` was given."""
    return json.loads(text, object_hook=lambda x: tuple(x[_TUPLE]) if x.keys() == {_TUPLE} else x)


def _next(examples: Iterator[Any], number: int) -> list[Any]:
    return [example for _, example in zip(range(number), examples, strict=False)]


def _checksum(example: Any) -> int:
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(example))
    raw = (repr(x.tolist()).encode() if x.dtype.hasobject else x.tobytes() for x in leaves)
    return zlib.crc32(b"".join(raw))


__all__ = ["Iterated", "Streamed", "as_text", "of_text"]
