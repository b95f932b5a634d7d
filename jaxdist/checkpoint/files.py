"""The directory of a run's checkpoints, and orbax's reader and writer of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ITEM = "default"  # what orbax's CheckpointManager calls the only item of a step
UNFINISHED = ".orbax-checkpoint-tmp"  # of a directory that orbax too takes for an unfinished one
_ASIDE = f".replaced{UNFINISHED}"


def absolute(path: str | os.PathLike[str]) -> Path:
    """The directory of a run's checkpoints, or of one."""
    return Path(path).expanduser().absolute()


def aside(final: Path) -> Path:
    """Where a checkpoint is for the moment in which another one takes its name."""
    return final.with_name(f"{final.name}{_ASIDE}")


def checkpoint_of(path: Path, step: int) -> Path:
    """The directory of one step; where a save was killed while it replaced that step, of the old one."""
    final = path / str(step)
    return aside(final) if aside(final).is_dir() and not final.is_dir() else final


def steps(path: Path) -> list[int]:
    """Of which there are whole checkpoints, in order."""
    if not path.is_dir():
        return []
    names = {p.name.removesuffix(_ASIDE) for p in path.iterdir() if (p / ITEM).is_dir()}
    return sorted(int(name) for name in names if name.isdecimal())


# --- orbax, which takes a second to import


def orbax_handler(rank: int) -> Any:
    """Orbax's reader and writer of trees, told that this process is alone: no barriers. The root writes metadata."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={rank}, barrier_sync_key_prefix=f"rank{rank}"
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)


def as_epath(path: Path) -> Any:
    """As orbax wants its paths."""
    from etils import epath

    return epath.Path(path)
