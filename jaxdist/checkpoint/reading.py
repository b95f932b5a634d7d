"""`restore` and `latest_step`: find a checkpoint, and read it onto the devices that are there now."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.checkpoint import history, record
from jaxdist.checkpoint.agreement import brief
from jaxdist.checkpoint.arrays import ArrayReader, damaged
from jaxdist.checkpoint.background import await_pending
from jaxdist.checkpoint.checksum import MODULUS, checksum
from jaxdist.checkpoint.files import ITEM, Saved, absolute, checkpoint_of, identity, saved
from jaxdist.checkpoint.leaves import named
from jaxdist.checkpoint.like import Leaves, check_kinds, check_leaf, cut, on_mesh, placed
from jaxdist.checkpoint.record import DamagedError, Record, unreadable
from jaxdist.compat import under_no_mesh
from jaxdist.errors import CheckpointError
from jaxdist.extras import need
from jaxdist.runtime.context import Context, get_context
from jaxdist.tracebacks import api_boundary

T = TypeVar("T")
# A damaged one may be passed over: it is last.
_ERRORS = CheckpointError, TypeError, ValueError, FileNotFoundError, DamagedError, ImportError
_SAME = "Restore the same step on every rank"
_AGAIN, _FOR = 10, 30.0  # how often, and for how many seconds at least, what has moved away is looked for again


@api_boundary
@under_no_mesh
def restore(path: str | os.PathLike[str], like: T, step: int | None = None) -> T:
    """Read a checkpoint; every process calls it.

    What is read is compared with the checksums that were saved with it. Without `step`, a checkpoint that is damaged is
    passed over: the root says so on stderr, and the next `save` renames it (``15.damaged``).

    Args:
      path: as given to `save`.
      like: a state with the structure, shapes and dtypes of the saved one: a new one, one that a step has returned, or
        one of ``jax.eval_shape``. Its values are not used.
      step: of the checkpoint; default: the one that was saved last, or the one before where that is damaged.

    Returns:
      The state. Leaves whose counterpart in `like` lies on the mesh (a state that a step has returned, `shard`) are
      read into that place, each process its own shards; the others are on this process as they are in `like`:
      jax arrays on the default device, numpy arrays, numbers.

    Raises:
      FileNotFoundError: no such checkpoint, or no checkpoint at all, or it was removed while it was being read.
      CheckpointError: on every rank: it is of another model (names the first leaf that differs), or the one of `step`,
        or each, is damaged (names the leaf and the file), or the system can't read it (too many open files, say), which
        is never passed over.
      TypeError: a leaf of `like` that no checkpoint has.
      ValueError: a path that is empty or a URL; a `like` that contains itself.
      ImportError: (on every rank) tensorstore, which orbax brings, is not installed.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.arange(3.0)}, step=10)
      >>> jaxdist.restore(path, {"w": jnp.zeros(3)})["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    ctx = get_context()
    await_pending()
    root = absolute(path)
    passed: list[tuple[Saved, str]] = []  # damaged ones, and how
    moved: list[Path] = []  # removed or replaced, by the job that saves, while they were read
    end = time.monotonic() + _FOR
    while True:
        choose = functools.partial(_choose, ctx, root, step, like, [s for s, _ in passed], moved, end)
        try:
            _, choices = on_every_rank(ctx, "restore", choose, raises=_ERRORS, advice=lambda _: _SAME)
        except FileNotFoundError as error:
            if not passed:
                raise
            all_of_them = "; ".join(f"step {s.step}: {text}" for s, text in passed)
            raise CheckpointError(f"{error} that is complete: {all_of_them}") from None
        wanted, name, place = choices[0]
        directory = root / name
        read = functools.partial(_read_own, ctx, directory, wanted, like)
        try:
            # Reading may take a while longer on one rank than on another: as long as they live.
            (state, leaves), shares = on_every_rank(ctx, "restore", read, raises=_ERRORS, patient=True)
            _check_shares(directory, leaves, shares)
        except (DamagedError, FileNotFoundError) as error:
            there = functools.partial(_is_there, ctx, root, wanted, place)
            if not on_every_rank(ctx, "restore", there, raises=_ERRORS)[1][0]:
                moved.append(directory)
                continue
            if not isinstance(error, DamagedError):
                raise
            if step is not None:
                raise CheckpointError(f"{error}. {_elsewhere(root, wanted)}") from None
            passed.append((wanted, str(error)))
            continue
        if ctx.is_root:
            for damaged, text in passed:
                ctx.control.say(f"step {damaged.step} is passed over, going on from step {wanted.step}: {text}")
            history.at(root, wanted, [s for s, _ in passed])
        return state


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The step that was saved last, by this job or another, as the names of the files say; no data are read.

    After going back (restoring 10 of 10, 20, 30) that is 30 until the next `save`, and then the one it saves, whatever
    its number. A checkpoint without a record, which is damaged, counts as the last. Waits for a save in the background.

    Args:
      path: as given to `save`.

    Returns:
      None if there is none, or no such directory.

    Raises:
      CheckpointError: the last save, in the background, has failed.

    Example:
      >>> import jaxdist
      >>> jaxdist.latest_step("no/such/directory") is None
      True
    """
    await_pending()
    complete = saved(absolute(path))
    return complete[-1].step if complete else None


def read_all(path: str | os.PathLike[str]) -> tuple[Path, dict[str, np.ndarray | str]]:
    """Every leaf of one checkpoint by its name, as arrays of the host; for export. Of one process, without `init`."""
    need("tensorstore", "jaxdist export")
    path, moved, end = absolute(path), [], time.monotonic() + _FOR
    while True:
        last = [] if (checkpoint_of(path) / ITEM).is_dir() else saved(path)
        final = path / str(last[-1].step) if last else path
        directory = checkpoint_of(final)
        place = identity(directory)
        try:
            found = record.of(directory)
            if found is None and moved:
                raise FileNotFoundError(f"checkpoint {moved[-1]} was removed while it was being read")
            if found is None:
                raise FileNotFoundError(f"{path} is not a checkpoint: expected a step, such as run/checkpoints/100")
            record.check_files(directory, found)
            values = _arrays(directory, found.arrays, dict.fromkeys(found.arrays), {})
        except (DamagedError, FileNotFoundError):
            if identity(checkpoint_of(final)) == place and not (last and place is None):
                raise
            moved.append(directory)
            _give_up(moved, end)
            continue
        leaves = found.leaves.items()
        return directory, {".".join(k): values[k][0] if k in values else str(leaf.value) for k, leaf in leaves}


def _give_up(moved: list[Path], end: float) -> None:
    if len(moved) > _AGAIN and time.monotonic() > end:
        raise CheckpointError(
            f"checkpoint {moved[-1]} was removed or replaced while it was being read, as were {len(moved) - 1} before "
            "it: the job that saves there removes them faster than they can be read. Let it keep more: save(..., keep=)"
        )


def _choose(
    ctx: Context, root: Path, step: int | None, like: Any, passed: list[Saved], moved: list[Path], end: float,
) -> Part[None]:  # fmt: skip
    """The root tells which checkpoint to read, where it is and how to know it again."""
    need("tensorstore", "jaxdist.restore")
    check_kinds(like)
    asked = (("the step", str(step)),)
    if not ctx.is_root:
        return Part(None, asked)
    _give_up(moved, end)
    all_of_them = saved(root)
    there = [s for s in all_of_them if s not in passed and step in (None, s.step)]
    if not there:
        if step is None:
            raise FileNotFoundError(f"there is no checkpoint in {root}")
        others = f"there: {', '.join(str(s.step) for s in all_of_them) or 'none'}"
        if moved:
            raise FileNotFoundError(f"checkpoint {moved[-1]} was removed while it was being read; {others}")
        raise FileNotFoundError(f"there is no checkpoint of step {step} in {root}; {others}")
    directory = checkpoint_of(root / str(there[-1].step))
    return Part(None, asked, (there[-1], directory.name, identity(directory)))


def _is_there(ctx: Context, root: Path, wanted: Saved, place: Any) -> Part[None]:
    """The root tells whether a checkpoint that could not be read is still where it was."""
    same = ctx.is_root and identity(checkpoint_of(root / str(wanted.step))) == place
    return Part(None, told=same and wanted in saved(root))


def _elsewhere(root: Path, damaged: Saved) -> str:
    others = [s.step for s in saved(root) if s != damaged]
    if not others:
        return "There is no other step"
    return f"Other steps: {others}; name one, or none: then the newest that is whole is restored"


_OTHER_BITS = "has other bits than were saved"


def _read_own(ctx: Context, directory: Path, wanted: Saved, like: Any) -> Part[tuple[Any, Leaves]]:
    """What this rank reads of a checkpoint."""
    try:
        if not directory.is_dir():
            raise FileNotFoundError(
                f"{socket.gethostname()} does not see checkpoint {directory}, which rank 0 sees: all processes have to "
                "see the directory"
            )
        found = record.read(directory, wanted)
        if ctx.is_root:
            record.check_files(directory, found)
        shares: dict[tuple[str, ...], int] = {}
        return Part((_read(directory, found, like, shares), found.leaves), told=shares)
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:
        if not isinstance(error, MemoryError):
            raise unreadable(f"checkpoint {directory}", error) from error
        raise CheckpointError(f"checkpoint {directory} can't be read: MemoryError: {brief(error)}") from error


def _read(directory: Path, found: Record, like: Any, shares: dict[tuple[str, ...], int]) -> Any:
    names, leaves = named(like)
    for name, x in zip(names, leaves, strict=True):
        check_leaf(directory, name, x, found.leaves)
    known = set(names)
    if extra := [name for name in found.leaves if name not in known]:
        raise CheckpointError(f"checkpoint {directory} has a leaf {'.'.join(extra[0])} that `like` has not")
    places = {name: on_mesh(x) for name, x in zip(names, leaves, strict=True)}
    values = _arrays(directory, found.arrays, places, shares)
    out: list[Any] = []
    for name, x in zip(names, leaves, strict=True):
        leaf = found.leaves[name]
        out.append(type(x)(leaf.value) if leaf.dtype == "str" else placed(values[name], x, leaf, places[name]))
    return jax.tree.unflatten(jax.tree.structure(like), out)


def _arrays(
    directory: Path,
    leaves: Leaves,
    places: dict[tuple[str, ...], Any],
    shares: dict[tuple[str, ...], int],
) -> dict[tuple[str, ...], list[np.ndarray]]:
    """The slices of arrays that this process needs (`cut`), compared with their checksums."""
    values: dict[tuple[str, ...], list[np.ndarray]] = {}
    reads: dict[tuple[str, ...], Callable[[], list[np.ndarray]]] = {}
    with ArrayReader(directory, ITEM) as reader:
        opened = {name: reader.open(name) for name in leaves}
        for name, leaf in leaves.items():
            reads[name] = reader.read(name, leaf, opened.pop(name), list(cut(places[name], leaf.shape)[0]))
        for name, leaf in leaves.items():
            bounds, counts, alone = cut(places[name], leaf.shape)
            values[name] = blocks = reads.pop(name)()
            each = zip(bounds, counts, blocks, strict=True)
            sums = (checksum(x.astype(leaf.dtype, copy=False), [a for a, _ in b]) for b, own, x in each if own)
            share = sum(sums) % MODULUS
            if not alone:
                shares[name] = share
            elif share != leaf.value:
                raise damaged(directory, ITEM, name, _OTHER_BITS)
    return values


def _check_shares(directory: Path, leaves: Leaves, shares: list[dict[tuple[str, ...], int]]) -> None:
    """Compare the checksums of arrays of which each rank has read a part."""
    for name in shares[0]:
        if sum(s.get(name, 0) for s in shares) % MODULUS != leaves[name].value:
            raise damaged(directory, ITEM, name, _OTHER_BITS)
