"""`text_files`, `tokenize`, `Documents`, `packed`: documents by index, and rows of them."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogue.damages import OF_TOKENS
from harness.errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdist

TEXT = "one\n\nzwei – drei\nlast"


@pytest.mark.parametrize(
    ("split", "want"),
    [
        ("\n", ["one", "zwei – drei", "last", "a", "b", "one", "two"]),
        ("\n\n", ["one", "zwei – drei\nlast", "a\nb\n", "one", "two\n"]),
        ("–", ["one\n\nzwei ", " drei\nlast", "a\nb\n", "one\n\ntwo\n"]),
        (None, [TEXT, "a\nb\n", "one\n\ntwo\n"]),
    ],
)
def test_text_files(split: str | None, want: list[str], tmp_path: Path) -> None:
    """Also empty ones, and those of Windows."""
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for path, text in zip(paths, [TEXT, "", "a\nb\n", "\ufeffone\r\n\r\ntwo\r\n"], strict=True):
        path.write_bytes(text.encode())
    text = jaxdist.data.text_files(paths, split)
    assert list(text) == list(text) == want
    assert list(pickle.loads(pickle.dumps(text))) == want


# --- tokens


def test_tokenize_writes_once(tmp_path: Path) -> None:
    calls: list[str] = []

    def encode(document: str) -> list[int]:
        calls.append(document)
        return [len(document), 7]

    texts, folder = ["", "a", "bbb", *"c" * 97], tmp_path / "t"
    documents = jaxdist.data.tokenize(texts, encode, folder)
    want = [[len(text), 7] for text in texts]
    assert [x.tolist() for x in documents] == want
    assert documents.lengths.tolist() == [2] * 100
    assert len(calls) >= 100
    calls.clear()
    again = jaxdist.data.tokenize(texts, encode, folder)
    assert 0 < len(calls) < 100  # some, to see whether they give the same
    for each in (again, jaxdist.data.Documents.open(folder), pickle.loads(pickle.dumps(again))):
        assert [x.tolist() for x in each] == want
        assert isinstance(each.tokens, np.memmap)
    assert np.load(folder / "tokens.npy").dtype == np.uint16  # without jaxdist
    assert np.load(folder / "ends.npy").tolist() == list(range(2, 202, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_tokens_of_an_iterable_that_another_job_writes_too(tmp_path: Path) -> None:
    class Texts:
        def __iter__(self) -> Iterator[str]:
            return map(str, range(100))

    def encode(text: str, others: list[Any] = []) -> bytes:  # noqa: B006
        if text == "99" and not others:
            others.append(None)
            jaxdist.data.tokenize(Texts(), str.encode, tmp_path / "t")
        return text.encode()

    for _ in range(2):
        assert [bytes(x.tolist()) for x in jaxdist.data.tokenize(Texts(), encode, tmp_path / "t")] == list(
            map(str.encode, Texts())
        )
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_text_files_that_are_written_anew(tmp_path: Path) -> None:
    (path := tmp_path / "x.txt").write_text("a longer line\n" * 100)
    assert len(jaxdist.data.tokenize(jaxdist.data.text_files(path), str.encode, tmp_path / "t")) == 100
    path.write_text("a longer line\n" * 50 + "a larger line\n" + "a longer line\n" * 49)
    with raises(ValueError, str(tmp_path / "t")):
        jaxdist.data.tokenize(jaxdist.data.text_files(path), lambda text: b"a longer line", tmp_path / "t")


@pytest.mark.parametrize(
    ("documents", "encode", "how", "tokens"),
    [
        (["b"], lambda x: b"a", {}, ("different documents",)),
        (["a"], lambda x: [98], {}, ("encode",)),
        (["a"], str.encode, {"dtype": "uint32"}, ("uint16", "uint32")),
        (["a", "b"], str.encode, {}, ("1", "2")),
        (iter(["a"]), str.encode, {}, ("list_iterator",)),
        ([], str.encode, {}, ("no documents",)),
        (["a"], lambda x: [70_000], {}, ("document 0", "70000", "uint16", "dtype=")),
        (["a"], lambda x: [2**33], {}, ("8589934592", "uint16")),
        (["a"], lambda x: [0.5], {}, ("document 0", "float64")),
    ],
)
def test_what_tokenize_refuses(documents: Any, encode: Any, how: Any, tokens: Any, tmp_path: Path) -> None:
    jaxdist.data.tokenize(["a"], str.encode, tmp_path / "t")
    with raises((ValueError, TypeError), *tokens):
        jaxdist.data.tokenize(documents, encode, tmp_path / "t", **how)


def test_a_tokenizing_that_was_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    def encode(document: str) -> bytes:
        if document == "c":
            raise OSError("the disk is gone")
        return document.encode()

    with raises(OSError, "the disk is gone"):
        jaxdist.data.tokenize(["a"] * 50 + ["c"] + ["a"] * 50, encode, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "u").mkdir()
    with raises(ValueError, str(tmp_path / "u")):
        jaxdist.data.tokenize(list("abc"), str.encode, tmp_path / "u")


def test_damage_of_tokens_is_told(tmp_path: Path) -> None:
    """By the name of the file or the folder."""
    texts = ["".join(chr(97 + i * j % 26) for j in range(50)) for i in range(100)]
    for i, (name, (damage, file)) in enumerate(OF_TOKENS.items()):
        jaxdist.data.tokenize(texts, str.encode, folder := tmp_path / str(i))
        damage(folder)
        for call in (
            lambda folder=folder: jaxdist.data.tokenize(texts, str.encode, folder),
            lambda folder=folder: jaxdist.data.Documents.open(folder),
        ):
            with raises(jaxdist.DataError, str(folder / file)):
                print(name, list(call()))
    with raises(FileNotFoundError, "nowhere"):
        jaxdist.data.Documents.open(tmp_path / "nowhere")


# --- rows


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any), length=st.integers(1, 20),
    seed=st.one_of(st.none(), st.integers(0, 9)),
)  # fmt: skip
def test_rows(lengths: list[int], length: int, seed: int | None) -> None:
    """Each token is in them once, each document in order; its segment and the places in it are named."""
    documents = jaxdist.data.Documents(np.arange(1, sum(lengths) + 1), np.cumsum(lengths))
    rows = list(jaxdist.data.packed(documents, length, seed=seed))
    tokens = np.concatenate([row["tokens"] for row in rows])
    real = tokens[tokens > 0]
    assert sorted(real.tolist()) == documents.tokens.tolist()
    assert len(rows) == -(-len(real) // length)
    assert seed is not None or tokens[: len(real)].tolist() == documents.tokens.tolist()
    for row in rows:
        assert {(x.dtype, x.shape) for x in row.values()} == {(np.dtype(np.int32), (length,))}
        segments = row["tokens_segment_ids"]
        assert ((segments == 0) == (row["tokens"] == 0)).all()
        assert set(np.diff(segments[segments > 0]).tolist()) <= {0, 1}
        for segment in range(1, segments.max() + 1):
            piece = row["tokens"][segments == segment]
            assert len(set(np.searchsorted(documents.ends, piece - 1, "right").tolist())) == 1
            assert piece.tolist() == list(range(piece[0], piece[0] + len(piece)))
            assert row["tokens_positions"][segments == segment].tolist() == list(range(len(piece)))


def test_text_files_documents_and_rows_that_cannot_be(tmp_path: Path) -> None:
    (empty := tmp_path / "empty.txt").touch()
    (latin := tmp_path / "latin.txt").write_bytes(b"ok\nf\xfcr\n")
    documents = jaxdist.data.Documents
    calls: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
        (lambda: jaxdist.data.text_files(tmp_path / "none.txt"), FileNotFoundError, ("none.txt",)),
        (lambda: jaxdist.data.text_files(empty), ValueError, ("empty.txt", "no documents")),
        (lambda: jaxdist.data.text_files(__file__, ""), ValueError, ("separator",)),
        (lambda: list(jaxdist.data.text_files(latin)), ValueError, ("latin.txt", "UTF-8", "0xfc")),
        (lambda: documents(np.ones(3), [3]), TypeError, ("tokens", "float64")),
        (lambda: documents(np.ones((3, 1), int), [3]), TypeError, ("tokens", "(3, 1)")),
        (lambda: documents(np.arange(3), [2]), ValueError, ("ends", "3", "2")),
        (lambda: documents(np.arange(3), [2, 1, 3]), ValueError, ("ends", "ascending")),
        (lambda: jaxdist.data.packed(documents(np.arange(3), [3]), 0), ValueError, ("length=0",)),
        (lambda: jaxdist.data.packed(documents(np.zeros(0, int), [0, 0]), 4), ValueError, ("no tokens",)),
        (lambda: jaxdist.data.packed(documents(np.array([1, 2**31]), [2]), 2), ValueError, (str(2**31), "int32")),
        (lambda: jaxdist.data.packed(documents(np.arange(3), [3]), 4)[1], IndexError, ("1",)),
    ]
    for call, error, tokens in calls:
        with raises(error, *tokens):
            call()


def test_two_jobs_may_write_one_folder(tmp_path: Path) -> None:
    """The first to end has it, and nothing is left of the other's."""

    def encode(text: str) -> bytes:
        written.append(text)
        if len(written) == 4:  # after the samples
            jaxdist.data.tokenize(["c"], str.encode, tmp_path / "t2")
            jaxdist.data.tokenize(["a", "c"], str.encode, tmp_path / "t")
        return text.encode()

    written: list[str] = []
    with raises(ValueError, "different documents"):
        jaxdist.data.tokenize(["a", "b"], encode, tmp_path / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "t2"]
