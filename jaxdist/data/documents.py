"""Documents of text or tokens, by index, from files that stay on disk."""

import functools
import itertools
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.data.sources import check_iterable
from jaxdist.errors import DataError
from jaxdist.runtime.context import get_context

_TOKENS, _ENDS, _ABOUT = "tokens.npy", "ends.npy", "about.json"
_BLOCK = 1 << 15  # tokens per digest
_SAMPLES = 64  # documents at the start that are encoded again to check that a folder has the same tokens


def text_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], split: str | None = "\n") -> "Text":
    """Open the documents of text files, in order. A document is read from disk when it is needed.

    Args:
      paths: one or several UTF-8 files.
      split: the separator between documents, or None for one document per file. Empty documents are left out.

    Returns:
      An iterable of strings, for `jaxdist.data.tokenize`, or as a stream for `jaxdist.loader`.

    Raises:
      OSError: a file cannot be read.
      ValueError: the files have no documents, `split` is empty, or (on reading) a document is not UTF-8.

    Example:
      >>> import pathlib, tempfile
      >>> from jaxdist.data import text_files
      >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
      >>> _ = path.write_text("one\\n\\ntwo\\n")
      >>> list(text_files(path))
      ['one', 'two']
    """
    files = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    found = Text(files, split)
    if next(iter(found), None) is None:
        raise ValueError(f"text_files({', '.join(files)}): found no documents")
    return found


@dataclass(frozen=True)
class Text:
    """The documents of text files, in order; made by `text_files`."""

    paths: Sequence[str]
    split: str | None

    def __iter__(self) -> Iterator[str]:
        size = -1 if self.split is None else 1 << 24
        for path in self.paths:
            rest = ""
            try:
                with Path(path).open(encoding="utf-8-sig") as file:
                    for text in iter(functools.partial(file.read, size), ""):
                        *whole, rest = [text] if self.split is None else (rest + text).split(self.split)
                        yield from filter(None, whole)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 ({error}): convert the file, or leave it out") from None
            if rest:
                yield rest


class Documents:
    """Documents of tokens, one after the other in one array, in memory or on disk.

    Args:
      tokens: integers with shape ``(tokens,)``. An ``np.memmap`` stays on disk.
      ends: integers with shape ``(documents,)``: the end of each document, ascending. The last one is ``len(tokens)``.

    Raises:
      TypeError: `tokens` or `ends` are not one-dimensional integers.
      ValueError: `ends` decrease, or the last one is not ``len(tokens)``.

    Example:
      >>> import numpy as np
      >>> from jaxdist.data import Documents
      >>> documents = Documents(np.array([5, 6, 7, 8, 9], np.uint16), ends=[2, 5])
      >>> documents[1].tolist(), documents.lengths.tolist(), len(documents)
      ([7, 8, 9], [2, 3], 2)
    """

    def __init__(self, tokens: np.ndarray, ends: Any):
        self.tokens, self.ends = tokens, np.asarray(ends)
        self._folder: Path | None = None
        self._about: dict[str, Any] = {}  # what `tokenize` wrote about them
        self._unread: dict[int, int] = {}  # the digests of blocks that have not been read yet
        for name, x in (("tokens", tokens), ("ends", self.ends if self.ends.size else np.zeros(0, int))):
            if x.ndim != 1 or x.dtype.kind not in "iu":
                raise TypeError(f"{name}: {x.dtype} of shape {x.shape}; expected integers of one dimension")
        self.ends = self.ends.astype(np.int64)
        if not len(self.ends):
            raise ValueError("ends: expected one number for each document, and at least one")
        if (self.lengths < 0).any() or self.ends[-1] != len(tokens):
            raise ValueError(
                f"ends: expected ascending positions up to {len(tokens)}, the number of tokens; the last is "
                f"{self.ends[-1]}"
            )

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> "Documents":
        """Open the documents that `jaxdist.data.tokenize` wrote to a folder; they stay on disk.

        Raises:
          OSError: the folder does not exist.
          DataError: its files are damaged (tokens are checked when first read), or `tokenize` did not write them.
        """
        path = Path(folder).absolute()
        try:
            about = json.loads((path / _ABOUT).read_text())
            tokens, ends = (np.load(path / name, mmap_mode="r") for name in (_TOKENS, _ENDS))
            sound = (
                about[_ENDS] == _digests(ends)
                and (tokens.dtype.name, len(tokens)) == (about["dtype"], ends[-1])
                and len(about[_TOKENS]) == -(-len(tokens) // _BLOCK)
            )
            if not sound:
                raise ValueError("its lengths or digests do not match")
        except (OSError, EOFError, ValueError, TypeError, LookupError, RecursionError) as error:
            if not path.exists():
                raise
            raise DataError(
                f"{path} is damaged, or jaxdist.data.tokenize did not write it ({error}): delete it and tokenize again"
            ) from error
        documents = Documents(tokens, ends)
        documents._folder, documents._about, documents._unread = path, about, dict(enumerate(about[_TOKENS]))
        return documents

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document: int64 ``(documents,)``."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self.read(int(self.ends[index - 1]) if index else 0, int(self.ends[index]))

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))

    def __reduce__(self) -> Any:  # for a loader's workers: by name if possible
        return (Documents.open, (self._folder,)) if self._folder else (Documents, (self.tokens, self.ends))

    def read(self, start: int, end: int) -> np.ndarray:
        """Return the tokens from `start` to `end`, of one document or several."""
        for block in range(start // _BLOCK, -(-end // _BLOCK)) if self._unread else ():
            if block not in self._unread:
                continue
            if [self._unread[block]] != _digests(self.tokens[block * _BLOCK : (block + 1) * _BLOCK]):
                raise DataError(
                    f"{self._folder}/{_TOKENS}: damaged: tokens {block * _BLOCK} to {(block + 1) * _BLOCK} have "
                    "changed since they were written. Delete the folder and tokenize again"
                )
            del self._unread[block]
        return np.asarray(self.tokens[start:end])


def _digests(array: np.ndarray) -> list[int]:
    """Return a digest for each block."""
    return [zlib.crc32(array[i : i + _BLOCK].tobytes()) for i in range(0, len(array), _BLOCK)]


def tokenize(
    documents: Iterable[Any],
    encode: Callable[[Any], Sequence[int] | bytes | np.ndarray],
    folder: str | os.PathLike[str],
    dtype: Any = np.uint16,
) -> Documents:
    """Write the tokens of documents to a folder once; if it exists, open it. Every process calls it; the root writes.

    An existing folder must come from the same documents and encoding, as far as checksums and the tokens of the first
    64 documents show.

    Args:
      documents: `jaxdist.data.text_files`, a list, a Hugging Face data set, or any iterable that can be read again.
      encode: a function that returns a document's tokens, such as ``str.encode`` for bytes.
      folder: the folder for ``tokens.npy`` and ``ends.npy``, which NumPy can read. All hosts must see it.
      dtype: the type of the tokens on disk; ``uint16`` holds values up to 65,535.

    Returns:
      `Documents`, which stay on disk.

    Raises:
      ValueError: (on every rank) a token does not fit `dtype`, `documents` is empty, or the folder comes from
        different documents or a different encoding.
      DataError: (on every rank) the folder is damaged.
      TypeError: (on every rank) `documents` can be read only once, like a generator.
      OSError: (on every rank) the folder cannot be written, or a host does not see it.

    Example:
      >>> import tempfile
      >>> from jaxdist.data import tokenize
      >>> documents = tokenize(["ab", "c"], str.encode, tempfile.mkdtemp() + "/tokens")
      >>> documents[0].tolist(), len(documents)
      ([97, 98], 2)
    """
    ctx, path = get_context(), Path(folder)

    def write() -> Part[None]:
        if ctx.is_root:
            _write(documents, encode, path, np.dtype(dtype))
        return Part(None)

    def read() -> Part[Documents]:
        found = Documents.open(path)
        return Part(found, (("documents", str(len(found))), ("tokens", str(len(found.tokens)))))

    errors = ValueError, TypeError, OSError, DataError
    on_every_rank(ctx, "tokenize", write, raises=errors, patient=True)
    advice = "The folder has to be one that every host sees"
    return on_every_rank(ctx, "tokenize", read, raises=errors, advice=advice)[0]


def _write(documents: Iterable[Any], encode: Callable[[Any], Any], path: Path, dtype: np.dtype[Any]) -> None:
    check_iterable(documents)
    first = list(enumerate(itertools.islice(iter(documents), _SAMPLES)))
    if not first:
        raise ValueError("tokenize: got no documents")
    tokens = zlib.crc32(b"".join(_coded(i, encode(document), dtype).tobytes() + b";" for i, document in first))
    about: dict[str, Any] = {"dtype": dtype.name, "checksum of the first tokens": tokens} | _identity(documents)
    if path.exists():
        _compare(path, about)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:  # other jobs may write, too
        draft = Path(folder, path.name)
        draft.mkdir()
        # One array of NumPy's format, with room in its header for a longer shape.
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        ends, count = [], 0
        with (draft / _TOKENS).open("wb") as out:
            np.lib.format.write_array_header_1_0(out, header | {"shape": (0,)})
            for i, document in enumerate(documents):
                out.write((ids := _coded(i, encode(document), dtype)).tobytes())
                ends.append(count := count + len(ids))
            out.seek(0)
            np.lib.format.write_array_header_1_0(out, header | {"shape": (count,)})
        np.save(draft / _ENDS, np.array(ends, np.int64))
        about["documents"] = len(ends)
        for name in (_TOKENS, _ENDS):
            about[name] = _digests(np.load(draft / name, mmap_mode="r"))
        (draft / _ABOUT).write_text(json.dumps(about))
        for name in (_TOKENS, _ENDS, _ABOUT):  # after a power cut a renamed file may be empty
            with (draft / name).open("rb") as written:
                os.fsync(written.fileno())
        try:
            draft.rename(path)
        except OSError:
            if not path.exists():
                raise
            _compare(path, about)  # a different job was first


def _coded(i: int, ids: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the tokens of a document in the type on disk."""
    ids = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids)
    if not ids.size:
        return np.zeros(0, dtype)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"encode gave {ids.dtype} of shape {ids.shape} for document {i}: expected a list of integers")
    coded = ids.astype(dtype)
    if (coded != ids).any():
        raise ValueError(f"document {i} has token {ids[coded != ids][0]}, which {dtype} does not hold: pass dtype=")
    return coded


def _identity(documents: Any) -> dict[str, Any]:
    """Return properties that tell documents apart without encoding them."""
    found: dict[str, Any] = {"documents": len(documents)} if hasattr(documents, "__len__") else {}
    if isinstance(documents, Text | list | tuple):
        found["checksum of all documents"] = functools.reduce(
            lambda value, one: zlib.crc32(repr(one).encode(), value), documents, 0
        )
    return found


def _compare(path: Path, about: dict[str, Any]) -> None:
    """Refuse a folder that came from different documents or a different encoding."""
    found = Documents.open(path)._about
    for name in about:
        if name not in (_TOKENS, _ENDS) and found.get(name, about[name]) != about[name]:
            raise ValueError(
                f"{path} has different documents, or a different encode or dtype: {name}: {found[name]} there, "
                f"{about[name]} here. Delete it, or use a different folder"
            )
