"""`text_files`, `tokenize`, `Documents`, `packed`: documents by index, and rows of them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.loaders import epoch, make
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist

TEXT = "one\n\nzwei – drei\nlast"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{i}.txt" for i in range(3)]
    for path, text in zip(paths, [TEXT, "", "a\nb\n"], strict=True):
        path.write_text(text)
    return paths


@pytest.mark.parametrize(
    ("split", "want"),
    [
        ("\n", ["one", "zwei – drei", "last", "a", "b"]),
        ("\n\n", ["one", "zwei – drei\nlast", "a\nb\n"]),
        ("–", ["one\n\nzwei ", " drei\nlast", "a\nb\n"]),
        (None, [TEXT, "a\nb\n"]),
    ],
)
def test_text_files(files: list[Path], split: str | None, want: list[str]) -> None:
    text = jaxdist.text_files(files, split)
    assert list(text) == want
    assert list(pickle.loads(pickle.dumps(text))) == want
    assert len(text) == len(want)


def test_text_files_that_are_wrong(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        jaxdist.text_files(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=r"1.txt\): there are no documents"):
        jaxdist.text_files(files[1])
    with pytest.raises(ValueError, match="expected what stands between two documents"):
        jaxdist.text_files(files, "")
    (latin := tmp_path / "latin.txt").write_bytes(b"ok\nf\xfcr\n")
    text = jaxdist.text_files(latin)
    assert text[0] == "ok"
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 at byte 4, in document 1: convert the file"):
        text[1]


def test_files_of_windows_and_files_that_are_written_anew(tmp_path: Path) -> None:
    (path := tmp_path / "x.txt").write_bytes("\ufeffone\r\n\r\ntwo\r\n".encode())
    assert list(jaxdist.text_files(path)) == ["one", "two"]
    path.write_text("a longer line\n" * 3)
    assert list(jaxdist.text_files(path)) == ["a longer line"] * 3
    documents = jaxdist.tokenize(jaxdist.text_files(path), str.encode, tmp_path / "t")
    assert len(documents) == 3
    path.write_text("a larger line\n" * 3)
    with pytest.raises(ValueError, match="was made of other documents"):
        jaxdist.tokenize(jaxdist.text_files(path), str.encode, tmp_path / "t")


def test_tokenize_writes_once(tmp_path: Path) -> None:
    calls: list[str] = []

    def encode(document: str) -> list[int]:
        calls.append(document)
        return [len(document), 7]

    texts = ["", "a", "bbb"]
    documents = jaxdist.tokenize(texts, encode, tmp_path / "t")
    assert [x.tolist() for x in documents] == [[0, 7], [1, 7], [3, 7]]
    assert documents.lengths.tolist() == [2, 2, 2]
    assert np.load(tmp_path / "t" / "tokens.npy").dtype == np.uint16
    again = pickle.loads(pickle.dumps(jaxdist.tokenize(texts, encode, tmp_path / "t")))
    assert [x.tolist() for x in again] == [[0, 7], [1, 7], [3, 7]]
    assert isinstance(again.tokens, np.memmap)
    assert calls == [*texts, *texts, *texts]  # samples, all of them, samples again to see whether they give the same
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(
    ("documents", "encode", "how", "said"),
    [
        (["b"], str.encode, {}, r"of other documents \(their checksum was"),
        (["a"], lambda x: [*x.encode(), 256], {}, "made with another encode"),
        (["a"], str.encode, {"dtype": "uint32"}, "made in uint16 there, and is asked in uint32"),
        (["a", "b"], str.encode, {}, "made of 1 documents there, and here are 2|of 1 documents, and here are 2"),
        (iter(["a"]), str.encode, {}, "a list_iterator can be read once"),
        ([], str.encode, {}, "there are no documents"),
        (["a"], lambda x: [70_000], {}, "document 0 has token 70000, which uint16 does not hold: pass dtype='uint32'"),
        (["a"], lambda x: [-1], {}, "document 0 has token -1, which uint16 does not hold: pass dtype='int32'"),
        (["a"], lambda x: [0.5], {}, "encode gave float64 .* for document 0: expected a list of integers"),
    ],
)
def test_what_tokenize_refuses(documents: Any, encode: Any, how: dict[str, Any], said: str, tmp_path: Path) -> None:
    jaxdist.tokenize(["a"], str.encode, tmp_path / "t")
    with pytest.raises((ValueError, TypeError), match=said):
        jaxdist.tokenize(documents, encode, tmp_path / "t", **how)


def test_a_tokenizing_that_was_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    def encode(document: str) -> bytes:
        if document == "c":
            raise OSError("the disk is gone")
        return document.encode()

    with pytest.raises(OSError, match="the disk is gone"):
        jaxdist.tokenize(list("abc"), encode, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert len(jaxdist.tokenize(list("abc"), str.encode, tmp_path / "t")) == 3
    (tmp_path / "t" / "tokens.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / 't'}: damaged")):
        jaxdist.Documents.open(tmp_path / "t")
    (tmp_path / "u").mkdir()
    with pytest.raises(ValueError, match=r"u exists, and is no folder that jaxdist\.tokenize has written"):
        jaxdist.tokenize(list("abc"), str.encode, tmp_path / "u")


@pytest.mark.parametrize(
    ("tokens", "ends", "said"),
    [
        (np.ones(3), [3], "tokens: float64 of shape .*expected integers"),
        (np.ones((3, 1), int), [3], "expected integers of one dimension"),
        (np.arange(3), [2], "expected places that go upwards, and 3 at last"),
        (np.arange(3), [2, 1, 3], "expected places that go upwards"),
        (np.arange(3), [], "expected one number for each document, and at least one"),
        (np.arange(3), [2.9, 3], "ends: float64 of shape .*expected integers"),
    ],
)
def test_documents_that_cannot_be(tokens: np.ndarray, ends: list[int], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        jaxdist.Documents(tokens, ends)


# --- packing


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any), length=st.integers(1, 20),
    split=st.booleans(), seed=st.one_of(st.none(), st.integers(0, 9)),
)  # fmt: skip
def test_rows(lengths: list[int], length: int, split: bool, seed: int | None) -> None:
    documents = jaxdist.Documents(np.arange(1, sum(lengths) + 1), np.cumsum(lengths))
    rows = list(jaxdist.packed(documents, length, split=split, seed=seed))
    tokens = np.concatenate([row["tokens"] for row in rows])
    real = tokens[tokens > 0]
    assert sorted(real.tolist()) == documents.tokens.tolist()
    if split:
        order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
        assert tokens[: len(real)].tolist() == np.concatenate([documents[i] for i in order.tolist()]).tolist()
        assert len(rows) == -(-len(real) // length)
    for row in rows:
        assert {x.dtype for x in row.values()} == {np.dtype(np.int32)}
        segments = row["tokens_segment_ids"]
        assert ((segments == 0) == (row["tokens"] == 0)).all()
        assert set(np.diff(segments[segments > 0]).tolist()) <= {0, 1}
        for segment in range(1, segments.max() + 1):
            piece = row["tokens"][segments == segment]
            (document,) = set(np.searchsorted(documents.ends, piece - 1, "right").tolist())
            assert piece.tolist() == list(range(piece[0], piece[0] + len(piece)))
            assert row["tokens_positions"][segments == segment].tolist() == list(range(len(piece)))
            assert split or len(piece) == lengths[document] or lengths[document] > length


def test_whole_documents_fill_rows_well() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    documents = jaxdist.Documents(np.ones(lengths.sum(), np.uint8), np.cumsum(lengths))
    assert len(jaxdist.packed(documents, 128, split=False)) <= 1.01 * lengths.sum() / 128


def test_packing_that_cannot_be() -> None:
    documents = jaxdist.Documents(np.arange(3), [3])
    with pytest.raises(ValueError, match=r"length=0\): expected a positive number of tokens"):
        jaxdist.packed(documents, 0)
    with pytest.raises(ValueError, match="the documents have no tokens"):
        jaxdist.packed(jaxdist.Documents(np.zeros(0, int), [0, 0]), 4)


def test_tokens_that_rows_cannot_hold() -> None:
    with pytest.raises(ValueError, match="token 2147483648 does not fit int32"):
        jaxdist.packed(jaxdist.Documents(np.array([1, 2**31]), [2]), 2)


def test_tokens_are_those_of_one_process_on_any_ranks() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 60)
    rows = jaxdist.packed(jaxdist.Documents(np.arange(lengths.sum()), np.cumsum(lengths)), 16, seed=1)

    def first(loaders: list[Any], steps: int | None = None) -> list[list[int]]:
        return epoch(loaders, steps)

    how: dict[str, Any] = {"tail": "keep", "transform": lambda row: row["tokens"][0]}
    whole = first([make(rows, 6, **how)])
    loaders = [make(rows, 2, rank, 3, **how) for rank in range(3)]
    begun = first(loaders, 4)
    rest = [make(rows, 6 // 2, rank, 2, **how) for rank in range(2)]
    for loader in rest:
        loader.set_state(loaders[0].get_state())
    assert begun + first(rest) == whole
