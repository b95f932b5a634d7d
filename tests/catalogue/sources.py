"""What a loader reads: N different numbers an epoch, by index or one after the other."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

N = 61


class ByIndex:
    """Anything with ``__len__`` and ``__getitem__``."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> np.ndarray:
        return np.array(index)


class Tensor:
    """As of torch."""

    def __init__(self, number: int):
        self._number = number

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._number, dtype)


class Dataset:
    """As of torch: of tensors, and by index, unless a subclass iterates."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(index)


class IterableDataset(Dataset):
    """As of torch."""

    def __getitem__(self, index: int) -> Tensor:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Tensor]:
        return map(Tensor, range(N))


class DataLoader:
    """As of torch."""

    dataset, batch_size = Dataset(), 4

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.arange(i, i + 4) for i in range(0, N - 3, 4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A node that looks at what it is made of."""

    x: Any

    def __post_init__(self) -> None:
        assert isinstance(self.x, np.ndarray)


class Again:
    """What can be read from its beginning alone."""

    def __init__(self, numbers: Iterable[Any] = range(N)):
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        yield from self.numbers


class Inexact:
    """As a Hugging Face ``IterableDataset`` with a shuffle: its own state leaves out what waits in its buffer."""

    def __init__(self) -> None:
        self._epoch, self._start, self._at = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["at"]

    def __iter__(self) -> Iterator[int]:
        rng, start, buffer = random.Random(self._epoch), self._start, list[int]()
        self._start = 0
        for self._at in range(start, N):
            buffer.append(self._at)
            if len(buffer) > 8:
                yield buffer.pop(rng.randrange(len(buffer)))
        yield from buffer


class DataSourcesShufflingDisallowed(Exception):
    """As of Hugging Face's datasets 5."""


class Taken(Inexact):
    """As its ``IterableDataset`` after ``.take``: it has one order only."""

    def __iter__(self) -> Iterator[int]:
        if self._epoch:
            raise DataSourcesShufflingDisallowed
        return super().__iter__()


def _mixed() -> Any:
    """A mixture of filtered documents, packed: an example is its first token."""

    def documents(start: int) -> Any:
        source = grain.MapDataset.range(start, start + N)
        return source.to_iter_dataset().filter(lambda x: x % 3 > 0).map(lambda x: {"x": np.full(x % 7 + 1, x)})

    both = grain.IterDataset.mix([documents(0), documents(1000)], weights=[0.7, 0.3])
    packed = grain.experimental.ConcatThenSplitIterDataset(both, length_struct={"x": 5})
    return packed.map(lambda row: row["x"][0] + 5000 * int(row["x"][-1]))


BY_INDEX: dict[str, Callable[[], Any]] = {
    "array": lambda: np.arange(N),
    "array of jax": lambda: jnp.arange(N),
    "list": lambda: list(range(N)),
    "own": ByIndex,
    "torch": Dataset,
    "grain": lambda: grain.MapDataset.source(ByIndex()),
}
STREAMS: dict[str, Callable[[], Any]] = {
    "plain": Again,
    "iterable torch": IterableDataset,
    "inexact": Inexact,
    "taken": Taken,
    "grain stream": _mixed,
    "stream of an epoch": lambda: lambda epoch: Again(range(epoch, N + epoch)),
    "generators": lambda: lambda epoch: (x for x in range(epoch, N + epoch)),
    "index of an epoch": lambda: lambda epoch: grain.MapDataset.range(N)[epoch:],
}
BY_EPOCH = ("inexact", "stream of an epoch", "generators", "index of an epoch")
"""Streams of which each epoch is another one by itself."""


class WithState(grain.IterDataset):
    """Has an entry of its state that the test chooses, and refuses to go on from another one."""

    def __init__(self, entry: Any):
        super().__init__()
        self._entry = entry

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(self._entry)


class _Iterator(grain.DatasetIterator):
    def __init__(self, entry: Any):
        super().__init__()
        self._entry, self._state = entry, {"at": 0, "entry": {"deep": [entry]}}

    def __next__(self) -> int:
        if self._state["at"] == N:
            raise StopIteration
        self._state["at"] += 1  # in place, though it was handed out
        return self._state["at"] - 1

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        (entry,) = state["entry"]["deep"]
        assert repr(entry) == repr(self._entry), entry
        self._state = state


STATES_KEPT: list[Any] = [(1, 2), [1, (2, [3])], "x", 2**70, 1.5, True, None, {"a": ()}, {0: {(1,): b"\0"}}, {1}]
STATES_CHANGED: list[Any] = [np.int64(3), np.arange(3), float("inf"), object()]  # what a Python literal would change


class Short:
    """A stream of one example."""

    def __iter__(self) -> Iterator[int]:
        yield 1


BAD: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    (np.ma.masked_less(np.arange(3), 1), {}, ("source", "MaskedArray")),
    ([np.ma.masked_less(np.arange(3), 1)], {}, ("example 0", "masked")),
    (DataLoader(), {"shuffle": False}, ("DataLoader", "batch_size=4", "batches", ".dataset", "ctx.rows")),
    (np.arange(3), {"batch_size": 0}, ("batch_size=0",)),
    (np.arange(3), {"batch_size": 1.5}, ("batch_size=1.5",)),
    (np.arange(3), {"seed": -1}, ("seed=-1",)),
    (np.arange(3), {"tail": "some"}, ("tail='some'", "keep")),
    (np.arange(3), {"batch_size": 4}, ("3 examples", "4")),
    (np.zeros((0, 3)), {}, ("0 examples",)),
    ({}, {}, ("no arrays",)),
    ({"x": np.ones(3), "y": np.ones(4)}, {}, ("source['x']", "3", "source['y']", "4")),
    ({"x": [1, 2, 3]}, {}, ("source['x'][0]", "int")),
    ((np.ones(3), np.float32(1)), {}, ("source[1]", "float32")),
    (np.array(1.0), {}, ("source", "scalar")),
    (Short(), {}, ("shuffle=True", "shuffle=10_000")),
    (Short(), {"shuffle": -1}, ("shuffle=-1",)),
    (Short(), {"shuffle": False, "workers": 1}, ("workers=1",)),
    (Short(), {"shuffle": 5, "batch_size": 2}, ("epoch 0", "1 examples", "2")),
    (lambda epoch: 3, {"shuffle": 5}, ("int",)),
    (lambda epoch: [], {"shuffle": 5}, ("0 examples",)),
    (iter([1]), {}, ("list_iterator",)),
    ([np.ones(2), np.ones(3)], {"batch_size": 2, "shuffle": False}, ("(3,)", "example 1", "(2,)", "example 0")),
    (
        [Checked(np.ones(2)), Checked(np.ones(3))],
        {"batch_size": 2, "shuffle": False},
        ("x (3,)", "example 1", "x (2,)"),
    ),
    ([{"a": 1}, {"b": 1}], {"batch_size": 2, "shuffle": False}, ("example 1",)),
    ([1, None], {"batch_size": 2, "shuffle": False}, ("example 1", "None")),
]
"""A source, settings, and what the error names."""
