"""`restore` and `latest_step`: find a checkpoint, and read it onto the devices that are there now."""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.checkpoint import history, record
from jaxdist.checkpoint.agreement import brief
from jaxdist.checkpoint.arrays import ArrayReader, Bounds
from jaxdist.checkpoint.background import await_pending
from jaxdist.checkpoint.checksum import MODULUS, checksum
from jaxdist.checkpoint.files import ITEM, Saved, absolute, checkpoint_of, saved
from jaxdist.checkpoint.leaves import PYTHON, is_key, named
from jaxdist.checkpoint.record import DamagedError, LeafRecord, Record
from jaxdist.errors import CheckpointError
from jaxdist.placements.layouts import Padded
from jaxdist.runtime.context import Context, get_context

T = TypeVar("T")
_ERRORS = CheckpointError, FileNotFoundError, DamagedError  # a damaged one may be passed over, so it comes last


def restore(path: str | os.PathLike[str], like: T, step: int | None = None, *, fallback: bool | None = None) -> T:
    """Read a checkpoint; every process calls it.

    What is read is compared with the checksums that were saved with it.

    Args:
      path: as given to `save`.
      like: a state of the structure, shapes and dtypes of the saved one: just initialized, or of a step, or of
        ``jax.eval_shape``. Its values are not used.
      step: which; default: the one that was saved last.
      fallback: without `step`: whether to go on to the one saved before when the last is damaged, and so on; the root
        says so on stderr, and the next `save` renames those that were passed over (``15.damaged``). Default: where
        ``jaxdist run --max-restarts`` has started the job again.

    Returns:
      The state. Leaves whose counterpart in `like` lies on the mesh (a state that a step has returned, `shard`) are
      read into that place, each process its own shards; the others are on this process as they are in `like`:
      jax arrays on the default device, numpy arrays, numbers.

    Raises:
      FileNotFoundError: no such checkpoint, or no checkpoint at all.
      CheckpointError: on every rank: it is of another model (names the first leaf that differs), or damaged (names
        the leaf and the file).
      ValueError: both `step` and `fallback`.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.arange(3.0)}, step=10)
      >>> jaxdist.restore(path, {"w": jnp.zeros(3)})["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    if fallback and step is not None:
        raise ValueError("restore(step=..., fallback=True): of which step? Leave one of them out")
    ctx = get_context()
    await_pending()
    root = absolute(path)
    if fallback is None:
        fallback = step is None and os.environ.get("JAXDIST_RESTARTS", "0") not in ("", "0")
    passed: list[tuple[Saved, str]] = []  # damaged ones, and how
    while True:
        choose = functools.partial(_choose, ctx, root, step, fallback, [s for s, _ in passed])
        _, choices = on_every_rank(ctx, "restore", choose, raises=_ERRORS)
        wanted, fallback = choices[0]
        read = functools.partial(_read_own, ctx, root, wanted, step, like)
        try:
            # Reading may take a while longer on one rank than on another: as long as they live.
            (state, leaves), shares = on_every_rank(ctx, "restore", read, raises=_ERRORS, patient=True)
            _check_shares(root, wanted, leaves, shares)
        except DamagedError as error:
            if not fallback:
                raise CheckpointError(f"{error}. {_elsewhere(root, wanted)}") from None
            passed.append((wanted, str(error)))
            continue
        except FileNotFoundError as error:
            if not passed:
                raise
            all_of_them = "; ".join(f"step {s.step}: {text}" for s, text in passed)
            raise CheckpointError(f"{error} that is complete: {all_of_them}") from None
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


def read_all(directory: str | os.PathLike[str]) -> dict[str, np.ndarray | str]:
    """Every leaf of one checkpoint by its name, as arrays of the host; for export. Of one process, without `init`.

    Raises:
      FileNotFoundError: not a checkpoint.
      CheckpointError: it is damaged.
    """
    directory = absolute(directory)
    found = record.of(directory)
    if found is None:
        raise FileNotFoundError(f"{directory} is not a checkpoint: expected a step, such as run/checkpoints/100")
    record.check_files(directory, found)
    values = _arrays(directory, found.arrays, dict.fromkeys(found.arrays), {})
    return {
        ".".join(name): values[name][0] if name in values else str(leaf.value) for name, leaf in found.leaves.items()
    }


def _choose(ctx: Context, root: Path, step: int | None, fallback: bool, passed: list[Saved]) -> Part[None]:
    """The root tells which checkpoint to read (None: there is none), and whether another will do."""
    there = [s for s in saved(root) if s not in passed and step in (None, s.step)] if ctx.is_root else []
    return Part(None, told=(there[-1] if there else None, fallback))


def _elsewhere(root: Path, damaged: Saved | None) -> str:
    others = [s.step for s in saved(root) if s != damaged]
    if not others:
        return "There is no other step"
    return (
        f"Other steps: {others}; restore one with restore(path, like, step=...), or the newest complete one with "
        "restore(path, like, fallback=True)"
    )


_Leaves = dict[tuple[str, ...], LeafRecord]
_OTHER_BITS = "has other bits than were saved"


def _read_own(ctx: Context, root: Path, wanted: Saved | None, step: int | None, like: Any) -> Part[tuple[Any, _Leaves]]:
    """What this rank reads of a checkpoint.

    Returns:
      The state, and the leaves as they were saved; told are this rank's shares in the checksums of those arrays of
      which no rank has all.
    """
    if wanted is None:
        if step is None:
            raise FileNotFoundError(f"there is no checkpoint in {root}")
        there = ", ".join(str(s.step) for s in saved(root)) or "none"
        raise FileNotFoundError(f"there is no checkpoint of step {step} in {root}; there: {there}")
    directory = checkpoint_of(root, wanted.step)
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
        kind = CheckpointError if isinstance(error, MemoryError) else DamagedError
        raise kind(f"checkpoint {directory} can't be read: {type(error).__name__}: {brief(error)}") from error


def _read(directory: Path, found: Record, like: Any, shares: dict[tuple[str, ...], int]) -> Any:
    names, leaves = named(like)
    for name, x in zip(names, leaves, strict=True):
        _check_leaf(directory, name, x, found.leaves)
    known = set(names)
    if extra := [name for name in found.leaves if name not in known]:
        raise CheckpointError(f"checkpoint {directory} has a leaf {'.'.join(extra[0])} that `like` has not")
    places = {name: _on_mesh(x) for name, x in zip(names, leaves, strict=True)}
    values = _arrays(directory, found.arrays, places, shares)
    out: list[Any] = []
    for name, x in zip(names, leaves, strict=True):
        leaf, place = found.leaves[name], places[name]
        if leaf.dtype == "str":
            out.append(str(leaf.value))
        elif place is None:
            out.append(_placed(values[name][0], x, leaf))
        else:
            blocks = dict(zip(_cut(place, leaf.shape)[0], values[name], strict=True))
            out.append(_assembled(place, leaf.shape, blocks))
    return jax.tree.unflatten(jax.tree.structure(like), out)


def _arrays(
    directory: Path,
    leaves: _Leaves,
    places: dict[tuple[str, ...], Any],
    shares: dict[tuple[str, ...], int],
) -> dict[tuple[str, ...], list[np.ndarray]]:
    """The slices of arrays that this process needs (`_cut`), compared with their checksums.

    Raises:
      DamagedError: an array is not what was saved.
    """
    reader = ArrayReader(directory, ITEM)
    opened = {name: reader.open(name) for name in leaves}
    reads: dict[tuple[str, ...], Callable[[], list[np.ndarray]]] = {}
    for name, leaf in leaves.items():
        reads[name] = reader.read(name, leaf, opened.pop(name), list(_cut(places[name], leaf.shape)[0]))
    values = {}
    for name, leaf in leaves.items():
        bounds, counts, alone = _cut(places[name], leaf.shape)
        values[name] = blocks = reads.pop(name)()
        each = zip(bounds, counts, blocks, strict=True)
        share = sum(checksum(block, [a for a, _ in b]) for b, own, block in each if own) % MODULUS
        if not alone:
            shares[name] = share
        elif share != leaf.value:
            raise reader.damaged(name, _OTHER_BITS)
    return values


def _check_shares(root: Path, wanted: Saved, leaves: _Leaves, shares: list[dict[tuple[str, ...], int]]) -> None:
    """Compare the checksums of arrays of which each rank has read a part."""
    for name in shares[0]:
        if sum(s.get(name, 0) for s in shares) % MODULUS != leaves[name].value:
            reader = ArrayReader(checkpoint_of(root, wanted.step), ITEM)
            raise reader.damaged(name, _OTHER_BITS)


@functools.lru_cache(maxsize=4096)
def _cut(place: Sharding | None, shape: tuple[int, ...]) -> tuple[tuple[Bounds, ...], tuple[bool, ...], bool]:
    """How this process reads an array.

    Returns:
      The slices that its devices hold, each once; of each whether this process counts it in the checksum (and not
      another one that holds it too); whether what it counts is all of the array.
    """
    whole = tuple((0, n) for n in shape)
    if place is None or place.is_fully_replicated:
        return (whole,), (True,), True
    first: dict[Bounds, Any] = {}
    for device, index in place.devices_indices_map(shape).items():
        first.setdefault(_bounds(index, shape), device)
    local = tuple(dict.fromkeys(_bounds(i, shape) for i in place.addressable_devices_indices_map(shape).values()))
    return local, tuple(first[b] in place.addressable_devices for b in local), place.is_fully_addressable


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))


def _check_leaf(where: Path, name: tuple[str, ...], x: Any, leaves: _Leaves) -> None:
    label = ".".join(name)
    of = f"leaf {label} of checkpoint {where}"
    if name not in leaves:
        close = ", ".join(".".join(n) for n in itertools.islice(leaves, 3))
        raise CheckpointError(f"checkpoint {where} has no leaf {label}, as `like` has; it has {close}, …")
    leaf = leaves[name]
    if is_key(x):
        if leaf.key is None:
            raise CheckpointError(f"{of} is not a PRNG key, but it is one in `like`")
        if (kind := jax.random.key(0, impl=leaf.key).dtype) != x.dtype:
            raise CheckpointError(f"{of} is a PRNG key {kind}, in `like` {x.dtype}")
        x = jax.eval_shape(jax.random.key_data, x)
    elif leaf.key is not None:
        raise CheckpointError(f"{of} is a PRNG key, but it is not one in `like`")
    if isinstance(x, str) != (leaf.dtype == "str"):
        raise CheckpointError(f"{of} and of `like`: one is a string, the other is not")
    if isinstance(x, str):
        return
    if leaf.shape != np.shape(x):
        raise CheckpointError(f"{of} has shape {leaf.shape}, in `like` {np.shape(x)}")
    if type(x) in PYTHON:
        if jnp.dtype(leaf.dtype).kind != np.asarray(x).dtype.kind:
            raise CheckpointError(f"{of} is {leaf.dtype}, in `like` {type(x).__name__}")
    elif leaf.dtype != str(np.dtype(x.dtype)):
        raise CheckpointError(
            f"{of} is {leaf.dtype}, in `like` {np.dtype(x.dtype)}: restore it as it was saved, and cast it then"
        )


def _on_mesh(x: Any) -> NamedSharding | None:
    own = getattr(x, "sharding", None)
    return own if isinstance(own, NamedSharding) and type(x) is not Padded and not is_key(x) else None


def _assembled(place: NamedSharding, shape: tuple[int, ...], blocks: dict[Bounds, np.ndarray]) -> jax.Array:
    return jax.make_array_from_callback(shape, place, lambda index: blocks[_bounds(index, shape)])


def _placed(value: np.ndarray, x: Any, leaf: LeafRecord) -> Any:
    """A leaf as its counterpart is, off the mesh."""
    if type(x) in PYTHON:
        return type(x)(value.item())
    if type(x) is Padded:
        padded = x.layout.padded(value)
        own = x.array.sharding
        return Padded(jax.make_array_from_callback(padded.shape, own, lambda i: padded[i]), x.layout)
    if is_key(x):
        own = getattr(x, "sharding", None)
        if isinstance(own, NamedSharding):  # not device_put: it refuses a mesh of several processes
            data = jax.make_array_from_callback(value.shape, own, lambda index: value[index])
        else:
            data = jnp.asarray(value)
        return jax.random.wrap_key_data(data, impl=leaf.key)
    if isinstance(x, (np.ndarray, np.generic)):
        return value if isinstance(x, np.ndarray) else x.dtype.type(value)
    return jnp.asarray(value, x.dtype)
