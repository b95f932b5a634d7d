"""`jaxdist.loader` of streams: the examples of one process, in its order, on any sequence of numbers of ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import pytest
from harness.loaders import epoch, flat, make
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist

N = 83


class Plain:
    """What can be read from its beginning alone."""

    def __iter__(self) -> Iterator[int]:
        yield from range(N)


class Seeking:
    """As a Hugging Face ``IterableDataset``: says where it stands, and has another order in each epoch."""

    def __init__(self) -> None:
        self._epoch, self._start, self._at = 0, (0, 0), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["epoch"], state["at"]

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self._epoch).sample(range(N), N)
        start = self._start[1] if self._start[0] == self._epoch else 0
        for at in range(start, N):
            self._at = at + 1
            yield order[at]


def mixed() -> Any:
    """A mixture of filtered documents, packed: an example is its first token."""
    pieces = grain.experimental

    def documents(start: int) -> Any:
        source = grain.MapDataset.range(start, start + N)
        return source.to_iter_dataset().filter(lambda x: x % 3 > 0).map(lambda x: {"x": np.full(x % 7 + 1, x)})

    both = grain.IterDataset.mix([documents(0), documents(1000)], weights=[0.7, 0.3])
    return pieces.ConcatThenSplitIterDataset(both, length_struct={"x": 5}).map(lambda row: row["x"][0])


SOURCES: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "seeking": Seeking,
    "grain": mixed,
    "by epoch": lambda: lambda epoch: jaxdist.stream(range(epoch, N + epoch)),
    "generators": lambda: lambda epoch: (x for x in range(epoch, N + epoch)),
    "by index": lambda: lambda epoch: grain.MapDataset.range(N)[epoch:],
}


def job(kind: str, size: int, batch_size: int, **settings_: Any) -> list[Any]:
    return [make(SOURCES[kind](), batch_size, rank, size, **settings_) for rank in range(size)]


LEG = st.tuples(st.sampled_from([8, 3, 6, 1]), st.integers(1, 4), st.integers(0, 5))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(list(SOURCES)), tail=st.sampled_from(["keep", "pad"]), window=st.sampled_from([0, 1, 9, 200]),
    legs=st.lists(LEG, min_size=1, max_size=5),
    kill=st.lists(st.booleans(), min_size=6, max_size=6), prefetch=st.integers(0, 2),
)  # fmt: skip
def test_any_sequence_of_ranks_reads_what_one_process_reads(
    kind: str, tail: str, window: int, legs: list[tuple[int, int, int]], kill: list[bool], prefetch: int
) -> None:
    how: dict[str, Any] = {"tail": tail, "shuffle": window, "prefetch": prefetch}
    (alone,) = job(kind, 1, 1, **how)
    want = [flat(epoch([alone])) for _ in range(3)]
    got: list[list[int]] = [[], [], []]
    state: Any = None
    for (size, batch_size, steps), killed in zip(legs, kill, strict=False):
        loaders = job(kind, size, batch_size, **how)
        if state:
            for loader in loaders:
                loader.set_state(state)
        if loaders[0].epoch > 2:
            break
        seen = epoch(loaders, steps) if steps else []
        if not killed:  # else what this job did is lost, and the next one starts where it did
            got[loaders[0].epoch if not seen or loaders[0]._begun else loaders[0].epoch - 1] += flat(seen)
            states = [loader.get_state() for loader in loaders]
            assert all(each == states[0] for each in states)
            state = json.loads(text := json.dumps(states[0]))
            assert len(text) <= 1024
        for loader in loaders:
            loader.close()
    for one, whole in zip(got, want, strict=True):
        assert one == whole[: len(one)]


def test_a_dropped_tail() -> None:
    want = flat(epoch(job("plain", 1, N, shuffle=9)))
    loaders = job("plain", 3, 2, shuffle=9)
    seen = flat(epoch(loaders, 12))
    state = loaders[0].get_state()
    (late,) = job("plain", 1, 12, shuffle=9)  # 83 - 72 = 11 are left: the next epoch
    late.set_state(state)
    assert (seen, late.epoch) == (want[:72], 1)
    loaders = job("plain", 2, 2, shuffle=9)
    for loader in loaders:
        loader.set_state(state)
    assert flat(epoch(loaders)) == want[72:80]
    assert loaders[0].epoch == 1


def test_a_transform_depends_on_the_example_and_not_on_the_ranks() -> None:
    def jittered(x: int, rng: np.random.Generator) -> int:
        return 1000 * x + int(rng.integers(1000))

    def read(size: int) -> list[list[int]]:
        loaders = job("plain", size, 4 // size, shuffle=7, transform=jittered)
        return [flat(epoch(loaders)) for _ in range(2)]

    one = read(1)
    assert one == read(2) == read(4)
    assert sorted(x % 1000 for x in one[0]) != sorted(x % 1000 for x in one[1])


def test_peek_and_no_length() -> None:
    (loader,) = job("plain", 1, 4, shuffle=0)
    assert loader.peek().tolist() == [0, 1, 2, 3]
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="a stream has no length"):
        len(loader)


def test_the_state_of_another_source_is_refused() -> None:
    (stream,), (other,) = job("plain", 1, 4, shuffle=0), job("plain", 1, 4, shuffle=3)
    by_index = make(np.arange(N), 4)
    for loader, state, said in [
        (stream, by_index.get_state(), "not the state of a loader of a stream"),
        (by_index, stream.get_state(), "not the state of a loader: "),
        (other, stream.get_state(), "the state is of shuffle 0, and this loader's is 3"),
    ]:
        with pytest.raises(ValueError, match=said):
            loader.set_state(state)


def test_a_stream_that_is_shorter_than_what_was_read() -> None:
    loader = make(jaxdist.stream(range(40)), 4, shuffle=False)
    loop = iter(loader)
    for _ in range(8):
        next(loop)
    state = loader.get_state()
    for rest, said in (
        (state, "fewer than the 32 examples that were read"),
        (state | {"stream": "{"}, "not the state of a"),
    ):
        with pytest.raises(ValueError, match=said):
            make(jaxdist.stream(range(10)), 4, shuffle=False).set_state(rest)


def test_an_error_of_the_stream_is_the_loops() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise OSError("shard 3 is cut short")

    loop = iter(make(Broken(), 2, shuffle=False))
    assert [next(loop).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="shard 3 is cut short"):
        list(loop)
