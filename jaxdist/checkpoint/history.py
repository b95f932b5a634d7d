"""Which checkpoint of a directory this job is at, and which it found damaged; known to the root."""

from __future__ import annotations

from pathlib import Path

from jaxdist.checkpoint.files import Saved

_at: dict[Path, int] = {}
_damaged: dict[Path, list[Saved]] = {}


def at(path: Path, saved: Saved, damaged: list[Saved] | None = None) -> None:
    """The job has saved or restored this one; newer ones were damaged."""
    _at[path.resolve()] = saved.number or 0
    _damaged[path.resolve()] = damaged or []


def position(path: Path) -> int:
    """The number of the checkpoint that the job saved or restored last; 0: none in this directory."""
    return _at.get(path.resolve(), 0)


def set_aside(path: Path, there: list[Saved]) -> None:
    """Rename the damaged checkpoints that a restore went past: the job will come to their steps again."""
    for saved in _damaged.pop(path.resolve(), []):
        if saved not in there:
            continue  # someone has seen to it
        directory, n = path / str(saved.step), 1
        while (aside := path / f"{saved.step}.damaged{f'-{n}' if n > 1 else ''}").exists():
            n += 1
        directory.rename(aside)
