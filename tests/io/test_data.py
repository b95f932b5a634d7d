"""`loader`: an epoch is one order of all examples, for any ranks and through any restarts."""

import ast
import asyncio
import functools
import json
import re
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue.sources import (
    BAD,
    BY_EPOCH,
    BY_INDEX,
    STATES_CHANGED,
    STATES_KEPT,
    STREAMS,
    Again,
    ByIndex,
    N,
    WithState,
)
from harness import jobs
from harness.errors import check, raises
from harness.loaders import epoch, flat, make, ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist

SCRIPTS = Path(__file__).with_name("scripts")
ALL = BY_INDEX | STREAMS


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60), size=st.integers(1, 8), batch_size=st.integers(1, 20),
    tail=st.sampled_from(["drop", "keep"]), shuffle=st.booleans(), seed=st.integers(0, 2**40),
)  # fmt: skip
def test_an_epoch(n: int, size: int, batch_size: int, tail: str, shuffle: bool, seed: int) -> None:
    """Equal steps, no example twice, all of them but for a dropped tail, as one rank with the whole batch has them."""
    how, whole = {"tail": tail, "shuffle": shuffle, "seed": seed}, batch_size
    if tail == "drop" and n < whole:
        with raises(ValueError, f"{n} examples", str(whole)):
            ranks(np.arange(n), size, batch_size, **how)
        return
    loaders, alone = ranks(np.arange(n), size, batch_size, **how), ranks(np.arange(n), 1, whole, **how)
    for number in range(2):
        assert {loader.epoch for loader in loaders} == {number}
        got = epoch(loaders)
        assert got == epoch(alone)
        assert len(got) == len(loaders[0]) == (n // whole if tail == "drop" else -(-n // whole))
        assert len(flat(got)) == (n - n % whole if tail == "drop" else n)
        assert len(set(flat(got))) == len(flat(got))
        assert set(flat(got)) <= set(range(n))
        assert shuffle or flat(got) == list(range(len(flat(got))))


def alone(kind: str, **how: Any) -> list[list[int]]:
    """The orders of three epochs."""
    loaders = ranks(ALL[kind], 1, 1, tail="keep", **how)
    return [flat(epoch(loaders)) for _ in range(3)]


def test_each_source_gives_each_example_once() -> None:
    for kind in ALL:
        for how in ({"shuffle": False}, {"shuffle": True if kind in BY_INDEX else 9}):
            first, second, _ = alone(kind, **how)
            assert len(set(first)) == len(first) > N // 2, kind
            if kind in (*BY_INDEX, "plain", "iterable torch", "inexact"):
                assert sorted(first) == sorted(second) == list(range(N)), kind
            assert (first != second) == bool(how["shuffle"] or kind in BY_EPOCH), kind


LEG = st.tuples(st.sampled_from([8, 3, 6, 1]), st.integers(1, 20), st.integers(0, 5), st.booleans())


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(list(ALL)), tail=st.sampled_from(["keep", "drop"]), prefetch=st.integers(0, 2),
    window=st.sampled_from([0, 1, 9, 200]), legs=st.lists(LEG, min_size=1, max_size=6), seed=st.integers(0, 3),
)  # fmt: skip
def test_any_restarts_on_any_ranks_skip_and_repeat_nothing(
    kind: str, tail: str, window: int, legs: list[tuple[int, int, int, bool]], prefetch: int, seed: int
) -> None:
    """By a state through JSON; a killed job is lost; the last one goes on to the end of the epoch."""
    shuffle = window if kind in STREAMS else window > 0
    want = alone(kind, shuffle=shuffle, seed=seed)
    got: list[list[int]] = [[], [], []]
    number, state = 0, ""
    for size, batch_size, steps, killed in [*legs, (1, 1, 200, False)]:
        how: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "tail": tail, "prefetch": prefetch}
        loaders = ranks(ALL[kind], size, batch_size, **how)
        for loader in loaders if state else ():
            loader.set_state(json.loads(state))
        if (number := loaders[0].epoch) > 2:
            return
        seen = flat(epoch(loaders, steps))
        states = {json.dumps(loader.get_state()) for loader in loaders}
        assert len(states) == 1
        if not killed:
            got[number] += seen
            (state,) = states
            assert len(state) <= 1024
    for i, (one, whole) in enumerate(zip(got, want, strict=True)):
        assert one == whole[: len(one) if i > number or tail == "drop" else None]


def test_what_fills_no_batch_any_more_is_the_next_epoch() -> None:
    for source, shuffle in ((Again(), 9), (np.arange(N), True)):
        (early,), (late,) = (ranks(source, 1, size, shuffle=shuffle) for size in (57, 8))
        epoch([early], 1)
        late.set_state(early.get_state() | ({"epoch": 0, "position": 57} if shuffle is True else {}))
        assert (late.epoch, len(epoch([late]))) == (1, 7)


def test_the_orders_of_epochs_and_seeds() -> None:
    loaders = ranks(np.arange(50), 2, 5)
    epochs = [flat(epoch(loaders)) for _ in range(3)]
    other = flat(epoch(ranks(np.arange(50), 1, 50, seed=1)))
    assert len({tuple(each) for each in [*epochs, other]}) == 4
    for loader in loaders:
        loader.set_state(loader.get_state() | {"epoch": 1})
    assert flat(epoch(loaders)) == epochs[1]
    assert loaders[0].epoch == 2
    windows = [flat(epoch(ranks(Again, 1, 1, shuffle=9, seed=seed))) for seed in (0, 0, 1)]
    assert windows[0] == windows[1] != windows[2]


def test_a_data_set_that_is_too_large_for_a_permutation() -> None:
    class Large(ByIndex):
        def __len__(self) -> int:
            return (1 << 22) + 1

    (loader,) = ranks(Large(), 1, 1000)
    first, again = (flat(epoch([loader], 20)) for _ in range(2))
    assert len({*first, *again}) > 39_000
    assert len(set(first)) == 20_000


def test_a_loop_that_is_left() -> None:
    """Its order does not come again, unless it is asked for; and one that goes on beside another is over."""
    (loader,) = loaders = ranks(np.arange(20), 1, 2)
    left = epoch(loaders, 3)
    assert (loader.epoch, loader.get_state()["position"]) == (0, 6)
    state = loader.get_state()
    assert epoch(loaders, 3) != left
    assert (loader.epoch, loader.get_state()["position"]) == (1, 6)
    loader.set_state(state | {"position": 0})
    whole = epoch(loaders)
    assert (whole[:3], len(whole)) == (left, 10)
    loader.set_state(state)
    assert epoch(loaders) == whole[3:]
    loop = iter(loader)
    next(loop)
    next(iter(loader))
    with raises(RuntimeError, "over"):
        next(loop)


@pytest.mark.parametrize("kind", ["array", "list", "plain"])
def test_peek(kind: str) -> None:
    (loader,) = ranks(ALL[kind], 1, 4, shuffle=0 if kind in STREAMS else True, prefetch=2)
    first = loader.peek()
    assert loader.get_state()["position"] == 0
    assert epoch([loader], 1) == [first.tolist()]
    if kind in STREAMS:
        with raises(TypeError, "stream"):
            len(loader)


# --- examples


def test_nested_examples_and_transforms() -> None:
    tree = {"i": np.arange(12), "two": (np.arange(12) * 2, [np.arange(24).reshape(12, 2)])}
    rows = [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(12)]
    for source in (tree, rows, jax.tree.map(jnp.asarray, tree)):
        for transform in (None, lambda e: e, lambda e, rng: e):
            got = list(make(source, 3, transform=transform))
            assert sorted(i for b in got for i in b["i"].tolist()) == list(range(12))
            for batch in got:
                assert (batch["two"][0] == 2 * batch["i"]).all()
                assert (batch["two"][1][0][:, 1] == 2 * batch["i"] + 1).all()
                assert isinstance(batch["i"], np.ndarray)


def jittered(x: Any, rng: np.random.Generator) -> int:
    """A random transform."""
    return 1000 * int(x) + int(rng.integers(1000))


@pytest.mark.parametrize("kind", ["array", "list", "plain"])
def test_a_random_transform_depends_on_example_epoch_and_seed_alone(kind: str) -> None:
    def read(size: int, seed: int = 0) -> list[list[int]]:
        loaders = ranks(ALL[kind], size, 4, shuffle=kind not in STREAMS, transform=jittered, seed=seed)
        return [sorted(flat(epoch(loaders))) for _ in range(2)]

    one = read(1)
    assert one == read(2) == read(3) == read(4)
    assert {x // 1000 for x in one[0]} <= set(range(N))
    assert len(set(one[0]) & set(one[1])) < N // 4
    assert len({x % 1000 for x in one[0]}) > N // 2, "each example has numbers of its own"
    assert one != read(1, seed=1)


# --- refusals


def test_bad_sources_and_settings() -> None:
    for source, how, tokens in BAD:
        with raises((ValueError, TypeError), *tokens):
            next(iter(make(source, **{"batch_size": 1} | how)))
    loader = make([1, None], 2, shuffle=False)
    for _ in range(2):  # again and again, not a hang or a skip
        with raises(ValueError, "example 1"):
            next(iter(loader))


def test_states_of_others() -> None:
    state = make(np.arange(9), 2).get_state()
    (stream,), (other,) = ranks(Again(), 1, 4, shuffle=0), ranks(Again(), 1, 4, shuffle=3)
    for loader, wrong, tokens in [
        (make(np.arange(9), 2), state | {"length": 8}, ("8", "9")),
        (make(np.arange(9), 2), state | {"seed": 3}, ("seed 3", "0")),
        (make(np.arange(9), 2), state | {"shuffle": False}, ("shuffle False",)),
        (make(np.arange(9), 2), state | {"position": 10}, ("10",)),
        (make(np.arange(9), 2), state | {"epoch": -1}, ("-1",)),
        (make(np.arange(9), 2), {"epoch": 1}, ("epoch",)),
        (make(np.arange(9), 2), stream.get_state(), ("state",)),
        (stream, state, ("stream",)),
        (stream, stream.get_state() | {"stream": "{", "position": 4}, ("stream",)),
        (other, stream.get_state(), ("shuffle 0", "3")),
    ]:
        with raises(ValueError, *tokens):
            loader.set_state(wrong)


def test_a_stream_that_comes_in_another_order(caplog: pytest.LogCaptureFixture) -> None:
    """After a restart it is read again, which is said; the next example has to be the one that came next."""
    numbers = list(range(40))
    loader = make(Again(numbers), 4, shuffle=False)
    epoch([loader], 3)
    with caplog.at_level("WARNING", "jaxdist"):
        make(Again(numbers), 4, shuffle=False).set_state(loader.get_state())
    assert "12 examples" in caplog.text
    with raises(jaxdist.DataError, "position 12", "epoch 0"):
        make(Again(numbers[::-1]), 4, shuffle=False).set_state(loader.get_state())


def test_a_state_that_text_would_change_is_not_used() -> None:
    """The stream is read again; grain's own streams go on at once."""
    kept = [STREAMS["grain stream"], *(functools.partial(WithState, entry) for entry in STATES_KEPT)]
    for made in [*kept, *(functools.partial(WithState, entry) for entry in STATES_CHANGED)]:
        loader, again, alone = (make(made(), 4, shuffle=False) for _ in range(3))
        epoch([loader], 2)
        state = loader.get_state()
        assert (ast.literal_eval(state["stream"])[1] is None) == (made not in kept)
        again.set_state(json.loads(json.dumps(state)))
        assert flat(epoch([again])) == flat(epoch([alone]))[8:]


RAISED = [ValueError("plain"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError("by hand")]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_what_is_raised_beside_the_loop_ends_the_loop(error: BaseException) -> None:
    """In a thread of ours, or of grain's, which would end in silence, and the loop would wait."""

    def fault(x: Any) -> Any:
        if x == 9:
            raise error
        return x

    own = grain.MapDataset.range(20).map(fault).to_iter_dataset()
    for source, how in (
        (np.arange(20), {"transform": fault}),
        (Again(), {"transform": fault}),
        (lambda epoch: map(fault, range(20)), {}),
        (grain.experimental.ThreadPrefetchIterDataset(own, prefetch_buffer_size=1), {}),
    ):
        settings: dict[str, Any] = how
        with raises(type(error), str(error)):
            epoch([make(source, 4, shuffle=False, prefetch=2, **settings)])


# --- processes


DIFFERING = {
    "batch_size": ("ValueError", "rank 0", "batch_size=0"),
    "another length": ("ValueError", "len(source)", "24 on rank 0", "23 on rank 1"),
    "other examples": ("ValueError", "checksum"),
    "no examples": ("ValueError", "0 examples"),
    "too few": ("ValueError", "1 examples"),
    "another seed": ("ValueError", "seed", "rank 1"),
    "another state": ("ValueError", "position", "0 on rank 0", "1 on rank 1"),
    "another stream": ("ValueError", "read"),
    "rows exchanged": ("ValueError", "read"),
    "a longer stream": ("ValueError", "end of the epoch"),
    "gathered": ("ValueError", "['a']", "step"),
    "no tokenizer": ("OSError", "rank 0", "no tokenizer here"),
}


@pytest.mark.parametrize(
    ("size", "how"),
    [(2, "hand"), pytest.param(3, "mpirun", marks=[pytest.mark.slow, pytest.mark.mpi])],
)
def test_several_ranks_and_then_one(size: int, how: str, tmp_path: Path) -> None:
    """Loaders resume; every rank raises if sources or settings differ."""
    _, cases = jobs.cases(size, "auto", tmp_path, f'loaders:read_by_several["{tmp_path}"]', how=how)
    (found,) = cases.values()
    for rank in found:
        check(rank["errors"], DIFFERING)
        assert (rank["state"], rank["seen"]) == (found[0]["state"], found[0]["seen"])
    rest = jaxdist.loader(np.arange(100), 5, tail="keep", prefetch=3)
    rest.set_state(json.loads(json.dumps(found[0]["state"])))
    assert sorted([*found[0]["seen"], *(i for batch in rest for i in batch.tolist())]) == list(range(100))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hand", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_worker_processes_and_what_they_share_end_with_a_rank_that_is_killed(how: str) -> None:
    results = jobs.launch(how, 2, [str(SCRIPTS / "workers.py"), "dies"]).finish()  # which looks for processes
    assert all(result.returncode != 0 for result in results), results
    shared = {Path(name) for result in results for name in re.findall(r"/dev/shm/\S+", result.output)}
    assert shared, results
    assert not any(path.exists() for path in shared)


@pytest.mark.slow
def test_worker_processes(tmp_path: Path) -> None:
    """Give what the process itself would; nothing is said at the end; an error is told, and nothing after it."""
    want, got = make(ByIndex(), 2, tail="keep"), make(ByIndex(), 2, tail="keep", workers=2, prefetch=1)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    del got
    script = str(SCRIPTS / "workers.py")
    assert sorted(jobs.run("hand", 2, [script]).output.splitlines()) == ["27.0", "39.0"]
    failed = jobs.run("run", 1, [script, "fails"], code=1)
    assert "ValueError: a bad example" in failed.stderr
    assert "resource_tracker" not in failed.stderr
    assert 'if __name__ == "__main__":' in jobs.run("hand", 1, [script, "unguarded"], code=1).output


FAULTS = {
    "own": ("Own", "no image"),
    "two arguments": ("RuntimeError", "TwoArguments", "a:1"),
    "lock": ("RuntimeError", "ValueError", "with a lock"),
    "panic": ("Panic", "in Rust"),
    "exit 3": ("SystemExit", "3"),
    "stop": ("RuntimeError", "StopIteration"),
    "returned": ("RuntimeError", "batch", "lock"),
    "os exit 0": ("RuntimeError", "exit code 0", "os._exit"),
    "bus": ("RuntimeError", "exit code -7", "/dev/shm"),
    "good": ("",),
    "grain's": ("Own", "no image"),
}


@pytest.mark.slow
def test_what_workers_raise_return_or_end_with_ends_the_loop() -> None:
    """After the batches before it, and in the place of its own; a worker that is killed takes some along."""
    script = str(SCRIPTS / "worker_faults.py")
    told = json.loads(jobs.run("hand", 1, [script]).stdout)
    check({name: [kind, message] for name, (kind, message, _) in told.items()}, FAULTS)
    counts = {name: count for name, (_, _, count) in told.items()}
    assert (counts.pop("good"), counts.pop("grain's")) == (6, 1)  # a stream is read one batch ahead
    assert max(counts.pop(name) for name in ("os exit 0", "bus")) <= 2
    assert set(counts.values()) == {2}
    assert "exit code 3" in jobs.run("hand", 2, [script, "0"], code=3).output, "as a rank's own sys.exit does"
