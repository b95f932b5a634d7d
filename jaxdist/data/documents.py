"""Documents of text and of tokens, by index, from files that stay on disk."""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.data.batches import check_iterable
from jaxdist.runtime.context import get_context

_TOKENS, _ENDS, _ABOUT = "tokens.npy", "ends.npy", "about.json"
_CHUNK = 1 << 26  # bytes of a text that are searched at once
_BLOCK = 1 << 20  # bytes of a text that a checksum takes at once
_SAMPLES = 64  # documents that are encoded again to see whether a folder is of them


def text_files(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], split: str | None = "\n") -> Text:
    """The documents of text files, by index. The files stay on disk: what is read is what is asked for.

    Args:
      paths: of one file or several, one after the other; UTF-8.
      split: what stands between two documents, such as ``"\\n"`` or ``"\\n\\n"``; None: each file is one. Empty
        documents are left out.

    Returns:
      A source for `jaxdist.loader` and `jaxdist.tokenize`: ``len(source)`` documents, each a str.

    Raises:
      OSError: a file can't be read.
      ValueError: there are no documents, or `split` is empty; (when it is read) a document is not UTF-8.

    Example:
      >>> import jaxdist, pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "lines.txt")
      >>> _ = path.write_text("one\\n\\ntwo\\n")
      >>> list(jaxdist.text_files(path))
      ['one', 'two']
    """
    files = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if split == "":
        raise ValueError("text_files(split=''): expected what stands between two documents, or None for a file each")
    spans = [_spans(path, split) for path in files]
    if not sum(map(len, spans)):
        raise ValueError(f"text_files({', '.join(files)}): there are no documents")
    return Text(files, spans)


class Text:
    """Documents of text files, by index; made by `text_files`."""

    def __init__(self, paths: list[str], spans: list[np.ndarray]):
        self._paths, self._spans = paths, spans
        self._ends = np.cumsum([len(each) for each in spans])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def checksum(self) -> int:
        """A checksum of all bytes of the files; of their lengths and samples, where there is more than a GiB."""
        files = [_mapped(path) for path in self._paths]
        step = max(1, sum(map(len, files)) >> 30)  # of so many blocks one is read
        value = 0
        for data in files:
            value = zlib.crc32(len(data).to_bytes(8, "big"), value)
            for start in range(0, len(data), _BLOCK * step):
                value = zlib.crc32(data[start : start + _BLOCK].tobytes(), value)
        return value

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        file = int(np.searchsorted(self._ends, index, "right"))
        start, end = self._spans[file][index - (self._ends[file - 1] if file else 0)]
        raw = bytes(_mapped(self._paths[file])[start:end])
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._paths[file]} is not UTF-8 at byte {start + error.start}, in document {index}: convert the "
                "file, or leave it out"
            ) from None


def _mapped(path: str) -> np.ndarray:
    about = Path(path).stat()
    return _map(path, about.st_ino, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _map(path: str, _: int, size: int, __: int) -> np.ndarray:
    """A file as it is now: one that is written anew is another one."""
    return np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)  # an empty file can't be mapped


def _spans(path: str, split: str | None) -> np.ndarray:
    """Where each document starts and ends: int64 (documents, 2), in bytes."""
    data = _mapped(path)
    between = b"" if split is None else split.encode()
    found = np.array(list(_places(data, between)), np.int64) if len(between) > 1 else _bytes(data, between)
    mark = 3 if bytes(data[:3]) == codecs.BOM_UTF8 else 0
    starts = np.concatenate([np.array([mark], np.int64), found + len(between)])
    ends = np.concatenate([found, np.array([len(data)], np.int64)])
    if between == b"\n" and len(data):  # lines of Windows end with two characters
        ends = np.maximum(starts, ends - (data[np.maximum(ends - 1, 0)] == ord("\r")))
    return np.stack([starts, ends], 1)[ends > starts]


def _bytes(data: np.ndarray, one: bytes) -> np.ndarray:
    if not one:
        return np.zeros(0, np.int64)
    starts = range(0, len(data), _CHUNK)
    found = [start + np.flatnonzero(data[start : start + _CHUNK] == one[0]) for start in starts]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _places(data: np.ndarray, what: bytes) -> Iterator[int]:
    if not len(data):
        return
    mapped: Any = data._mmap  # type: ignore[attr-defined]
    place = mapped.find(what)
    while place >= 0:
        yield place
        place = mapped.find(what, place + len(what))


class Documents:
    """Documents of tokens, one after the other in one array, which may lie on disk.

    Args:
      tokens: integers ``(tokens,)``; a ``np.memmap`` stays on disk.
      ends: integers ``(documents,)``: where each document ends, upwards; the last one is ``len(tokens)``.

    Raises:
      TypeError: `tokens` or `ends` are no integers, or not of one dimension.
      ValueError: `ends` go down, or the last one is another.

    Example:
      >>> import jaxdist, numpy as np
      >>> documents = jaxdist.Documents(np.array([5, 6, 7, 8, 9], np.uint16), ends=[2, 5])
      >>> documents[1].tolist(), documents.lengths.tolist(), len(documents)
      ([7, 8, 9], [2, 3], 2)
    """

    def __init__(self, tokens: np.ndarray, ends: Any):
        self.tokens, self.ends = tokens, np.asarray(ends)
        self._folder: str | None = None
        for name, x in (("tokens", tokens), ("ends", self.ends if self.ends.size else np.zeros(0, int))):
            if x.ndim != 1 or x.dtype.kind not in "iu":
                raise TypeError(f"{name}: {x.dtype} of shape {x.shape}; expected integers of one dimension")
        self.ends = self.ends.astype(np.int64)
        if not len(self.ends):
            raise ValueError("ends: expected one number for each document, and at least one")
        if (self.lengths < 0).any() or self.ends[-1] != len(tokens):
            raise ValueError(
                f"ends: expected places that go upwards, and {len(tokens)} at last, as there are tokens; they end with "
                f"{self.ends[-1]}"
            )

    @staticmethod
    def open(folder: str | os.PathLike[str]) -> Documents:
        """The documents that `jaxdist.tokenize` has written to a folder; they stay on disk.

        Reads all of it once to check its digest, about a second for each GB.

        Raises:
          OSError: they are not there.
          ValueError: they are damaged, or `jaxdist.tokenize` did not write them.
        """
        _check_digests(Path(folder), _about(Path(folder)))
        return _opened(folder)

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each document: int64 ``(documents,)``."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return np.asarray(self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]])

    def __reduce__(self) -> Any:  # to a loader's workers: by name where there is one
        return (_opened, (self._folder,)) if self._folder else (Documents, (self.tokens, self.ends))


def _opened(folder: str | os.PathLike[str]) -> Documents:
    """The documents of a folder whose digests are compared already."""
    path = Path(folder)
    try:
        documents = Documents(np.load(path / _TOKENS, mmap_mode="r"), np.load(path / _ENDS))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: damaged ({error}). Delete it and tokenize again") from error
    documents._folder = os.fspath(path.absolute())
    return documents


def _about(path: Path) -> dict[str, Any]:
    """The record that `tokenize` left in a folder."""
    try:
        about = json.loads((path / _ABOUT).read_text())
    except (OSError, ValueError, RecursionError):
        if not path.exists():
            raise
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"{path} was not written by jaxdist.tokenize: name another folder")
    return about


def _digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "blake2b").hexdigest()


def _check_digests(path: Path, about: dict[str, Any]) -> None:
    for name in (_TOKENS, _ENDS):
        if _digest(path / name) != about.get(name):
            raise ValueError(f"{path / name}: damaged (not what was written). Delete {path} and tokenize again")


def tokenize(
    documents: Iterable[Any],
    encode: Callable[[Any], Sequence[int] | bytes | np.ndarray],
    folder: str | os.PathLike[str],
    dtype: Any = np.uint16,
) -> Documents:
    """Write the tokens of documents to a folder, once; what is there already is opened.

    In a job of several processes each calls it with the same arguments. The root writes, the others wait for it. The
    folder must be one that all hosts see.

    A folder that is there is compared: with the bytes of text files (of more than a GiB: with samples) and of a list,
    the number of other documents, and the tokens of up to 64 documents, the first and the last among them; and with
    its own digest, for which the root reads it once (about a second for a GB).

    Args:
      documents: `jaxdist.text_files`, a list, a Hugging Face data set, or another iterable that can be read again.
      encode: a document's tokens, with one for its end if the model is to see one: ``str.encode`` for bytes.
      folder: to write: ``tokens.npy`` and ``ends.npy``, which NumPy reads.
      dtype: of the tokens on disk: ``uint16`` up to 65,535.

    Returns:
      `Documents`, which stay on disk.

    Raises:
      ValueError: (on every rank) a token does not fit `dtype`, there are no documents, or what is there already was
        made of other documents or in another way, or is damaged.
      TypeError: (on every rank) `documents` can be read only once, as a generator.
      OSError: (on every rank) the folder can't be written, or another host does not see it.

    Example:
      >>> import jaxdist, tempfile
      >>> documents = jaxdist.tokenize(["ab", "c"], str.encode, tempfile.mkdtemp() + "/tokens")
      >>> documents[0].tolist(), len(documents)
      ([97, 98], 2)
    """
    ctx, path = get_context(), Path(folder)

    def write() -> Part[None]:
        if ctx.is_root:
            _written(documents, encode, path, np.dtype(dtype))
        return Part(None)

    def read() -> Part[Documents]:
        found = _opened(path)
        return Part(found, (("documents", str(len(found))), ("tokens", str(len(found.tokens)))))

    errors = ValueError, TypeError, OSError
    on_every_rank(ctx, "tokenize", write, raises=errors, patient=True)
    advice = "The folder has to be one that every host sees"
    return on_every_rank(ctx, "tokenize", read, raises=errors, advice=lambda _: advice)[0]


def _written(documents: Iterable[Any], encode: Callable[[Any], Any], path: Path, dtype: np.dtype[Any]) -> None:
    check_iterable(documents)

    def coded(i: int, document: Any) -> np.ndarray:
        ids = encode(document)
        ids = np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else np.asarray(ids)
        ids = ids if ids.size else ids.astype(dtype)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(
                f"encode gave {ids.dtype} of shape {ids.shape} for document {i}: expected a list of integers"
            )
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        for token in (ids.min(), ids.max()) if ids.size else ():
            if not least <= token <= most:
                wider = "uint32" if token > most else "int32"
                raise ValueError(f"document {i} has token {token}, which {dtype} does not hold: pass dtype={wider!r}")
        return ids.astype(dtype)

    sampled = _sampled(documents)
    if not sampled:
        raise ValueError("tokenize: there are no documents")
    tokens = zlib.crc32(b"".join(coded(i, document).tobytes() + b";" for i, document in sampled))
    about: dict[str, Any] = {"dtype": dtype.name, "tokens of samples": tokens} | _identity(documents)
    if path.exists():
        _compare(path, about)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # another job may write as well
    beside.mkdir()
    try:
        ends, count = [], 0
        with (beside / _TOKENS).open("wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (0,)}
            np.lib.format.write_array_header_1_0(file, header)
            for i, document in enumerate(documents):
                ids = coded(i, document)
                file.write(ids.tobytes())
                ends.append(count := count + len(ids))
            file.seek(0)  # NumPy leaves room for a longer shape
            np.lib.format.write_array_header_1_0(file, header | {"shape": (count,)})
        np.save(beside / _ENDS, np.array(ends, np.int64))
        digests = {name: _digest(beside / name) for name in (_TOKENS, _ENDS)}
        (beside / _ABOUT).write_text(json.dumps(about | {"documents": len(ends)} | digests))
        for name in (_TOKENS, _ENDS, _ABOUT):  # after a power cut a renamed file may be empty
            with (beside / name).open("rb") as file:
                os.fsync(file.fileno())
        try:
            beside.rename(path)
        except OSError:
            if not path.exists():
                raise
            _compare(path, about)  # another job was first
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sampled(documents: Any) -> list[tuple[int, Any]]:
    """Some documents with their places: spread over all, if they are there by index."""
    if not (hasattr(documents, "__len__") and hasattr(documents, "__getitem__")):
        return list(enumerate(itertools.islice(documents, _SAMPLES)))
    places = np.unique(np.linspace(0, max(0, len(documents) - 1), _SAMPLES).astype(int)) if len(documents) else []
    return [(int(i), documents[int(i)]) for i in places]


def _identity(documents: Any) -> dict[str, Any]:
    """What tells documents from others, without encoding them."""
    found: dict[str, Any] = {"documents": len(documents)} if hasattr(documents, "__len__") else {}
    if isinstance(documents, Text):
        found["bytes"] = documents.checksum()
    elif isinstance(documents, list | tuple):
        value = 0
        for document in documents:
            value = zlib.crc32(repr(document).encode(), value)
        found["bytes"] = value
    return found


def _compare(path: Path, about: dict[str, Any]) -> None:
    """Refuse a folder that was made of something else."""
    found = _about(path)
    said = {
        "dtype": "in {} there, and is asked in {}",
        "documents": "of {} documents, and here are {}",
        "bytes": "of other documents (their checksum was {}, and is {})",
        "tokens of samples": "with another encode (the checksum of some tokens was {}, and is {})",
    }
    for name, words in said.items():
        if name in about and found.get(name, about[name]) != about[name]:
            how = words.format(found[name], about[name])
            raise ValueError(f"{path} was made {how}. Delete it, or name another folder")
    _check_digests(path, found)


__all__ = ["Documents", "Text", "text_files", "tokenize"]
