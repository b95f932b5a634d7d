"""Orbax's writer of trees, which takes a second to import; with one error where it would show many."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import plain
from jaxdist.errors import CheckpointError


def write(tree: dict[str, Any], directory: Path, rank: int) -> None:
    """Write this process's part of a checkpoint into a folder that exists."""
    import orbax.checkpoint as ocp

    _show_one_error()
    # Orbax has the other processes wait ten minutes for the root to make this folder, which it never does if its own
    # part has failed.
    (directory / "array_metadatas").mkdir(exist_ok=True)
    descriptor, folder = plain.opened(directory)
    _handler(rank).save(_epath(folder), args=ocp.args.PyTreeSave(tree))
    os.close(descriptor)  # not after an error: writes may still be under way, and would go to what has the number next


def finalize(directory: Path) -> None:
    """Make one database of the arrays that the processes have written."""
    descriptor, folder = plain.opened(directory)
    _handler(0).finalize(_epath(folder))
    os.close(descriptor)
    if not (directory / "manifest.ocdbt").exists():  # orbax has found nothing, which is no error to it
        raise CheckpointError(f"the arrays of all ranks are not in {directory}: do all ranks see the same directory?")


def _handler(rank: int) -> Any:
    """Told that this process is alone: no barriers. The root writes metadata."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={rank}, barrier_sync_key_prefix=f"rank{rank}"
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)


def _epath(path: Path) -> Any:
    from etils import epath

    return epath.Path(path)


@functools.cache
def _show_one_error() -> None:
    """When a write fails (a full disk), that is raised; all else that orbax and tensorstore print is about the same.

    Orbax logs the traceback in each of its threads, leaves the tasks of the other writes that failed to asyncio, and
    closes its event loop, which tensorstore then can't tell of the end of each other write: a traceback an array.
    """
    logging.getLogger("absl").addFilter(lambda line: "_SignalingThread.run() raised" not in line.getMessage())
    logging.getLogger("asyncio").addFilter(lambda line: not _is_left_by_orbax(line))
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            frames = traceback.extract_tb(unraisable.exc_traceback)
            if frames and frames[0].name == "call_soon_threadsafe":  # called by native code: no task of the user's
                return
        before(unraisable)

    sys.unraisablehook = hook


def _is_left_by_orbax(line: logging.LogRecord) -> bool:
    """Whether asyncio tells of a task's error that nobody has asked for, and the task was one of orbax's."""
    if "never retrieved" not in line.getMessage() or not line.exc_info or line.exc_info[2] is None:
        return False
    return any("orbax" in Path(frame.filename).parts for frame in traceback.extract_tb(line.exc_info[2]))
