"""The directory of a run's checkpoints: which are there, in which order they were saved, which of them are old."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

ITEM = "default"  # what orbax's CheckpointManager calls the only item of a step
UNFINISHED = ".orbax-checkpoint-tmp"  # of a directory that orbax too takes for an unfinished one
_ASIDE = f".replaced{UNFINISHED}"
_LOOKS = 100  # at a directory in which something moves
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # pathlib has made one slash of two
_RECORD = re.compile(r"saved-(\d+)-after-(\d+)\.json")


class Saved(NamedTuple):
    """A checkpoint, by the names of its files alone."""

    step: int  # whose it is
    number: int | None  # counts the saves into this directory, from 1; None: its record is gone
    after: int  # the number of the one that the job had saved or restored before; 0: none


def absolute(path: str | os.PathLike[str]) -> Path:
    """The directory of a run's checkpoints, or of one."""
    if not os.fspath(path):
        raise ValueError("the path of the checkpoints is empty: give a directory ('.' is the current one)")
    if _URL.match(str(path)):
        raise ValueError(
            f"{path} looks like a URL, and checkpoints are in directories of a file system only: mount it, or save "
            "into a directory that all processes share, and copy (of a local directory give the absolute path)"
        )
    return Path(path).expanduser().absolute()


def obstacle(path: Path) -> str:
    """What is in the place of a directory, or of one above it; "": nothing."""
    place = next((p for p in (*reversed(path.parents), path) if not p.is_dir()), None)
    if place is None:
        return ""
    if not place.is_symlink():
        return f"{place} is not a directory" if place.exists() else ""
    try:
        place.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"{place} is a symbolic link that leads in a circle"
        return f"{place} is a symbolic link to {place.readlink()}, which does not exist"
    return f"{place} is a symbolic link to {place.readlink()}, which is not a directory"


def aside(final: Path) -> Path:
    """Where a checkpoint is for the moment in which another one takes its name."""
    return final.with_name(f"{final.name}{_ASIDE}")


def checkpoint_of(final: Path) -> Path:
    """The directory of one step; where a save was killed while it replaced that step, of the old one."""
    return aside(final) if aside(final).is_dir() and not final.is_dir() else final


def saved(path: Path) -> list[Saved]:
    """The checkpoints in a directory, in the order in which they were saved; last those of which that is not known.

    A job may be saving into it, which renames and removes some: it is read again until nothing moved meanwhile.
    """
    found: list[Saved | None] = []
    for _ in range(_LOOKS):
        steps, found, moved = _steps(path), [], False
        for step in steps:
            try:
                found.append(look(checkpoint_of(path / str(step)), step))
            except FileNotFoundError:
                moved = True
        if not moved and _steps(path) == steps:
            break
        time.sleep(0.001)
    return sorted((s for s in found if s is not None), key=lambda s: (s.number is None, s.number or 0, s.step))


def _steps(path: Path) -> set[int]:
    try:
        names = {p.name.removesuffix(_ASIDE) for p in path.iterdir() if p.is_dir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {int(name) for name in names if name.isdecimal() and str(int(name)) == name}


def identity(directory: Path) -> tuple[Any, ...] | None:
    """Changes when the checkpoint in a directory is removed or renamed, another takes its name, or files in it go."""
    try:
        about = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return directory, about.st_dev, about.st_ino, about.st_mtime_ns


def look(directory: Path, step: int) -> Saved | None:
    """Which checkpoint a directory holds; None: it is someone else's."""
    before, names = identity(directory), [p.name for p in directory.iterdir()]
    if identity(directory) != before:
        raise FileNotFoundError(f"{directory} was removed, renamed or changed while its files were listed")
    records = [m for m in map(_RECORD.fullmatch, names) if m]
    if len(records) == 1:
        return Saved(step, int(records[0][1]), int(records[0][2]))
    return Saved(step, None, 0) if records or ITEM in names else None


def record_name(number: int, after: int) -> str:
    """The file in a checkpoint's directory that says what is in it (`jaxdist.checkpoint.record`)."""
    return f"saved-{number}-after-{after}.json"


def too_many(there: list[Saved], keep: int) -> list[Saved]:
    """Which to remove so that `keep` are left of those whose order is known; never the one that was saved last.

    First those that the last one does not descend from: they were left when the job went back to an earlier checkpoint,
    or began anew. Then its own ancestors. Of each kind those that were saved first.
    """
    known = [s for s in there if s.number is not None]
    if not known:
        return []
    by_number = {s.number: s for s in known}
    line, at = set(), known[-1]
    while at is not None:
        line.add(at.number)
        at = by_number.get(at.after) if at.after < (at.number or 0) else None
    first = [s for s in known if s.number not in line] + [s for s in known[:-1] if s.number in line]
    return first[: max(0, len(known) - keep)]


def remove(directory: Path) -> None:
    """Remove a checkpoint; what is half removed is not to be found."""
    gone = directory.with_name(f"{directory.name}.removed{UNFINISHED}")
    directory.rename(gone)
    shutil.rmtree(gone)


def sync_to_disk(directory: Path) -> None:
    """A rename outlives the machine only when its directory is written."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
