"""The record of a checkpoint: its step, its leaves with their checksums, and its files.

    path/12/saved-3-after-2.json     the third save into `path`; the job had saved or restored the second before

The record has a digest of its own and names its step, so that neither a flipped bit in it nor a file of another step
in its place is taken for the truth.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.checkpoint.agreement import brief
from jaxdist.checkpoint.files import Saved, look, record_name
from jaxdist.errors import CheckpointError

_DATA = "d"  # the folders in which orbax's database keeps what the arrays' checksums are about


class DamagedError(CheckpointError):
    """What is on disk is not what was saved."""


def unreadable(what: str, error: Exception) -> CheckpointError:
    """The error about a file or a leaf that can't be read: damage, unless the system says that it is something else.

    A disk that fails, rights that are missing or too many open files say nothing of what was saved: such a checkpoint
    is not passed over, for the next `save` would rename it.
    """
    if isinstance(error, OSError):
        number, text = error.errno, error.strerror or str(error)
    else:
        said, text = _OF_THE_SYSTEM.search(str(error)), f"{type(error).__name__}: {brief(error)}"
        number = int(said[1]) if said else None
    if number in _DAMAGE:
        return DamagedError(f"{what} can't be read: {text}")
    return CheckpointError(
        f"{what} can't be read: {text}. The system says so, which is no damage: the checkpoint stays as it is. Restore "
        "it again once the cause is gone"
    )


_OF_THE_SYSTEM = re.compile(r"os_error_code='(\d+)'")  # of what tensorstore raises
_DAMAGE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)  # None: it was read, and makes no sense


class LeafRecord(NamedTuple):
    """A leaf as it was saved."""

    shape: tuple[int, ...]  # of the array
    dtype: str  # its name; "str" of a string
    value: int | str  # of an array the checksum (`jaxdist.checkpoint.checksum`), of a string the string
    key: str | None = None  # the generator's name, if it is an array of PRNG keys: the array is then their data
    # whether it is typed as a Python number is (JAX's weak type): the training would go on with other dtypes
    weak: bool = False


class Record(NamedTuple):
    """What is in a checkpoint."""

    saved: Saved  # which one it is
    leaves: dict[tuple[str, ...], LeafRecord]  # by their names
    # {name: (bytes, CRC-32)} of all other files; those with data of arrays have no CRC
    files: dict[str, tuple[int, int | None]]

    @property
    def arrays(self) -> dict[tuple[str, ...], LeafRecord]:
        """The leaves that are not strings."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.dtype != "str"}


def write(directory: Path, saved: Saved, leaves: dict[tuple[str, ...], LeafRecord]) -> None:
    """Write the record of a checkpoint that is otherwise complete, and have it on disk."""
    assert saved.number is not None
    content = {
        "step": saved.step,
        "number": saved.number,
        "after": saved.after,
        "leaves": [
            # Older versions know of nothing after the key.
            [list(name), list(leaf.shape), *(leaf[1:] if leaf.weak else leaf[1:-1])]
            for name, leaf in leaves.items()
        ],
        "files": _files(directory),
    }
    file = directory / record_name(saved.number, saved.after)
    with file.open("x") as out:
        json.dump({"digest": _digest(content), **content}, out)
        out.flush()
        os.fsync(out.fileno())


def read(directory: Path, saved: Saved) -> Record:
    """The record of a checkpoint."""
    if saved.number is None:
        raise DamagedError(
            f"checkpoint {directory} has no record (saved-*.json), or several: files of it were deleted, or it was "
            "not saved by jaxdist"
        )
    file = directory / record_name(saved.number, saved.after)
    try:
        content = json.loads(_bytes(file))
        digest = content.pop("digest")
        whole = digest == _digest(content)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise unreadable(f"file {file} of checkpoint {directory}", error) from None
    if not whole:
        raise DamagedError(f"file {file} of checkpoint {directory} is damaged: its digest does not fit")
    written = Saved(content["step"], content["number"], content["after"])
    if written != (saved if saved.step >= 0 else saved._replace(step=written.step)):
        raise DamagedError(
            f"checkpoint {directory} should be save {saved.number} of step {saved.step}, but {file.name} in it says "
            f"save {written.number} of step {written.step}: files were swapped, or a directory was renamed"
        )
    leaves = {tuple(name): LeafRecord(tuple(shape), *rest) for name, shape, *rest in content["leaves"]}
    return Record(written, leaves, {name: tuple(about) for name, about in content["files"].items()})


def of(directory: Path) -> Record | None:
    """The record of the checkpoint in a directory of any name; None: it is no checkpoint."""
    step = int(directory.name) if directory.name.isdecimal() else -1
    found = look(directory, step) if directory.is_dir() else None
    return None if found is None else read(directory, found)


def check_files(directory: Path, record: Record) -> None:
    """Compare the sizes of all files, and the bytes of those that no array's checksum is about."""
    for name, (size, crc) in record.files.items():
        file = directory / name
        of = f"of checkpoint {directory}"
        try:
            now = file.stat().st_size
            if now != size:
                raise DamagedError(f"file {file} {of} has {now} bytes, {size} were written")
            if crc is not None and zlib.crc32(_bytes(file)) != crc:
                raise DamagedError(f"file {file} {of} has other bytes than were written")
        except OSError as error:
            raise unreadable(f"file {file} {of}", error) from None


def _bytes(file: Path) -> bytes:
    if not file.is_file():  # a pipe: to open it would wait for whoever writes into it
        raise OSError(f"{file.name} is not a file" if file.exists() else f"there is no {file.name}")
    return file.read_bytes()


def _files(directory: Path) -> dict[str, tuple[int, int | None]]:
    found = {}
    for file in sorted(directory.rglob("*")):
        if file.is_file():
            crc = None if file.parent.name == _DATA else zlib.crc32(file.read_bytes())
            found[str(file.relative_to(directory))] = (file.stat().st_size, crc)
    return found


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
