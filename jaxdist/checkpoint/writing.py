"""`save`: write a checkpoint, in the background if asked, and give it its name once all of it is on disk."""

import functools
import math
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist import compat
from jaxdist.agreement.description import list_ranks, unlike_the_root
from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.checkpoint import arrays, directory, manifest
from jaxdist.checkpoint.checksum import Checksums, checksums, total
from jaxdist.checkpoint.manifest import PYTHON, Leaf, Name, kind_of, named, on_host, refusal, stored_form
from jaxdist.compat import under_no_mesh
from jaxdist.compilation.signature import is_keys
from jaxdist.control import failfast
from jaxdist.errors import CheckpointError, in_words
from jaxdist.extras import need
from jaxdist.placements.model.layouts import Padded, copied, physical
from jaxdist.runtime.context import Context, get_context
from jaxdist.tracebacks import api_boundary

_REMIND_SECONDS = 30.0
_pending: "Saving | None" = None
_Parts = dict[Name, tuple[Leaf, Any]]  # see `_part`


class Saving:
    """A checkpoint that is being written, by a thread."""

    def __init__(self, step: int, write: Callable[[], None]):
        self.step = step
        self._told = False
        executor = futures.ThreadPoolExecutor(1, "jaxdist-save")
        self._end = executor.submit(write)
        executor.shutdown(wait=False)  # its thread ends after the write

    @api_boundary
    def wait(self) -> None:
        """Return when the checkpoint is complete and on disk everywhere; raise its error, once."""
        seconds = _REMIND_SECONDS
        while not futures.wait([self._end], seconds).done:
            get_context().control.say(f"save: step {self.step} is still being written, here or on a slower rank")
            seconds *= 2
        if (error := self._end.exception()) and not self._told:
            self._told = True
            raise error.with_traceback(None)


def await_pending() -> None:
    """Wait for the save in the background, if any, and raise its error."""
    if _pending is not None:
        _pending.wait()


@functools.cache
def _at_exit(ctx: Context) -> None:
    """Make the end of the script wait for the last save, and fail if that failed."""
    # Import here, since modules can no longer register exit handlers in the thread.
    import orbax.checkpoint  # noqa: F401

    def end() -> None:
        if not ctx.control.is_owner():  # a forked child, in which no thread writes
            return
        try:
            await_pending()
        except BaseException as error:
            failfast.end(ctx.control, CheckpointError(f"the script ended, but its last save had failed: {error}"))

    compat.before_threads_end(end)


@api_boundary
@under_no_mesh
def save(path: str | os.PathLike[str], state: Any, step: int, *, wait: bool = True, keep: int | None = None) -> Saving:
    """Write a checkpoint, for any number of devices and ZeRO level; every process calls it and writes its own shards.

    If a save fails or is killed, earlier checkpoints stay unchanged. A job owns the directory until its end.

    Args:
      path: the directory of one run's checkpoints, on a file system that all processes share.
      state: any pytree of arrays (JAX's, NumPy's, PRNG keys), numbers, and strings, such as a `loader`'s state.
      step: the name of the checkpoint, 0 or more. The highest step is the latest checkpoint.
      wait: if False, copy the state and write in the background. The next `save` and the end of the script wait.
      keep: the number of checkpoints to keep: this one and the highest others. None keeps all.

    Returns:
      The write in progress; its ``wait()`` returns when the checkpoint is on disk, and raises its error.

    Raises:
      CheckpointError: (on every rank) writing failed, of this checkpoint or of an earlier one in the background, a
        different job owns the directory, or the ranks' states differ.
      FileExistsError: a checkpoint of this step exists.
      TypeError: a leaf cannot be restored unchanged.
      ValueError: an argument is invalid.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.arange(3.0), "epoch": 1}, step=10)
      >>> jaxdist.restore(path, {"w": jnp.zeros(3), "epoch": 0})["epoch"]
      1
    """
    ctx = get_context()
    await_pending()

    def prepare() -> Part[tuple[Path, dict[Name, Any]]]:
        need("orbax.checkpoint", "jaxdist.save")
        final, leaves = directory.absolute(path) / str(step), named(state)
        _check(leaves, step, keep)
        if ctx.is_root:
            _make_ready(final)
        kinds = [(f"leaf {'.'.join(name)}", kind_of(x)) for name, x in leaves.items()]
        asked = ("the checkpoint", str(final)), ("keep", str(keep)), *kinds
        return Part((final, leaves), asked, secrets.token_hex(8))

    errors, advice = (CheckpointError, FileExistsError, ValueError, TypeError, ImportError), "Pass the same everywhere"
    (final, leaves), tokens = on_every_rank(ctx, "save", prepare, raises=errors, advice=advice)
    parts, mistake = _Parts(), None
    try:
        _at_exit(ctx)
        parts = {name: _part(ctx, x, copy=not wait) for name, x in leaves.items()}
    except Exception as error:  # told to the other ranks, which wait for this one from here on
        mistake = error.with_traceback(None)  # whose frames have copies of the state
    token, unchanged = tokens[0], f"checkpoint {final} was not written (earlier ones are unchanged)"
    # A new name, so leftovers of a killed job do not matter.
    temporary = final.with_name(f"{step}.{token}{directory.UNFINISHED}")

    def write() -> None:
        on_each = functools.partial(_on_every_rank_by_mail, ctx, unchanged)
        try:
            item = temporary / directory.ITEM
            told = on_each(f"save/{token}/write", lambda: _write(ctx, item, parts, mistake))
            conclude = lambda: _conclude(temporary, final, parts, told) if ctx.is_root else None
            on_each(f"save/{token}/conclude", conclude)
        except BaseException as error:
            if ctx.is_root:
                shutil.rmtree(temporary, ignore_errors=True)
            if ctx.size > 1 and isinstance(error, CheckpointError):  # of all ranks
                raise error from None if isinstance(error.__cause__, CheckpointError) else error.__cause__
            raise CheckpointError(f"{unchanged}: {in_words(error)}") from error
        if ctx.is_root:
            directory.tidy(final, keep)

    global _pending
    saving = _pending = Saving(int(step), write)
    if wait:
        saving.wait()
    return saving


def _on_every_rank_by_mail(ctx: Context, unchanged: str, tag: str, work: Callable[[], Any]) -> list[Any]:
    """Run a part of a save on every rank, from a thread: the main one makes exchanges of its own meanwhile."""

    def exchange(mine: Any) -> list[Any]:
        ctx.control.put(tag, mine)
        # Without a limit: when a rank ends, the control channel ends this process.
        return [mine if rank == ctx.rank else ctx.control.take(tag, rank, None) for rank in range(ctx.size)]

    part = lambda: Part(None, told=work())
    return on_every_rank(ctx, unchanged, part, raises=(CheckpointError,), exchange=exchange)[1]


def _check(leaves: dict[Name, Any], step: Any, keep: Any) -> None:
    """Refuse what cannot be saved, before writing anything."""
    if not threading.main_thread().is_alive():
        raise CheckpointError("save: the script is over, and Python starts no more threads: call it before the end")
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"save(path, state, step={step!r:.60}): expected an integer, 0 or more")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"save(keep={keep!r}): expected 1 or more checkpoints, or None for all")
    if not leaves:
        raise ValueError("the state has no leaves to save")
    for name, x in leaves.items():
        if why := refusal(x):
            raise TypeError(f"leaf {'.'.join(name)} can't be saved: {why}")
        if isinstance(x, (jax.Array, Padded)) and x.is_deleted():
            raise ValueError(f"leaf {'.'.join(name)} was donated to a step: save the result of the step")


def _make_ready(final: Path) -> None:
    """Create the directory and lock it (root only)."""
    path = final.parent
    try:
        path.mkdir(parents=True, exist_ok=True)
        directory.lock(path)
    except OSError as error:
        raise CheckpointError(f"can't write into {path}: {error}") from error
    if os.path.lexists(final) and final.resolve() not in directory.passed_over:
        raise FileExistsError(f"{final} already exists: restore it, remove it, or save into a different directory")


def _part(ctx: Context, x: Any, copy: bool) -> tuple[Leaf, Any]:
    """Return a leaf with the array that this rank writes, whole or in part, or with its checksums if it writes none."""
    if type(x) in PYTHON:
        text = str(x) if isinstance(x, str) else x
        return Leaf(kind_of(x), text), {(): zlib.crc32(repr(text).encode())}
    key = str(jax.random.key_impl(x)) if is_keys(x) else None
    kind, weak, x = kind_of(x), bool(getattr(x, "weak_type", False)), stored_form(x)
    leaf = Leaf(kind, None, tuple(x.shape), np.dtype(x.dtype).name, 0, key, weak)
    array = physical(x)
    in_shards = isinstance(getattr(array, "sharding", None), NamedSharding) and not array.is_fully_replicated
    if in_shards and x.size and (ctx.size == 1 or not array.is_fully_addressable):
        return leaf, copied(array, array.sharding) if copy else array
    whole = on_host(x)
    if ctx.is_root and x.size:
        return leaf, np.array(whole, copy=copy or None)
    return leaf, checksums(whole, whole.shape)


def _write(ctx: Context, item: Path, parts: _Parts, mistake: Exception | None) -> list[Checksums]:
    """Write this rank's part, and return its checksums of each leaf; or raise the error that it has met before."""
    if mistake is not None:
        raise mistake
    mine = {name: x for name, (_, x) in parts.items() if not isinstance(x, dict)}
    item.mkdir(parents=True, exist_ok=True)
    if mine:
        arrays.write(mine, item, ctx.rank)
    return [x if isinstance(x, dict) else checksums(x, leaf.shape) for leaf, x in parts.values()]


def _conclude(temporary: Path, final: Path, parts: _Parts, told: list[list[Checksums]]) -> None:
    """Complete the checkpoint that all ranks have written, and give it its name (root only)."""
    leaves = dict[Name, Leaf]()
    for (name, (leaf, _)), of_ranks in zip(parts.items(), zip(*told, strict=True), strict=True):
        slices = {one for own in of_ranks for one in own.items()}
        if sum(math.prod(b - a for a, b in at) for at, _ in slices) != math.prod(leaf.shape):
            raise CheckpointError(
                f"leaf {'.'.join(name)} of rank {list_ranks(unlike_the_root(of_ranks))} differs from rank 0's. Compute "
                "per-rank values from ctx.rank after restore"
            )
        leaves[name] = leaf._replace(digest=total(of_ranks))
    mine = {name: x.shape for name, (_, x) in parts.items() if not isinstance(x, dict)}
    if mine:
        padded = {name: leaves[name].shape for name, shape in mine.items() if leaves[name].shape != shape}
        arrays.finalize(temporary / directory.ITEM, padded)
    manifest.write(temporary, int(final.name), leaves)
    directory.sync_to_disk(temporary)
    if os.path.lexists(final):  # a damaged one
        directory.discard(final)
    temporary.rename(final)
    directory.sync_to_disk(final.parent)
