"""`check_sync` on the virtual devices of one process: what is compared, and what is said."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdist
from jaxdist.agreement.sync import Leaf, describe, differences

DEVICES = jax.devices()
MESH = Mesh(np.array(DEVICES), ("data",))


def on_each(values: list[Any]) -> jax.Array:
    """An array that claims to be replicated, with these values on the devices."""
    parts = [jax.device_put(v, d) for v, d in zip(values, DEVICES, strict=True)]
    return jax.make_array_from_single_device_arrays(np.shape(values[0]), NamedSharding(MESH, P()), parts)


def replicated(value: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(MESH, P()))


def test_what_is_the_same_everywhere_passes() -> None:
    jaxdist.check_sync(
        {
            "f": replicated(jnp.array([[1.0, jnp.nan], [0.0, jnp.inf]])),
            "half": replicated(jnp.ones(3, jnp.bfloat16)),
            "complex": replicated(jnp.ones(2, jnp.complex64)),
            "bool": replicated(jnp.array([True, False])),
            "key": replicated(jax.random.key(3)),
            "keys": jax.random.split(jax.random.key(3), 2),
            "scalar": replicated(jnp.float32(2)),
            "empty": replicated(jnp.zeros((0, 3))),
            "shards": jax.device_put(jnp.arange(8.0), NamedSharding(MESH, P("data"))),
            "padded": jaxdist.shard(jnp.arange(11.0)),
            "one": jnp.ones(2),
            "host": np.arange(3)[::2],
            "texts": np.array(["a", "b"]),
            "objects": np.array([None, {}], object),
            "python": [1, 2.0, float("nan"), 1j, "text", b"bytes", True, None, len],
        }
    )
    jaxdist.check_sync({})


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (
            [np.asarray([1, 2], np.float32)] * 7 + [np.asarray([2, 1], np.float32)],
            "float32",
        ),  # the same entries in another order
        ([np.asarray([0.0, 1], np.float32)] * 7 + [np.asarray([-0.0, 1], np.float32)], "float32"),
        ([np.asarray([1, 2], jnp.bfloat16)] * 7 + [np.asarray([1, 2.5], jnp.bfloat16)], "bfloat16"),
    ],
)
def test_a_device_with_other_bits_is_named(values: list[Any], kind: str) -> None:
    tree = {"a": replicated(jnp.ones(3)), "b": [on_each(values)]}
    last, others = DEVICES[-1], ", ".join(map(str, DEVICES[:-1]))
    expected = f"tree['b'][0] ({kind}[2] on 8 devices) has other bits on rank 0 device {last} than on rank 0 device "
    with pytest.raises(jaxdist.SyncError) as caught:
        jaxdist.check_sync(tree)
    assert expected + others in str(caught.value)


def test_keys_differ_by_their_bits() -> None:
    keys = [jax.random.key(0)] * 7 + [jax.random.key(1)]
    with pytest.raises(jaxdist.SyncError, match=r"tree \(key<fry>\[\] on 8 devices\) has other bits on rank 0 device "):
        jaxdist.check_sync(on_each(keys))


def test_the_first_leaf_is_named_and_the_others_counted() -> None:
    bad = on_each([np.float32(i) for i in range(8)])
    with pytest.raises(jaxdist.SyncError, match=r"tree\['x'\] .* others again on .*\(1 more of its leaves differ\.\)"):
        jaxdist.check_sync({"y": bad, "x": bad})


def test_what_can_not_be_compared_is_said() -> None:
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(jaxdist.SyncError, match=r"can't be compared: ValueError: \['a'\] was donated to a step"):
        jaxdist.check_sync({"a": gone})
    with pytest.raises(TypeError, match="between steps, not inside"):
        jax.jit(jaxdist.check_sync)(jnp.ones(3))


@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        ([{"a": 1}, {"a": 1, "b": 2}, {"a": 1}], "['b'] is absent on rank 0, 2; int on rank 1"),
        ([{"a": 1}, {"a": 1.0}], "['a'] is int on rank 0; float on rank 1"),
        ([{"a": 1}, {"a": 2}, {"a": 2}], "['a'] (int) has other bits on rank 0 than on rank 1, 2"),
        ([{"a": "x"}, {"a": "y"}], "['a'] (str) has other bits on rank 1 than on rank 0"),
        ([{"a": 0.0}, {"a": -0.0}], "['a'] (float) has other bits on rank 1 than on rank 0"),
        ([{"a": len}, {"a": "len"}], "['a'] is builtin_function_or_method on rank 0; str on rank 1"),
        (
            [np.zeros(3, np.float32), np.zeros(3, np.float64)],
            " is float32[3] on the host on rank 0; float64[3] on the host on rank 1",
        ),
        (
            [np.zeros((2, 3)), np.zeros((3, 2))],
            "float64[2,3] on the host on rank 0; float64[3,2] on the host on rank 1",
        ),
        ([np.zeros(3), jnp.zeros(3)], " is float64[3] on the host on rank 0; float64[3] on 1 device on rank 1"),
    ],
)
def test_differences_between_ranks(trees: list[Any], expected: str) -> None:
    found = differences([describe(tree) for tree in trees])
    assert len(found) == 1
    assert expected in found[0]


def test_layouts_are_compared() -> None:
    x = jnp.arange(64.0).reshape(8, 8)
    rows, columns = (jax.device_put(x, NamedSharding(MESH, spec)) for spec in (P("data"), P(None, "data")))
    found = differences([describe(t) for t in (rows, columns, jaxdist.shard(jnp.zeros((8, 9))))])
    assert re.search(r"\('data',\) over 8 devices on rank 0; .*\(None, 'data'\) over 8 devices on rank 1", found[0])
    assert "on rank 1; float64[8,9] in shards" in found[0]


def test_ranks_with_several_devices_are_told_apart() -> None:
    def leaf(*sums: int) -> list[Leaf]:
        return [Leaf("w", "f32[]", tuple((f"d{i}", s) for i, s in enumerate(sums)))]

    assert differences([leaf(1, 1), leaf(1, 2), leaf(3, 3)]) == [
        "w (f32[]) has other bits on rank 2; others again on rank 1 device d1 than on rank 0 and rank 1 device d0"
    ]


# --- in a step


def test_check_every_compares_what_comes_out() -> None:
    @jaxdist.data_parallel(check_every=2, donate=False)
    def step(state: Any, x: Any) -> Any:
        return {"w": state["w"] + 1, "frozen": state["frozen"]}, jnp.mean(x)

    good = {"w": replicated(jnp.ones(3)), "frozen": replicated(jnp.ones(2))}
    bad = good | {"frozen": on_each([np.ones(2)] * 5 + [np.zeros(2)] + [np.ones(2)] * 2)}
    x = np.ones((8, 1))
    step(bad, x)
    expected = (
        rf"step '.*step', call 2: result\[0\]\['frozen'\] \(float64\[2\] on 8 devices\) has other bits on rank 0 "
        rf"device {DEVICES[5]} than"
    )
    with pytest.raises(jaxdist.SyncError, match=expected):
        step(bad, x)
    for _ in range(4):
        step(good, x)


@pytest.mark.parametrize("given", [-1, 1.5, True])
def test_check_every_is_a_number_of_calls(given: Any) -> None:
    with pytest.raises(ValueError, match=r"check_every=.*: a number of calls"):
        jaxdist.data_parallel(lambda x: x, check_every=given)
