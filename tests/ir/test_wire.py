"""What is said to travel is what the compiled program moves, and the log says it when asked."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.ir.wire import Transfer, transfers
from jaxdist.mesh import Axis
from jaxdist.runtime import commlog

N = 8  # virtual devices
WIDTH = 128  # the layers' gradients are too large to be kept for one message after the loop


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Counter[Transfer]]:
    """What was logged of each compiled program."""
    found: list[Counter[Transfer]] = []
    table = commlog.table
    monkeypatch.setenv("JAXDIST_LOG", "comm")
    monkeypatch.setattr(commlog, "table", lambda one: (found.append(one), table(one))[1])
    return found


def weights() -> dict[str, Any]:
    shapes = {"layers": (4, WIDTH, WIDTH), "out": (WIDTH, 3), "b": (3,)}
    return {name: jnp.ones(shape, jnp.float32) / WIDTH for name, shape in shapes.items()}


def loss_fn(w: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda x, p: (jnp.tanh(x @ p), None), x, w["layers"])
    return jnp.mean((x @ w["out"] + w["b"]) ** 2)


def sgd(w: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(w, batch)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), {"loss": loss}


BATCH = np.ones((16, WIDTH), np.float32)


def test_buckets_and_loops(seen: list[Counter[Transfer]]) -> None:
    jaxdist.data_parallel(sgd)(weights(), BATCH)
    (found,) = seen
    assert found == Counter(
        [
            Transfer("all-reduce", "float32", WIDTH * 3 + 3 + 1, 3, N, "", 1),  # out, b and the loss
            Transfer("all-reduce", "float32", WIDTH * WIDTH, 1, N, "in a scan of 4", 4),
        ]
    )
    assert sum(one.sent for one in found) == (3 * WIDTH + 4) * 4 * 2 * 7 // 8 + 4 * WIDTH * WIDTH * 4 * 2 * 7 // 8


@pytest.mark.usefixtures("messages_take_time")
def test_small_gradients_of_a_loop_travel_after_it(seen: list[Counter[Transfer]]) -> None:
    small = jax.tree.map(lambda x: x[tuple(slice(min(n, 16)) for n in x.shape)], weights())
    jaxdist.data_parallel(sgd)(small, BATCH[:, :16])
    (found,) = seen
    assert found == Counter([Transfer("all-reduce", "float32", 4 * 16 * 16 + 16 * 3 + 3 + 1, 4, N, "", 1)])


def test_groups() -> None:
    """Each act by themselves."""
    pairs = ((0, 1), (2, 3))
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = jax.shard_map(
        lambda x: lax.psum(lax.all_to_all(x, "data", 0, 0, tiled=True, axis_index_groups=pairs), "data"),
        mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    found = list(transfers(jax.make_jaxpr(total)(jnp.ones(8)), [Axis("data", 4)]))
    assert [(one.kind, one.devices, one.groups) for one in found] == [("all-to-all", 2, pairs), ("all-reduce", 4, None)]


def test_the_wire_s_dtype(seen: list[Counter[Transfer]]) -> None:
    jaxdist.data_parallel(sgd, compress="bf16")(weights(), BATCH)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights())
    jaxdist.data_parallel(sgd)(half, BATCH.astype(jnp.bfloat16))
    compressed, widened = ({one.dtype for one in found} for found in seen)
    assert compressed == {"bfloat16", "float32"}  # the loss is not compressed
    assert widened == {"float32"}  # on CPUs nothing adds up 16-bit floats on its way


@pytest.mark.optimised
@pytest.mark.parametrize("level", [1, 3])
def test_what_is_said_is_what_is_compiled(level: Any, seen: list[Counter[Transfer]]) -> None:
    """The bytes of the collectives in the compiled program, outside of its loops, are those of the log."""
    tx = jaxdist.zero(optax.adam(1e-3), level=level)

    def step(state: Any, batch: Any) -> Any:
        w, opt = state
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"]) ** 2))(w)
        updates, opt = tx.update(grads, opt, w)
        return (optax.apply_updates(w, updates), opt), {"loss": loss}

    w = {"a": jnp.ones((WIDTH, 64), jnp.float32), "b": jnp.ones((64, 24), jnp.float32)}
    decorated: Any = jaxdist.data_parallel(step)
    text = decorated.lower((w, tx.init(w)), BATCH).compile().as_text()
    (found,) = seen
    said: Counter[str] = Counter()
    for one, count in found.items():
        said[one.kind] += count * one.bytes
    compiled: Counter[str] = Counter()
    for shapes, kind in re.findall(r"= (\(?f32[^=]*?) (all-reduce|reduce-scatter|all-gather)\(", text):
        for dims in re.findall(r"f32\[([\d,]*)\]", shapes):
            size = 4 * math.prod(int(d) for d in dims.split(",") if d)
            compiled[kind] += size * (N if kind == "reduce-scatter" else 1)
    assert said == compiled
    assert {"all-reduce", "reduce-scatter", "all-gather"} == set(said)


def test_groups_branches_and_one_s_own(seen: list[Counter[Transfer]]) -> None:
    @jaxdist.data_parallel
    def step(w: Any, batch: Any) -> Any:
        def on_each(w: Any, batch: Any) -> Any:
            pairs = jaxdist.allreduce(batch[0], groups=[[0, 1], [2, 3], [4, 5], [6, 7]])
            moved = lax.ppermute(batch[0], "data", [(i, (i + 1) % N) for i in range(N)])
            total = lax.while_loop(lambda x: x[0] < 3, lambda x: x + lax.pmean(jnp.mean(batch), "data"), w)
            return total, (pairs + moved)[None]

        total, x = jaxdist.per_device(on_each, (P(), P("data")), (P(), P("data")))(w, batch)
        return total, {"x": jnp.sum(x)}

    step(jnp.zeros(2), BATCH)
    (found,) = seen
    by_kind = {(one.kind, one.elements, one.devices): (one.place, one.sent) for one in found}
    assert by_kind["all-reduce", WIDTH, 2] == ("", 4 * WIDTH)
    assert by_kind["permute", WIDTH, N] == ("", 4 * WIDTH)
    assert "while loop" in commlog.table(found).splitlines()[-1]


def test_a_line_a_call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And none unless asked."""
    step = jaxdist.data_parallel(lambda w, x: (w - jnp.mean(x), jnp.mean(x)))
    jaxdist.data_parallel(sgd)(weights(), BATCH)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("JAXDIST_LOG", "comm")
    w = jnp.zeros((), jnp.float32)
    for size in (8, 16, 8):
        w, _ = step(w, np.ones(size, np.float32))
    said = capfd.readouterr().err.splitlines()
    assert all(line.startswith("[jaxdist comm] ") for line in said)
    assert sum("total: " in line for line in said) == 2, "compiled for two batch sizes"
    calls = [line for line in said if re.search(r"call \d", line)]
    assert [re.search(r"call (\d): (\d collectives, \d+ bytes sent)", line)[1] for line in calls] == ["1", "2", "3"]  # type: ignore[index]
    assert "after the one before" not in calls[0]
    assert calls[2].endswith(" ms after the one before")


def test_an_unknown_word_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXDIST_LOG", "comm,steps")
    with pytest.raises(ValueError, match=r"JAXDIST_LOG='comm,steps': there is no 'steps'; valid: comm"):
        commlog.asked()
