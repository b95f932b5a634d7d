"""`save`: write a checkpoint, and give it its name when all of it is there."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.agreement.calls import CHANGED
from jaxdist.agreement.description import Description
from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.checkpoint import history, lock, orbax_writer, record
from jaxdist.checkpoint.agreement import together
from jaxdist.checkpoint.background import Saving, at_exit, await_pending
from jaxdist.checkpoint.checksum import MODULUS, checksum, share_of
from jaxdist.checkpoint.files import (
    ITEM,
    UNFINISHED,
    Saved,
    absolute,
    aside,
    checkpoint_of,
    obstacle,
    remove,
    saved,
    sync_to_disk,
    too_many,
)  # fmt: skip
from jaxdist.checkpoint.leaves import PYTHON, dtype_of, is_key, kind, named, nested, on_host, refusal
from jaxdist.checkpoint.record import LeafRecord
from jaxdist.compat import under_no_mesh
from jaxdist.errors import CheckpointError
from jaxdist.extras import need
from jaxdist.placements.layouts import Padded, copied
from jaxdist.runtime.context import Context, get_context
from jaxdist.tracebacks import api_boundary
from jaxdist.zero import unshard

_WHERE, _BY_ITSELF = "the checkpoint", ", which each rank has by itself,"
_A_COPY = ", an array of all ranks,"
_SHOWN = 60  # characters of a string in a message


@api_boundary
@under_no_mesh
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

    Arrays have their full shapes on disk, whatever the number of devices, the ZeRO level and the communicator. Each
    process writes its own shards, the root everything else. A save that fails or is killed leaves all earlier
    checkpoints as they are. From the first save to its end the job owns the directory: another job that saves into it
    gets an error.

    Args:
      path: directory of the checkpoints of one run, on a file system that all processes share.
      state: any pytree of arrays of any kind (of a step, of the host, PRNG keys), numbers and strings: parameters,
        the optimizer's state, that of a `loader`, … What would come back as something else is an error.
      step: its name, 0 or more.
      wait: False: return as soon as the state is copied, and write in the background. Training may go on and donate
        the state; the next `save` waits for this one, and so does the end of the script.
      keep: how many checkpoints to keep. The first to go are those that this one does not descend from (the job went
        back to an earlier one, or began anew), then the oldest. None: keep all.
      overwrite: replace a checkpoint of that step, if there is one.

    Returns:
      The write under way; its ``wait()`` returns when the checkpoint is there, and raises its error.

    Raises:
      CheckpointError: on every rank: it could not be written (by which rank, and why), or an earlier one could not
        that was written in the background; or another job saves into the directory; or the ranks' states differ.
      FileExistsError: there is a checkpoint of this step.
      TypeError: a leaf that can't be saved, of a dtype that the format has not, or a masked array.
      ValueError: an argument that can't be: a path that is empty or a URL, a state that contains itself, …
      ImportError: (on every rank) orbax is not installed.

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
    await_pending()

    def prepare() -> Part[tuple[Path, list[tuple[str, ...]], list[Any], Description]]:
        need("orbax.checkpoint", "jaxdist.save")
        final = absolute(path) / str(step)
        names, leaves = named(state)
        _check_call(names, leaves, step, keep)
        if ctx.is_root:
            _make_ready(ctx, final, overwrite)
        about = Description("save", _about(names, leaves) if ctx.size > 1 else ())
        told = secrets.token_hex(8), about.fingerprint
        asked = (_WHERE, str(final)), ("keep", str(keep)), ("overwrite", str(overwrite))
        return Part((final, names, leaves, about), asked, told)

    errors = CheckpointError, FileExistsError, ValueError, TypeError, ImportError
    (final, names, leaves, about), told = on_every_rank(ctx, "save", prepare, raises=errors, advice=_advice)
    if any(own[1] != told[0][1] for own in told):  # leaf by leaf only then: a state may have thousands
        on_every_rank(ctx, "save", lambda: Part(None, about.entries), raises=errors, advice=_advice)
    parts = _parts(ctx, names, leaves, copy=not wait)
    token = told[0][0]
    name = f"save/{token}"
    # Of its own: what a killed job has left is in nobody's way.
    temporary = final.with_name(f"{step}.{token}{UNFINISHED}")

    def conclude(sums: list[Any]) -> None:
        _publish(temporary, final, {part.name: part.leaf(sums) for part in parts}, keep)

    def write() -> None:
        failed = f"checkpoint {final} was not written (earlier ones are as they were)"
        try:
            together(ctx, f"checkpoint {final}", name, lambda: _write(ctx, temporary / ITEM, parts), conclude, failed)
        except BaseException:
            if ctx.is_root:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    at_exit(ctx)
    saving = Saving(int(step))
    saving._run(write, background=not wait)
    return saving


def _advice(entry: str) -> str:
    if entry == _WHERE:
        return "Save the same step into the same directory on every rank"
    if entry in ("keep", "overwrite"):
        return f"Give {entry}= alike on every rank: rank 0 alone would act on it"
    if entry.endswith(_A_COPY):
        return f"The copy of rank 0 alone would be saved. {CHANGED}"
    if not entry.endswith(_BY_ITSELF):
        return "Save a state of the same names, shapes and dtypes on every rank"
    return (
        "Its value on rank 0 alone would be saved. Did each rank train by itself, with a step that is not decorated "
        "with jaxdist.data_parallel? What is each rank's own (a key, say) can be made from ctx.rank after restore"
    )


def _check_call(names: list[tuple[str, ...]], leaves: list[Any], step: Any, keep: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        raise ValueError(f"save(step={step!r}): a checkpoint is named by an integer, 0 or more")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"save(keep={keep!r}): a number of checkpoints, 1 or more, or None for all")
    if not leaves:
        raise ValueError("the state has no leaves: there is nothing to save")
    joined = [".".join(name) for name in names]
    for name, x in zip(joined, leaves, strict=True):
        if why := refusal(x):
            raise TypeError(f"leaf {name} can't be saved: {why}")
        if type(x) is int and not -(2**63) <= x < 2**63:
            raise ValueError(f"leaf {name} can't be saved: {x} does not fit into 64 bits")
        if isinstance(x, (jax.Array, Padded)) and x.is_deleted():
            raise ValueError(f"leaf {name} was donated to a step: save what the step has returned")
        if name.endswith("/") or (isinstance(x, str) and "~" in name):
            raise ValueError(f"leaf {name} can't be saved: no name on disk ends with a slash, no string's has a ~")
        try:
            f"{name}{x if isinstance(x, str) else ''}".encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"leaf {name} can't be saved: its name or text is not UTF-8: {error}") from None
    for a, b in itertools.pairwise(sorted(joined)):
        if a == b:
            raise ValueError(f"two leaves would both be named {a} on disk: keep dots out of one of the keys")


def _about(names: list[tuple[str, ...]], leaves: list[Any]) -> tuple[tuple[str, str], ...]:
    """What has to be the same on every rank: the kinds of all leaves, and the values of those that each rank has."""
    labels = [f"leaf {'.'.join(name)}" for name in names]
    kinds = [(label, kind(x)) for label, x in zip(labels, leaves, strict=True)]
    own = [(f"{label}{_BY_ITSELF}", _value(x)) for label, x in zip(labels, leaves, strict=True) if _is_own(x)]
    copies = [
        (f"{label}{_A_COPY}", _value(x.addressable_data(0))) for label, x in zip(labels, leaves, strict=True)
        if isinstance(x, jax.Array) and not _is_own(x) and x.is_fully_replicated
    ]  # fmt: skip
    return (*kinds, *own, *copies)


def _is_own(x: Any) -> bool:
    """Whether the rank has it for itself, not as a part of an array of all ranks."""
    return not isinstance(x, (jax.Array, Padded)) or x.is_fully_addressable


def _value(x: Any) -> str:
    """A value for a message; others have other words, down to the last bit of an array."""
    if isinstance(x, str):
        return repr(x) if len(x) <= _SHOWN else f"{x[:_SHOWN]!r}… with CRC {zlib.crc32(x.encode()):08x}"
    if type(x) in PYTHON:
        return repr(x)
    value = on_host(jax.random.key_data(x) if is_key(x) else x)
    return f"{'an array' if value.ndim else value[()]} with checksum {checksum(value, (0,) * value.ndim):x}"


class _PendingLeaf(NamedTuple):
    """A leaf on its way to the disk."""

    name: tuple[str, ...]  # its keys
    value: Any  # what orbax is to write: an array, a string; None: nothing on this rank, or of an empty array
    shards: bool  # whether each rank writes its own shards; else the root writes it
    about: LeafRecord  # what the record will say, but for the checksum

    def share(self, root: bool) -> int:
        """This rank's share in the checksum."""
        if self.shards:
            return share_of(self.value)
        return checksum(self.value, (0,) * self.value.ndim) if root and isinstance(self.value, np.ndarray) else 0

    def leaf(self, sums: Sequence[dict[str, int]]) -> LeafRecord:
        """For the record, with what each rank has summed up."""
        if self.about.dtype == "str":
            return self.about
        return self.about._replace(value=sum(s.get(".".join(self.name), 0) for s in sums) % MODULUS)


def _parts(ctx: Context, names: list[tuple[str, ...]], leaves: list[Any], copy: bool) -> list[_PendingLeaf]:
    """What is to be written; copied, if the training goes on meanwhile."""
    parts = []
    x: Any
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, str):
            text = str(x)
            parts.append(_PendingLeaf(name, text if ctx.is_root else None, False, LeafRecord((), "str", text)))
            continue
        key = str(jax.random.key_impl(x)) if is_key(x) else None
        weak = bool(getattr(x, "weak_type", False))
        if key is not None:
            x = jax.random.key_data(x)
        if isinstance(x, Padded):
            x = np.asarray(unshard(x)) if ctx.size > 1 else np.asarray(x)
        whole = not isinstance(x, jax.Array) or x.is_fully_addressable
        shards = isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and not x.is_fully_replicated
        shards = shards and (ctx.size == 1 or not whole) and x.size > 0
        if shards:
            x = copied(x, x.sharding) if copy else x
        elif ctx.is_root:
            x = np.array(on_host(x if whole else x.addressable_data(0)), copy=copy or None)
        else:
            x = np.asarray(x) if type(x) in PYTHON else x
        about = LeafRecord(tuple(x.shape), dtype_of(x), 0, key, weak)
        parts.append(_PendingLeaf(name, x if (shards or ctx.is_root) and x.size else None, shards, about))
    return parts


def _write(ctx: Context, directory: Path, parts: list[_PendingLeaf]) -> dict[str, int]:
    """Write this rank's part; its shares in the checksums."""
    mine = [part for part in parts if part.value is not None]
    if ctx.is_root:
        for left in directory.parent.parent.glob(f"*{UNFINISHED}"):  # of jobs that were killed
            if left != directory.parent:
                shutil.rmtree(left)
    directory.mkdir(parents=True, exist_ok=True)
    if mine:
        orbax_writer.write(nested([part.name for part in mine], [part.value for part in mine]), directory, ctx.rank)
    return {".".join(part.name): part.share(ctx.is_root) for part in mine}


def _make_ready(ctx: Context, final: Path, overwrite: bool) -> None:
    """The root's: a directory that is this job's to write into."""
    path = final.parent
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.take(path)
        for found in saved(path):
            if (whole := checkpoint_of(path / str(found.step))).name != str(found.step):
                whole.rename(path / str(found.step))
        history.set_aside(path, saved(path))
    except OSError as error:
        raise CheckpointError(f"can't write into {path}: {obstacle(path) or error.strerror or error}") from error
    if final.exists() and not overwrite:
        raise FileExistsError(
            f"there is a checkpoint of this step, {final}: restore it, save into another directory, or replace it "
            "with overwrite=True"
        )


def _publish(temporary: Path, final: Path, leaves: dict[tuple[str, ...], LeafRecord], keep: int | None) -> None:
    """The root's: all parts are there; give them the name that readers look for."""
    path = final.parent
    if any(leaf.dtype != "str" and 0 not in leaf.shape for leaf in leaves.values()):
        orbax_writer.finalize(temporary / ITEM)
    complete = saved(path)
    new = Saved(int(final.name), max((s.number or 0 for s in complete), default=0) + 1, history.position(path))
    record.write(temporary, new, leaves)
    sync_to_disk(temporary)
    lock.take(path)  # still: somebody may have removed its file
    if final.exists():
        final.rename(aside(final))  # killed here: `checkpoint_of` finds it
        temporary.rename(final)
        remove(aside(final))
    else:
        temporary.rename(final)
    sync_to_disk(path)
    history.at(path, new)
    with contextlib.suppress(OSError):  # the new one is there, whatever becomes of these: the next save tries again
        for old in too_many(saved(path), keep) if keep else []:
            remove(path / str(old.step))
