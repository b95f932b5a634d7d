"""`jaxdist.loader`: who gets which example, without starting processes (tests/mpi/test_calls.py does)."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import jobs
from harness.loaders import epoch, flat, job, make, ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist
from jaxdist.agreement.description import Description
from jaxdist.data import sampling
from jaxdist.data.gathering import gather_for_metrics
from jaxdist.data.loader import Loader


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60), size=st.integers(1, 5), batch_size=st.integers(1, 9),
    tail=st.sampled_from(["drop", "pad", "keep"]), shuffle=st.booleans(), seed=st.integers(0, 2**40),
)  # fmt: skip
def test_an_epoch(n: int, size: int, batch_size: int, tail: str, shuffle: bool, seed: int) -> None:
    """Equal steps, no example twice, all of them but for a dropped tail, as one rank with the whole batch has them."""
    whole = size * batch_size
    if tail == "drop" and n < whole:
        with pytest.raises(ValueError, match=rf"{n} examples, fewer than one batch of all ranks .* {whole} in all"):
            ranks(n, size, batch_size, tail=tail)
        return
    loaders = ranks(n, size, batch_size, tail=tail, shuffle=shuffle, seed=seed)
    alone = ranks(n, 1, whole, tail=tail, shuffle=shuffle, seed=seed)
    for number in range(2):
        assert {loader.epoch for loader in loaders} == {number}
        got = epoch(loaders)
        assert got == epoch(alone)
        assert len(got) == len(loaders[0]) == (n // whole if tail == "drop" else -(-n // whole))
        assert len(flat(got)) == (n - n % whole if tail == "drop" else n)
        assert max(Counter(flat(got)).values()) == 1
        assert set(flat(got)) <= set(range(n))
        if not shuffle:
            assert flat(got) == list(range(len(flat(got))))


def test_restarts_with_a_dropped_tail_repeat_nothing() -> None:
    want = flat(epoch(ranks(50, 1, 50)))
    seen: list[int] = []
    state: Any = None
    for size, batch_size, steps in [(2, 4, 3), (3, 3, 1), (1, 2, 1), (2, 3, 9)]:  # 24, 9, 2 and 12; 3 are dropped
        loaders = ranks(50, size, batch_size)
        for loader in loaders if state else ():
            loader.set_state(state)
        seen += flat(epoch(loaders, steps))
        state = loaders[0].get_state()
    assert seen == want[:47]
    assert (state["epoch"], state["position"]) == (1, 0)
    (late,) = ranks(50, 1, 8)
    late.set_state({**state, "epoch": 0, "position": 47})  # no batch of 8 is left: the next epoch
    assert (late.epoch, len(epoch([late]))) == (1, 6)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 60),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_restarts_on_other_ranks_skip_and_repeat_nothing(n: int, sizes: list[tuple[int, int, int]]) -> None:
    want = epoch(ranks(n, 1, n, tail="pad"))[0]
    state: Any = None
    seen: list[int] = []
    for size, batch_size, steps in [*sizes, (3, 2, 1000)]:
        loaders = ranks(n, size, batch_size, tail="pad")
        for loader in loaders if state else ():
            loader.set_state(json.loads(json.dumps(state)))
        if loaders[0].epoch:
            break
        seen += flat(epoch(loaders, steps)) if steps else []
        state = loaders[0].get_state()
        assert [loader.get_state() for loader in loaders] == [state] * size
    assert seen == want
    assert (state["epoch"], state["position"]) == (1, 0)


def test_orders() -> None:
    first, second = (flat(epoch(ranks(50, 1, 50, seed=s))) for s in (0, 1))
    loaders = ranks(50, 2, 5)
    epochs = [flat(epoch(loaders)) for _ in range(3)]
    assert epochs[0] == first != second
    assert len({tuple(e) for e in [*epochs, second]}) == 4
    for loader in loaders:
        loader.set_epoch(1)
    assert flat(epoch(loaders)) == epochs[1]
    assert loaders[0].epoch == 2


def test_a_loop_that_is_left_is_not_repeated() -> None:
    (loader,) = loaders = ranks(20, 1, 2)
    left = epoch(loaders, 3)
    assert (loader.epoch, loader.get_state()["position"]) == (0, 6)
    assert epoch(loaders, 3) != left
    assert (loader.epoch, loader.get_state()["position"]) == (1, 6)
    loader.set_epoch(0)
    assert epoch(loaders, 3) == left
    epoch(loaders, 10)  # left at its last batch: there is no more
    assert loader.epoch == 2
    assert len(epoch(loaders)) == 10


def test_set_epoch_keeps_what_was_restored() -> None:
    (a,) = ranks(20, 1, 4)
    first = epoch([a], 2)
    state = a.get_state()
    (b,) = ranks(20, 1, 4)
    b.set_state(state)
    b.set_epoch(0)
    assert first + epoch([b]) == epoch(ranks(20, 1, 4))
    b.set_state(state)
    b.set_epoch(3)
    assert len(epoch([b])) == 5


def test_one_loop_at_a_time() -> None:
    (loader,) = ranks(20, 1, 4)
    loop = iter(loader)
    next(loop)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="this loop over the loader is over"):
        next(loop)


def test_peek() -> None:
    loader = make(np.arange(20), 4, prefetch=2)
    first = loader.peek()
    assert loader.get_state()["position"] == 0
    got = list(loader)
    np.testing.assert_array_equal(got[0], first)
    assert len(got) == 5
    assert loader.peek().shape == (4,)
    loader.set_epoch(0)
    np.testing.assert_array_equal(next(iter(loader)), first)


@pytest.mark.parametrize("how", [{"prefetch": 4}, {"prefetch": 4, "threads": 3}, {"threads": 2}])
def test_what_is_read_ahead_does_not_count(how: dict[str, Any]) -> None:
    want, got = make(list(range(23)), 4, tail="pad"), make(list(range(23)), 4, tail="pad", **how)
    for _ in range(2):
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
            assert want.get_state() == got.get_state()
    epoch([want], 2)
    epoch([got], 2)
    again = make(list(range(23)), 4, tail="pad", **how)
    again.set_state(got.get_state())
    assert flat(epoch([again])) == flat([b[0][b[1] > 0].tolist() for b in want._run(want._loop)])
    got.close()
    again.close()


class Squares:
    """Anything with __len__ and __getitem__."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"i": index, "square": np.full(2, index**2)}


SOURCES: dict[str, Callable[[], Any]] = {
    "tree": lambda: {"i": np.arange(12), "square": np.arange(12)[:, None].repeat(2, 1) ** 2},
    "jax": lambda: {"i": jnp.arange(12), "square": jnp.arange(12)[:, None].repeat(2, 1) ** 2},
    "list": lambda: [Squares()[i] for i in range(12)],
    "own": Squares,
    "grain": lambda: grain.MapDataset.source(Squares()),
}


@pytest.mark.parametrize("kind", list(SOURCES))
def test_sources(kind: str) -> None:
    same = type("Same", (grain.transforms.Map,), {"map": lambda self, e: e})()
    for transform in (None, lambda e: e, lambda e, rng: e, same):
        loader = make(SOURCES[kind](), 3, transform=transform)
        got = list(loader)
        i = np.concatenate([b["i"] for b in got])
        assert sorted(i.tolist()) == list(range(12))
        np.testing.assert_array_equal(np.concatenate([b["square"] for b in got]), (i**2)[:, None].repeat(2, 1))
        assert all(isinstance(b["i"], np.ndarray) for b in got)


def test_a_tuple_is_its_parts_and_nesting_is_kept() -> None:
    x, y = np.arange(6), np.arange(6) * 2
    ((a, (b,)),) = make((x, (y,)), 6)
    np.testing.assert_array_equal(a * 2, b)


def test_random_transforms_do_not_depend_on_the_ranks() -> None:
    noisy: Any = lambda x, rng: x + rng.uniform(0, 0.5)
    alone = make(np.arange(12), 12, transform=noisy)
    one, two = np.sort(next(iter(alone))), np.sort(next(iter(alone)))
    parts = [list(make(np.arange(12), 2, rank, 3, transform=noisy)) for rank in range(3)]
    np.testing.assert_array_equal(one, np.sort(np.ravel(parts)))
    np.testing.assert_array_equal(np.floor(one), np.arange(12))
    assert not np.array_equal(one, two)  # another epoch
    assert not np.array_equal(one, np.sort(next(iter(make(np.arange(12), 12, transform=noisy, seed=1)))))


def test_a_transform_may_write_into_its_example() -> None:
    def double(x: Any) -> Any:
        x *= 2
        return x

    loader = make(np.ones((4, 3)), 4, transform=double)
    assert [float(next(iter(loader)).sum()) for _ in range(2)] == [24, 24]


@pytest.mark.slow
def test_worker_processes() -> None:
    want, got = make(Squares(), 2, tail="pad"), make(Squares(), 2, tail="pad", workers=2, prefetch=1)
    for _ in range(2):
        for a, b in zip(want, got, strict=True):
            jax.tree.map(np.testing.assert_array_equal, a, b)
    got.close()


def test_large_data_sets_are_ordered_by_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "EXACT", 100)
    got = [flat(epoch(loaders)) for loaders in [ranks(101, 1, 101)] for _ in range(2)]
    assert sorted(got[0]) == sorted(got[1]) == list(range(101))
    assert got[0] != got[1]


# --- with a step


def test_steps_on_a_loaders_batches_are_those_of_one_device_with_the_real_examples() -> None:
    """Padded with weights, or the last one smaller; handed over on the host or on the devices."""
    x = np.random.default_rng(0).normal(size=(43, 3))

    def step(w: Any, x: Any, weight: Any = None) -> Any:
        def loss_fn(w: Any) -> Any:
            h = x @ w
            if weight is not None:
                return jnp.sum((h - 1) ** 2 * weight) / jnp.sum(weight)
            return jnp.mean((h - h.mean()) ** 2) + jnp.max(h)

        loss, grads = jax.value_and_grad(loss_fn)(w)
        return w - 0.1 * grads, (loss, len(x))

    for tail, on_devices in itertools.product(("pad", "keep"), (False, True)):
        one = many = jnp.ones(3)
        decorated, counts = jaxdist.data_parallel(step), []
        batches = jaxdist.loader(x, 16, tail=tail, on_devices=on_devices)  # the last: 11 real ones on 8 devices
        for batch, rows in zip(batches, epoch(ranks(43, 1, 16, tail=tail)), strict=True):
            weight = (np.ones(len(rows)),) if tail == "pad" else ()
            many, (got, count) = decorated(many, *(batch if tail == "pad" else (batch,)))
            one, (want, _) = jax.jit(step)(one, x[rows], *weight)
            counts.append(int(count))
            np.testing.assert_allclose(got, want, rtol=1e-10)
            np.testing.assert_allclose(many, one, rtol=1e-10)
        assert counts == [16, 16, 16 if tail == "pad" else 11]


def test_evaluation_counts_each_example_once() -> None:
    x = {"x": np.arange(43.0), "id": np.arange(43)}

    @jaxdist.data_parallel(donate=False)
    def evaluate(w: Any, batch: Any) -> Any:
        x, weight = batch
        right = x["x"] * w > 20
        return {
            "right": jnp.sum(right & (weight > 0), dtype=jnp.int32),
            "loss": jnp.sum(x["x"] * weight),
            "each": (x["id"], right, weight),
        }

    right, loss, ids = 0, 0.0, []
    for batch in jaxdist.loader(x, 16, shuffle=False, tail="pad"):
        out = evaluate(jnp.ones(()), batch)
        right, loss = right + int(out["right"]), loss + float(out["loss"])
        i, _, weight = out["each"]
        ids += gather_for_metrics({"id": i}, weight)["id"].tolist()
        assert gather_for_metrics(batch[0]["id"], batch[1]).tolist() == ids[-int(batch[1].sum()) :]
    assert (right, loss, ids) == (22, x["x"].sum(), list(range(43)))
    with pytest.raises(ValueError, match=r"\['a'\] has shape \(3,\), and there are 2 examples"):
        gather_for_metrics({"a": np.ones(3)}, np.ones(2))


def test_on_devices() -> None:
    ctx = jaxdist.get_context()
    loader = jaxdist.loader({"x": np.arange(48.0)}, 16, on_devices=True, prefetch=2)
    got = list(loader)
    assert all(b["x"].sharding.mesh == ctx.mesh and not b["x"].sharding.is_fully_replicated for b in got)
    assert sorted(np.concatenate([b["x"] for b in got]).tolist()) == list(range(48))
    loader.close()
    uneven = list(jaxdist.loader(np.arange(48), 12, shuffle=False, on_devices=True))
    assert [b.shape for b in uneven] == [(12,)] * 4
    assert np.concatenate(uneven).tolist() == list(range(48))


# --- what goes wrong


class Short:
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("source", "settings_", "message"),
    [
        (np.arange(3), {"batch_size": 0}, "batch_size=0: expected an integer of at least 1"),
        (np.arange(3), {"batch_size": -1}, "batch_size=-1: expected"),
        (np.arange(3), {"batch_size": 1.5}, "batch_size=1.5: expected"),
        (np.arange(3), {"batch_size": True}, "batch_size=True: expected"),
        (np.arange(3), {"seed": -1}, "seed=-1: expected"),
        (np.arange(3), {"workers": -1}, "workers=-1: expected"),
        (np.arange(3), {"tail": "some"}, "tail='some': 'drop', 'keep' or 'pad'"),
        (np.arange(3), {"batch_size": 4}, r"3 examples, fewer than one batch of all ranks \(4 on each of 1, 4 in all"),
        ([], {"tail": "pad"}, "has 0 examples: expected at least one"),
        (np.zeros((0, 3)), {}, "has 0 examples: expected at least one"),
        ({}, {}, "it has no arrays"),
        ({"x": np.ones(3), "y": np.ones(4)}, {}, r"source\['x'\] has 3, source\['y'\] has 4"),
        ({"x": [1, 2, 3]}, {}, r"source\['x'\]\[0\] is a int: expected an array"),
        ((np.ones(3), np.float32(1)), {}, r"source\[1\] is a float32: expected an array"),
        (np.array(1.0), {}, "source is a scalar"),
        (Short(), {}, r"a stream is shuffled in windows. Give their size, as shuffle=10_000"),
        (Short(), {"shuffle": -1}, "shuffle=-1: expected an integer of at least 0"),
        (Short(), {"shuffle": False, "workers": 1}, "workers=1, threads=1: a stream is read one example after"),
        (
            Short(),
            {"shuffle": 5, "batch_size": 2},
            r"epoch 0 of the stream has 1 examples, fewer than one batch of all",
        ),
        (Short(), {"shuffle": 2.5}, r"shuffle=2\.5: expected an integer"),
        (lambda epoch: 3, {"shuffle": 5}, "a stream needs an iterable of examples, and this is a int"),
        (lambda epoch: [], {"shuffle": 5}, "the stream has no examples"),
        (np.arange(3), {"shuffle": 2}, "shuffle=2: True or False; a window is for streams"),
        (iter([1]), {}, "a list_iterator can be read once"),
        (3, {}, "or a function of the epoch that returns one, and this is a int"),
    ],
)
def test_bad_input(source: Any, settings_: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        next(iter(make(source, **{"batch_size": 1} | settings_)))


def test_bad_examples() -> None:
    shapes = r"example has shape \(3,\) in example 1 of the data set and \(2,\) in example 0: pad"
    for examples, message in [
        ([np.ones(2), np.ones(3)], shapes),
        ([{"a": 1}, {"b": 1}], "example 1 of the data set has structure"),
        ([1, None], "example 1 of the data set is None"),
    ]:
        loader = make(examples, 2, shuffle=False)
        for _ in range(2):  # again and again, not a hang or a skip
            with pytest.raises(ValueError, match=message):
                next(iter(loader))


def test_ranks_that_differ() -> None:
    def load(*theirs: dict[str, Any] | str) -> Loader:
        """The others come with these entries instead of the root's, or find a problem."""

        def exchange(_: str, mine: Any, __: float) -> list[Any]:
            entries = dict(mine[0].entries)
            found = [
                Description("loader", problem=t)
                if isinstance(t, str)
                else Description("loader", tuple((entries | {k: repr(v) for k, v in t.items()}).items()))
                for t in theirs
            ]
            return [mine, *((description, 0, None) for description in found)]

        context = job(0, 1 + len(theirs), exchange)
        return Loader(context, np.arange(9), 2, shuffle=True, seed=0, tail="drop", transform=None)

    with pytest.raises(ValueError, match=r"len\(source\) is 9 on rank 0, 2; 8 on rank 1"):
        load({"len(source)": 8}, {})
    with pytest.raises(ValueError, match="seed is 0 on rank 0; 1 on rank 1"):
        load({"seed": 1})
    with pytest.raises(ValueError, match="checksum of the first and last example is"):
        load({"the checksum of the first and last example": 1})
    with pytest.raises(ValueError, match="loader, on rank 1: OSError: no such file"):
        load("OSError: no such file")


def test_states_of_others() -> None:
    state = make(np.arange(9), 2).get_state()
    for name, value, message in [
        ("length", 8, "a data set of length 8, and this loader's is 9"),
        ("seed", 3, "of seed 3, and this loader's is 0"),
        ("shuffle", False, "of shuffle False, and"),
        ("position", 10, "not the state"),
        ("epoch", -1, "not the state"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(np.arange(9), 2).set_state({**state, name: value})
    with pytest.raises(ValueError, match="not the state of a loader"):
        make(np.arange(9), 2).set_state({"epoch": 1})
    with pytest.raises(ValueError, match="set_epoch"):
        make(np.arange(9), 2).set_epoch(-1)


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import jaxdist, numpy as np\njaxdist.init()\nfor b in jaxdist.loader(np.arange(10), 2, workers=1): print(b)\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=jobs.environment(), check=False)
    assert done.returncode != 0
    assert 'called under `if __name__ == "__main__":`' in done.stderr


_WITH_WORKERS = """
import sys
import jax, jaxdist
class Source:
    def __len__(self): return 12
    def __getitem__(self, i):
        if i == 9 and "fails" in sys.argv: raise ValueError("a bad example")
        return {"x": float(i)}
if __name__ == "__main__":
    jaxdist.init()
    kept = [jax.numpy.asarray(batch["x"]) for batch in jaxdist.loader(Source(), 2, shuffle=False, workers=1)]
    print(sum(float(x.sum()) for x in kept))
"""


@pytest.mark.slow
def test_batches_that_are_in_use_at_the_end_are_not_said_to_be_leaked(tmp_path: Path) -> None:
    """And after a failure nothing stands behind the cause."""
    script = tmp_path / "script.py"
    script.write_text(_WITH_WORKERS)
    command = [sys.executable, str(script)]
    environment = jobs.environment()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert (ended.stdout, ended.stderr) == ("66.0\n", "")
    launched = [sys.executable, "-m", "jaxdist", "run", "-n", "2", "--launcher", "env", str(script), "fails"]
    failed = subprocess.run(launched, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert failed.returncode == 1
    assert "resource_tracker" not in failed.stderr
    assert "ValueError: a bad example" in failed.stderr
