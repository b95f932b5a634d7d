"""A leaf comes back as what it was, or is refused at once: every dtype, every kind of number, array and text."""

from __future__ import annotations

import enum
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from states import same, there

import jaxdist
from jaxdist import CheckpointError
from jaxdist.checkpoint import writing
from jaxdist.checkpoint.leaves import refusal

OF_ML = [getattr(ml_dtypes, name) for name in dir(ml_dtypes) if not name.endswith("info")]
DTYPES: list[Any] = [np.dtype(f"{order}{c}") for c in "?bBhHiIlLqQefdgFDGOSUVMm" for order in "<>"]
DTYPES += ["S3", "U3", "V4", "M8[s]", ">M8[D]", "m8[ms]", [("a", "f4"), ("b", "i4")], np.dtypes.StringDType()]
DTYPES += [np.dtype(t) for t in OF_ML if isinstance(t, type)]


class Count(int):
    pass


class Name(str):
    pass


class Phase(enum.IntEnum):
    WARM = 1


class Mode(enum.StrEnum):
    FAST = "fast"


class Array(np.ndarray):
    pass


class Duck:
    dtype, shape = np.dtype("f4"), (2,)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.ones(2, np.float32)


def some(dtype: Any, n: int = 256) -> np.ndarray:
    """Numbers of any bits that the type has, NaN among them."""
    dtype = np.dtype(dtype)
    if dtype.kind in "OT":
        return np.array(["a"] * n, dtype)
    if dtype.itemsize == 0:
        return np.zeros(n, dtype)
    raw = np.random.default_rng(0).integers(0, 256, n * dtype.itemsize, np.uint8)
    return (raw & 1 if dtype.kind == "b" else raw).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: Any, tmp_path: Path) -> None:
    """Of an array and of a NumPy scalar, into the same and into that of the machine's byte order."""
    x = some(dtype)
    scalar = x[3] if isinstance(x[3], np.generic) else x[3:4].reshape(())
    state = {"a": {"x": x, "empty": x[:0], "grid": x.reshape(2, -1).T, "scalar": scalar}}
    if refusal(x):
        with pytest.raises(TypeError, match=r"leaf a\.empty can't be saved: the format on disk has no arrays of "):
            jaxdist.save(tmp_path / "run", state, 1)
        assert there(tmp_path) == []
        return
    jaxdist.save(tmp_path, state, 1)
    assert same(state, jaxdist.restore(tmp_path, state))
    native = jax.tree.map(lambda x: x.astype(x.dtype.newbyteorder("=")), state)
    assert same(native, jaxdist.restore(tmp_path, native))


def test_the_usual_dtypes_are_not_refused() -> None:
    usual = "bool int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 "
    for name in (usual + "bfloat16 float8_e4m3fn float8_e5m2 >f4").split():
        assert refusal(np.zeros(2, name)) == ""


def test_no_checksum_of_other_bits(tmp_path: Path) -> None:
    """Bytes taken for bools: any but 0 is True, and they come back as 1."""
    x = np.arange(256, dtype=np.uint8).view(bool)
    jaxdist.save(tmp_path, {"x": x, "jax": jnp.asarray(x)}, 1)
    got = jaxdist.restore(tmp_path, {"x": x, "jax": jnp.asarray(x)})
    assert got["x"].tolist() == np.asarray(got["jax"]).tolist() == [False] + [True] * 255


NUMBERS = [
    5, 2**63 - 1, -(2**63), True, 1.5, float("nan"), -0.0, 1 - 2j, "", "äö\n\0", np.str_("a"), np.bool_(True),
    np.float64(1.5), np.complex128(1j), ml_dtypes.bfloat16(1.5), ml_dtypes.int4(-3), np.array(1.5),
]  # fmt: skip
KINDS = {
    "named tuple": optax.TraceState(3), "list": [jnp.ones(()), {"deep": np.array([True, False])}], "nothing": None,
    "bfloat16": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "empty": jnp.zeros((0, 4)), "key": jax.random.key(1),
    "keys": jax.random.split(jax.random.key(2, impl="rbg"), 3), "old key": jax.random.PRNGKey(0),
    "int8": np.arange(5, dtype=np.int8), "float32": np.float32(2.5),
}  # fmt: skip
NAMED = ["", "a/b", "..", "\0", "a\nb", "zarr.json", "c/0", "%2F", "*", "x" * 300, 1.5]


@pytest.mark.parametrize(
    "state",
    [
        NUMBERS,
        KINDS,
        jnp.arange(3),
        [np.ones((1,) * 31), np.ones((0,) * 64), np.ones((2, *(1,) * 30))],
        *({name: {"w": np.arange(3.0), "t": "text"}} for name in NAMED),
        # Orbax would warn that it found no arrays to put together.
        {"x": "text"},
        {"x": np.zeros((0, 2))},
    ],
)
def test_what_comes_back(state: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    jaxdist.save(tmp_path, state, 1)
    like = jax.tree.map(lambda x: type(x)(0) if isinstance(x, (str, int, float, complex)) else x, state)
    assert same(state, jaxdist.restore(tmp_path, like))
    assert not caplog.records


REFUSED: list[tuple[Any, str]] = [
    (np.ma.masked_array([1.0, 2.0], mask=[False, True]), "a masked array would lose its mask"),
    (np.ma.masked, "a masked array would lose its mask"),
    (np.ones((1, 1)).view(np.matrix), r"matrix would come back as a plain array: save np\.asarray\(x\)"),
    (np.rec.array(np.ones(2)), "recarray would come back as a plain array"),
    (np.ones(2).view(Array), "Array would come back as a plain array"),
    (np.array([None]), "the format on disk has no arrays of object"),
    (np.bytes_(b"a"), r"the format on disk has no arrays of \|S1"),
    (np.zeros(2, jax.dtypes.float0), "the format on disk has no arrays of "),
    (Count(1), r"Count would come back as int: save int\(x\)"),
    (Phase.WARM, "Phase would come back as int"),
    (Name("a"), "Name would come back as str"),
    (Mode.FAST, "Mode would come back as str"),
    (b"a", "bytes is not an array"),
    (Fraction(1, 3), "Fraction is not an array"),
    (Duck(), "Duck is not an array"),
    (len, "builtin_function_or_method is not an array"),
    (np.zeros((1,) * 64), r"the format on disk has no arrays of 64 dimensions: save x\.reshape\(-1\)"),
    (jnp.zeros((1,) * 32), "the format on disk has no arrays of 32 dimensions"),
    (jax.random.split(jax.random.key(0), (1,) * 31), "the format on disk has no arrays of 31 dimensions"),
]


@pytest.mark.parametrize(("x", "why"), REFUSED, ids=lambda x: type(x).__name__)
def test_what_would_come_back_as_something_else(x: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=rf"leaf a\.x can't be saved: {why}"):
        jaxdist.save(tmp_path / "run", {"a": {"x": x}}, 1)
    assert there(tmp_path) == []
    jaxdist.save(tmp_path, {"a": {"x": 1}}, 1)
    with pytest.raises(TypeError, match=rf"leaf a\.x of `like` is nothing that a checkpoint has: {why}"):
        jaxdist.restore(tmp_path, {"a": {"x": x}}, fallback=True)  # not taken for damage


def test_what_has_no_value(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="leaf x can't be saved: ShapeDtypeStruct is not an array"):
        jaxdist.save(tmp_path, {"x": jax.ShapeDtypeStruct((2,), np.float32)}, 1)
    with pytest.raises(TypeError, match="leaf x can't be saved: it has no value yet"):
        jax.jit(lambda x: jaxdist.save(tmp_path, {"x": x}, 1))(jnp.ones(3))


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"x": "\ud800"}, "its name or text is not UTF-8"),
        ({"\ud800": 1}, "its name or text is not UTF-8"),
        # The array would be written over the one without it, or not be found.
        ({"/": 1}, "no name on disk ends with a slash"),
        ({"a/": 1}, "no name on disk ends with a slash"),
        ({"~": "text"}, "no name on disk ends with a slash"),
    ],
)
def test_what_has_no_name_on_disk(state: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"can't be saved: {why}"):
        jaxdist.save(tmp_path / "run", state, 1)
    assert there(tmp_path) == []


def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    state: list[Any] = [1]
    state.append({"again": state})
    with pytest.raises(ValueError, match=r"^the state contains itself"):
        jaxdist.save(tmp_path / "run", state, 1)
    assert there(tmp_path) == []
    jaxdist.save(tmp_path, [1], 1)
    with pytest.raises(ValueError, match=r"^the state contains itself"):
        jaxdist.restore(tmp_path, state)


def test_where_the_memory_is_does_not_matter(tmp_path: Path) -> None:
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    state = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "frozen": frozen,
        "mapped": np.memmap(tmp_path / "file", "f4", "w+", shape=(3,)),
        "strided": np.arange(10.0)[::3],
        "backward": np.arange(10.0)[::-1],
        "repeated": np.broadcast_to(np.float32(1), (3, 2)),
    }
    jaxdist.save(tmp_path / "run", state, 1)
    assert same(state, jaxdist.restore(tmp_path / "run", state))


@pytest.mark.parametrize("dtype", ["int2", "int4", "float4_e2m1fn", "float8_e5m2", "bfloat16", "bool", "complex64"])
def test_shards(dtype: str, tmp_path: Path) -> None:
    x = jax.device_put(some(dtype).reshape(16, 16), NamedSharding(jaxdist.init().mesh, P("data")))
    jaxdist.save(tmp_path, {"x": x}, 1)
    assert same(x, jaxdist.restore(tmp_path, {"x": x})["x"])
    assert same(np.asarray(x), jaxdist.restore(tmp_path, {"x": np.asarray(x)})["x"])


def test_weak_types(tmp_path: Path) -> None:
    """`bfloat16 * x` is bfloat16 with such an `x`, and float32 with another: the training would go on differently."""
    mesh = jaxdist.init().mesh
    weak = {"scalar": jnp.array(1.5), "array": jnp.where(jnp.ones(3) > 0, 1.0, 0.0)}
    on_mesh = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(weak)
    step = jaxdist.data_parallel(lambda s, b: (jnp.where(s > 0, 1.0, 0.0), b.sum()))
    state = {
        "weak": weak,
        "mesh": on_mesh,
        "padded": step(jaxdist.shard(jnp.ones(33)), np.ones(16))[0],
        "strong": jnp.float32(1),
    }
    jaxdist.save(tmp_path, state, 1)
    for like in (state, jax.tree.map(lambda x: jaxdist.unshard(x) + np.ones(x.shape, x.dtype), state)):
        got = jaxdist.restore(tmp_path, like)
        assert jax.tree.map(lambda x: x.weak_type, got) == jax.tree.map(lambda x: x.weak_type, state)
    assert (got["weak"]["array"] * jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_more_bits_than_jax_has(tmp_path: Path) -> None:
    like = {"x": jax.ShapeDtypeStruct((3,), np.float64)}
    jaxdist.save(tmp_path, {"x": np.ones(3)}, 1)
    with jax.enable_x64(False), pytest.raises(CheckpointError, match=r"x of .* is float64, which JAX has only with"):
        jaxdist.restore(tmp_path, like)
    with jax.enable_x64(True):
        assert jaxdist.restore(tmp_path, like)["x"].dtype == np.float64


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16"])
def test_of_a_version_that_recorded_the_byte_order(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not read them itself."""
    x = some(dtype, 16)
    with monkeypatch.context() as old:
        old.setattr(writing, "dtype_of", lambda x: str(x.dtype))
        old.setattr(writing, "on_host", np.asarray)
        jaxdist.save(tmp_path, {"x": x, "empty": x[:0]}, 1)
    native = x.astype(x.dtype.newbyteorder("="))
    for like in (x, native):
        assert same({"x": like, "empty": like[:0]}, jaxdist.restore(tmp_path, {"x": like, "empty": like[:0]}))
    place = NamedSharding(jaxdist.init().mesh, P("data"))
    shards = {"x": jax.ShapeDtypeStruct(x.shape, native.dtype, sharding=place), "empty": native[:0]}
    assert np.asarray(jaxdist.restore(tmp_path, shards)["x"]).tobytes() == native.tobytes()


def odd(dtype: Any, n: int, how: int) -> Any:
    x = some(dtype, 2 * n)
    return (x, x[::-1], x.reshape(2, -1), x.reshape(-1, 2).T, *x[:1])[how if n else how % 4]


KEPT = [np.dtype(d) for d in DTYPES if not refusal(np.zeros(2, d))]
LEAVES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(), st.complex_numbers(), st.text(max_size=5),
    st.sampled_from([jnp.array(1.0), jax.random.key(1), jnp.zeros((0, 2)), jnp.float32(3), np.str_("s")]),
    st.builds(odd, st.sampled_from(KEPT), st.integers(0, 6), st.integers(0, 4)),
)  # fmt: skip
NAMES = st.text(st.characters(exclude_characters="/~"), max_size=3)
TREES = st.recursive(
    LEAVES,
    lambda t: st.one_of(st.lists(t, min_size=1, max_size=3), st.dictionaries(NAMES, t, min_size=1)),
)


@settings(max_examples=40, deadline=None)
@given(TREES)
def test_any_state(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "run"
    try:
        jaxdist.save(path, state, 1)
    except ValueError as error:  # a name that can't be
        assert re.search("would both be named|is not UTF-8|ends with a slash", str(error))  # noqa: PT017
        assert not path.exists()
        return
    assert same(state, jaxdist.restore(path, state))
