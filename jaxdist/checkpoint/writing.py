"""`save`: write a checkpoint, and give it its name when all of it is there."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.checkpoint.agreement import Agreement, await_pending, raise_first
from jaxdist.checkpoint.files import ITEM, UNFINISHED, absolute, as_epath, aside, checkpoint_of, orbax_handler, steps
from jaxdist.checkpoint.leaves import PYTHON, is_key, kind, named, nested
from jaxdist.context import Context, get_context
from jaxdist.errors import CheckpointError
from jaxdist.step.layouts import Padded
from jaxdist.zero import unshard


class Saving:
    """A checkpoint on its way to the disk.

    Attributes:
      step: whose it is.
    """

    def __init__(self, step: int):
        self.step = step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        """Return when the checkpoint is whole and on disk, on every rank.

        Raises:
          CheckpointError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def _run(self, write: Callable[[], None], background: bool) -> None:
        if not background:
            write()
            return

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised by wait()
                self._error = error

        # Not a daemon: a script that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=run, name="jaxdist-save")
        self._thread.start()


def save(
    path: str | os.PathLike[str],
    state: Any,
    step: int,
    *,
    wait: bool = True,
    keep: int | None = None,
    overwrite: bool = False,
) -> Saving:
    """Write a checkpoint; every process calls it.

    Arrays have their logical shapes on disk, whatever the number of devices, the ZeRO level and the communicator.
    Shards are written by the processes that hold them, everything else by the root. A save that fails or is killed
    leaves all earlier checkpoints as they are.

    Args:
      path: directory of the checkpoints of one run, on a file system that all processes share.
      state: any pytree of arrays of any kind (of a step, of the host, PRNG keys), numbers and strings: parameters,
        the optimizer's state, that of a `loader`, …
      step: its name, 0 or more.
      wait: False: return as soon as the state is copied, and write in the background. Training may go on and donate
        the state; the next `save` waits for this one, and so does the end of the script.
      keep: remove the oldest checkpoints but for the last `keep`; None: keep all.
      overwrite: replace a checkpoint of that step, if there is one.

    Returns:
      What can be waited for.

    Raises:
      CheckpointError: on every rank: it could not be written (by which rank, and why), or an earlier one could not
        that was written in the background.
      FileExistsError: there is a checkpoint of this step.
      TypeError: a leaf that can't be saved.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.arange(3.0), "epoch": 1}, step=10)
      >>> jaxdist.latest_step(path)
      10
      >>> jaxdist.restore(path, {"w": jnp.zeros(3), "epoch": 0})["epoch"]
      1

    References:
      Orbax, *PyTreeCheckpointHandler*: the format of the files. ``orbax.checkpoint.CheckpointManager(path)`` reads
      them.
    """
    ctx = get_context()
    await_pending(ctx)
    names, leaves = named(state)
    final = absolute(path) / str(step)
    temporary = final.with_name(final.name + UNFINISHED)
    problem = _bad_call(names, leaves, step, keep)
    if problem is None and ctx.is_root:
        problem = _make_room(final, temporary, overwrite)
    shapes = [(n, kind(x)) for n, x in zip(names, leaves, strict=True)] if problem is None else []
    mine = (str(final), zlib.crc32(repr(shapes).encode()), problem, secrets.token_hex(8))
    said = ctx.control.exchange("save", mine, ctx.timeout)
    raise_first(ctx, [s[2] for s in said])
    for what, values in (("directories or steps", [s[0] for s in said]), ("states", [s[1] for s in said])):
        if len(set(values)) > 1:
            odd = next(r for r, v in enumerate(values) if v != values[0])
            shown = f": {values[0]} on rank 0, {values[odd]} on rank {odd}" if what != "states" else ""
            raise CheckpointError(f"rank {ctx.rank}: the ranks save different {what}{shown}")

    whole, shards, notes = _parts(ctx, names, leaves, copy=not wait)

    def write() -> None:
        agree = Agreement(ctx, said[0][3])
        failed = f"checkpoint {final} was not written, earlier ones are as they were"
        agree(lambda: _write(ctx, temporary / ITEM, whole if ctx.is_root else shards, notes), failed, undo=temporary)
        agree(lambda: _publish(temporary, final, keep) if ctx.is_root else None, failed, undo=temporary)

    saving = Saving(step)
    saving._run(write, background=not wait)
    if not wait:
        ctx.saving = saving
    return saving


def _bad_call(names: list[tuple[str, ...]], leaves: list[Any], step: Any, keep: Any) -> Exception | None:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        return ValueError(f"save(step={step!r}): a checkpoint is named by an integer, 0 or more")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        return ValueError(f"save(keep={keep!r}): a number of checkpoints, 1 or more, or None for all")
    if not leaves:
        return ValueError("the state has no leaves: there is nothing to save")
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, str) or type(x) in PYTHON:
            continue
        if not hasattr(x, "dtype") or not hasattr(x, "shape") or x.dtype == object:
            return TypeError(f"leaf {'.'.join(name)} can't be saved: {type(x).__name__} is no array, number or string")
        if hasattr(x, "is_deleted") and x.is_deleted():
            return ValueError(f"leaf {'.'.join(name)} was donated to a step: save what the step has returned")
    joined = [".".join(name) for name in names]
    for a, b in itertools.pairwise(sorted(joined)):
        if a == b:
            return ValueError(f"two leaves would both be named {a} on disk: keep dots out of one of the keys")
    return None


def _parts(
    ctx: Context, names: list[tuple[str, ...]], leaves: list[Any], copy: bool
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What the root writes, what the other ranks do, and what orbax has no place for."""
    whole: list[Any] = []
    x: Any
    shards: list[tuple[tuple[str, ...], Any]] = []
    notes: dict[str, Any] = {"empty": {}, "keys": {}}
    kept: list[tuple[str, ...]] = []
    for name, x in zip(names, leaves, strict=True):
        if is_key(x):
            notes["keys"][".".join(name)] = str(jax.random.key_impl(x))
            x = jax.random.key_data(x)
        if not isinstance(x, str) and np.size(x) == 0:
            notes["empty"][".".join(name)] = (list(np.shape(x)), str(x.dtype))  # orbax refuses them
            continue
        if type(x) is Padded:
            x = np.asarray(unshard(x)) if ctx.size > 1 else np.asarray(x)
        in_shards = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and not x.is_fully_replicated
        if in_shards:
            x = _copied(x) if copy else x
            shards.append((name, x))
        elif ctx.is_root and isinstance(x, jax.Array):
            x = np.array(x.addressable_data(0), copy=copy or None)
        elif ctx.is_root and not isinstance(x, str):
            x = np.array(x, copy=copy or None)
        kept.append(name)
        whole.append(x)
    return nested(kept, whole), nested(*map(list, zip(*shards, strict=True))) if shards else {}, notes


def _copied(x: Any) -> jax.Array:
    """Without a program of all processes, as which jnp.copy would run."""
    return jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [jnp.copy(s.data) for s in x.addressable_shards]
    )


def _write(ctx: Context, directory: Path, tree: dict[str, Any], notes: dict[str, Any]) -> None:
    if tree:
        import orbax.checkpoint as ocp

        arguments = ocp.args.PyTreeSave(tree, custom_metadata={"jaxdist": notes})
        orbax_handler(ctx.rank).save(as_epath(directory), args=arguments)


def _make_room(final: Path, temporary: Path, overwrite: bool) -> Exception | None:
    """The root's: an empty directory to write into."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for step in steps(final.parent):
            if (whole := checkpoint_of(final.parent, step)).name != str(step):
                whole.rename(final.with_name(str(step)))
        if final.exists() and not overwrite:
            return FileExistsError(
                f"there is a checkpoint of this step, {final}: restore it, save into another directory, or replace it "
                "with overwrite=True"
            )
        for left in final.parent.glob(f"*{UNFINISHED}"):  # of jobs that were killed
            shutil.rmtree(left)
        (temporary / ITEM).mkdir(parents=True)
    except OSError as error:
        return CheckpointError(f"can't write into {final.parent}: {error.strerror or error}")
    return None


def _publish(temporary: Path, final: Path, keep: int | None) -> None:
    """The root's: all parts are there; give them the name that readers look for."""
    orbax_handler(0).finalize(as_epath(temporary / ITEM))
    if final.exists():
        final.rename(aside(final))  # killed here: `checkpoint_of` finds it
        temporary.rename(final)
        shutil.rmtree(aside(final))
    else:
        temporary.rename(final)
    _sync_to_disk(final.parent)
    for old in steps(final.parent)[: -keep or None] if keep else []:
        gone = final.with_name(f"{old}{UNFINISHED}")
        (final.parent / str(old)).rename(gone)  # what is half removed is not to be found
        shutil.rmtree(gone)


def _sync_to_disk(directory: Path) -> None:
    """A rename outlives the machine only when its directory is written."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
