"""`save`, `restore` and `latest_step`: checkpoints that know nothing of ranks, ZeRO levels or communicators.

Orbax reads and writes the arrays, each process those of its own shards. Which files make up a checkpoint is agreed on
here, since orbax waits in a barrier for a process that has failed: a checkpoint is written into a directory with a
name that readers pass over, and gets its own when every rank has said that its part is on disk.

    path/12/default/…                    the checkpoint of step 12, in orbax's format
    path/15.orbax-checkpoint-tmp/…       one that is being written, or whose writers were killed
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist import compat
from jaxdist.context import Context, get_context
from jaxdist.errors import CheckpointError
from jaxdist.step.layouts import Padded
from jaxdist.zero import unshard

_ITEM = "default"  # what orbax's CheckpointManager calls the only item of a step
_UNFINISHED = ".orbax-checkpoint-tmp"  # of a directory that orbax too takes for an unfinished one
_PYTHON = (bool, int, float, complex)


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
    if ctx.saving is not None:
        pending, ctx.saving = ctx.saving, None
        pending.wait()
    names, leaves = _named(state)
    final = _directory(path) / str(step)
    temporary = final.with_name(final.name + _UNFINISHED)
    problem = _bad_call(names, leaves, step, keep)
    if problem is None and ctx.is_root:
        problem = _make_room(final, temporary, overwrite)
    shapes = [(n, _kind(x)) for n, x in zip(names, leaves, strict=True)] if problem is None else []
    mine = (str(final), zlib.crc32(repr(shapes).encode()), problem, secrets.token_hex(8))
    said = ctx.control.exchange("save", mine, ctx.timeout)
    _raise_first(ctx, [s[2] for s in said])
    for what, values in (("directories or steps", [s[0] for s in said]), ("states", [s[1] for s in said])):
        if len(set(values)) > 1:
            odd = next(r for r, v in enumerate(values) if v != values[0])
            shown = f": {values[0]} on rank 0, {values[odd]} on rank {odd}" if what != "states" else ""
            raise CheckpointError(f"rank {ctx.rank}: the ranks save different {what}{shown}")

    whole, shards, notes = _parts(ctx, names, leaves, copy=not wait)

    def write() -> None:
        agree = _Agreement(ctx, said[0][3])
        failed = f"checkpoint {final} was not written, earlier ones are as they were"
        agree(lambda: _write(ctx, temporary / _ITEM, whole if ctx.is_root else shards, notes), failed, undo=temporary)
        agree(lambda: _publish(temporary, final, keep) if ctx.is_root else None, failed, undo=temporary)

    saving = Saving(step)
    saving._run(write, background=not wait)
    if not wait:
        ctx.saving = saving
    return saving


def restore(path: str | os.PathLike[str], like: Any, step: int | None = None) -> Any:
    """Read a checkpoint; every process calls it.

    Args:
      path: as given to `save`.
      like: a state of the structure, shapes and dtypes of the saved one: just initialized, or of a step, or of
        ``jax.eval_shape``. Its values are not used.
      step: which; default: the last one.

    Returns:
      The state. Leaves whose counterpart in `like` lies on the mesh (a state that a step has returned, `shard`) are
      read into that place, each process its own shards; the others are on this process as they are in `like`:
      jax arrays on the default device, numpy arrays, numbers.

    Raises:
      FileNotFoundError: no such checkpoint, or no checkpoint at all.
      CheckpointError: on every rank: it is of another model (names the first leaf that differs), or damaged.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.arange(3.0)}, step=10)
      >>> jaxdist.restore(path, {"w": jnp.zeros(3)})["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    ctx = get_context()
    if ctx.saving is not None:
        pending, ctx.saving = ctx.saving, None
        pending.wait()
    root = _directory(path)
    wanted = ctx.control.exchange("restore", latest_step(root) if step is None else step, ctx.timeout)[0]
    directory = root / str(wanted) / _ITEM
    problem, state = None, None
    if wanted is None:
        problem = FileNotFoundError(f"there is no checkpoint in {root}")
    elif not directory.is_dir():
        there = ", ".join(map(str, _steps(root))) or "none"
        problem = FileNotFoundError(
            f"there is no checkpoint of step {wanted} in {root} as {socket.gethostname()} sees it; there: {there}."
            " All processes have to see the directory"
        )
    else:
        try:
            state = _read(ctx, directory, like)
        except CheckpointError as error:
            problem = error
        except Exception as error:
            problem = CheckpointError(
                f"checkpoint {directory.parent} can't be read, files of it may be damaged or gone: "
                f"{type(error).__name__}: {_brief(error)}. Other steps there: "
                f"{[s for s in _steps(root) if s != wanted]}; restore one with restore(path, like, step=…)"
            )
    _raise_first(ctx, ctx.control.exchange("restored", problem, ctx.timeout))
    return state


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The last step of which there is a whole checkpoint.

    Args:
      path: as given to `save`.

    Returns:
      None if there is none, or no such directory.

    Example:
      >>> import jaxdist
      >>> jaxdist.latest_step("no/such/directory") is None
      True
    """
    return max(_steps(_directory(path)), default=None)


def read_all(directory: str | os.PathLike[str]) -> dict[str, np.ndarray | str]:
    """Every leaf of one checkpoint by its name, as arrays of the host; for export. Of one process, without `init`."""
    directory = _directory(directory) / _ITEM
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory.parent} is not a checkpoint: expected a step, such as run/checkpoints/100")
    leaves, notes = _contents(_handler(0), directory)
    tree = _handler(0).restore(_epath(directory), args=_args().PyTreeRestore(restore_args=_as_numpy(leaves)))
    found = {".".join(path): value for path, value in _flat(tree)}
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in notes["empty"].items()}
    return found | empty


# --- the state as named leaves


def _named(state: Any) -> tuple[list[tuple[str, ...]], list[Any]]:
    """The leaves, each with the keys that lead to it."""
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    return [tuple(_key(k) for k in path) or ("state",) for path, _ in found], [x for _, x in found]


def _key(entry: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)


def _nested(names: list[tuple[str, ...]], values: list[Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*above, last), value in zip(names, values, strict=True):
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _flat(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: not isinstance(x, dict))
    return [(tuple(_key(k) for k in path), x) for path, x in found]


def _kind(x: Any) -> Any:
    """What of a leaf has to be the same on every rank, and in a checkpoint that is read into it."""
    if isinstance(x, str):
        return "str"
    if type(x) in _PYTHON:
        return type(x).__name__
    if _is_key(x):
        return tuple(x.shape), str(x.dtype)
    return tuple(np.shape(x)), str(x.dtype)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _bad_call(names: list[tuple[str, ...]], leaves: list[Any], step: Any, keep: Any) -> Exception | None:
    if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or step < 0:
        return ValueError(f"save(step={step!r}): a checkpoint is named by an integer, 0 or more")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        return ValueError(f"save(keep={keep!r}): a number of checkpoints, 1 or more, or None for all")
    if not leaves:
        return ValueError("the state has no leaves: there is nothing to save")
    for name, x in zip(names, leaves, strict=True):
        if isinstance(x, str) or type(x) in _PYTHON:
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


# --- writing


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
        if _is_key(x):
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
    return _nested(kept, whole), _nested(*map(list, zip(*shards, strict=True))) if shards else {}, notes


def _copied(x: Any) -> jax.Array:
    """Without a program of all processes, as which jnp.copy would run."""
    return jax.make_array_from_single_device_arrays(
        x.shape, x.sharding, [jnp.copy(s.data) for s in x.addressable_shards]
    )


def _write(ctx: Context, directory: Path, tree: dict[str, Any], notes: dict[str, Any]) -> None:
    if tree:
        args = _args().PyTreeSave(tree, custom_metadata={"jaxdist": notes})
        _handler(ctx.rank).save(_epath(directory), args=args)


def _make_room(final: Path, temporary: Path, overwrite: bool) -> Exception | None:
    """The root's: an empty directory to write into."""
    if final.exists() and not overwrite:
        return FileExistsError(
            f"there is a checkpoint of this step, {final}: restore it, save into another directory, or replace it with "
            "overwrite=True"
        )
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f"*{_UNFINISHED}"):  # of jobs that were killed
            shutil.rmtree(left)
        (temporary / _ITEM).mkdir(parents=True)
    except OSError as error:
        return CheckpointError(f"can't write into {final.parent}: {error.strerror or error}")
    return None


def _publish(temporary: Path, final: Path, keep: int | None) -> None:
    """The root's: all parts are there; give them the name that readers look for."""
    _handler(0).finalize(_epath(temporary / _ITEM))
    if final.exists():
        replaced = final.with_name(f"{final.name}.replaced{_UNFINISHED}")
        final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced)
    else:
        temporary.rename(final)
    _sync_to_disk(final.parent)
    for old in _steps(final.parent)[: -keep or None] if keep else []:
        gone = final.with_name(f"{old}{_UNFINISHED}")
        (final.parent / str(old)).rename(gone)  # what is half removed is not to be found
        shutil.rmtree(gone)


def _sync_to_disk(directory: Path) -> None:
    """A rename outlives the machine only when its directory is written."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Agreement:
    """Do something on each rank, and learn on every rank whether all could; also from a thread beside the training."""

    def __init__(self, ctx: Context, name: str):
        self.ctx, self.name, self.count = ctx, name, 0

    def __call__(self, work: Callable[[], None], failed: str, undo: Path) -> None:
        error = ""
        try:
            work()
        except Exception as e:
            error = f"rank {self.ctx.rank} ({socket.gethostname()}): {type(e).__name__}: {_brief(e)}"
        errors = [e for e in self._all(error) if e]
        if errors:
            if self.ctx.is_root:
                shutil.rmtree(undo, ignore_errors=True)
            raise CheckpointError(f"{failed}: {'; '.join(errors[:4])}")

    def _all(self, mine: str) -> list[str]:
        # Not by the control channel, in which the training may be waiting meanwhile.
        if self.ctx.size == 1:
            return [mine]
        store = compat.key_value_store()
        key = f"jaxdist/save/{self.name}/{self.count}"
        self.count += 1
        store.key_value_set(f"{key}/{self.ctx.rank}", mine or "-")
        said = []
        for rank in range(self.ctx.size):
            try:
                said.append(store.blocking_key_value_get(f"{key}/{rank}", int(self.ctx.timeout * 1000)))
            except Exception as e:
                raise CheckpointError(
                    f"rank {self.ctx.rank}: rank {rank} has not written its part {self.ctx.timeout:g} s after this one"
                ) from e
        return ["" if s == "-" else s for s in said]


# --- reading


def _read(ctx: Context, directory: Path, like: Any) -> Any:
    names, leaves = _named(like)
    handler = _handler(ctx.rank)
    saved, notes = _contents(handler, directory)
    for name, x in zip(names, leaves, strict=True):
        _check_leaf(directory.parent, name, x, saved, notes)
    if extra := [name for name in saved if name not in set(names)]:
        raise CheckpointError(f"checkpoint {directory.parent} has a leaf {'.'.join(extra[0])} that `like` has not")
    stored = [name for name in names if name in saved]
    args = [_restore_as(x) for name, x in zip(names, leaves, strict=True) if name in saved]
    tree = _nested(stored, args)
    got = handler.restore(_epath(directory), args=_args().PyTreeRestore(item=tree, restore_args=tree)) if stored else {}
    values = dict(_flat(got))
    out = [_placed(values[name] if name in values else np.zeros(x.shape, x.dtype), x, notes, name)
           for name, x in zip(names, leaves, strict=True)]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(like), out)


def _contents(handler: Any, directory: Path) -> tuple[dict[tuple[str, ...], Any], dict[str, Any]]:
    """Orbax's metadata of each leaf, and what `_parts` noted."""
    metadata = handler.metadata(_epath(directory))
    notes = (metadata.custom_metadata or {}).get("jaxdist", {})
    return dict(_flat(metadata.tree)), {"empty": {}, "keys": {}} | notes


def _check_leaf(
    where: Path, name: tuple[str, ...], x: Any, saved: dict[tuple[str, ...], Any], notes: dict[str, Any]
) -> None:
    label = ".".join(name)
    of = f"leaf {label} of checkpoint {where}"
    impl = notes["keys"].get(label)
    if _is_key(x):
        if impl is None and (name in saved or label in notes["empty"]):
            raise CheckpointError(f"{of} is no PRNG key, as it is in `like`")
        if impl is not None and (kind := jax.random.key(0, impl=impl).dtype) != x.dtype:
            raise CheckpointError(f"{of} is a PRNG key {kind}, in `like` {x.dtype}")
        x = jax.eval_shape(jax.random.key_data, x)
    elif impl is not None:
        raise CheckpointError(f"{of} is a PRNG key, in `like` it is not")
    if label in notes["empty"]:
        shape, dtype = notes["empty"][label]
    elif name not in saved:
        close = ", ".join(".".join(n) for n in itertools.islice(saved, 3))
        raise CheckpointError(f"checkpoint {where} has no leaf {label}, as `like` has; it has {close}, …")
    elif isinstance(x, str) or not hasattr(saved[name], "dtype"):
        if isinstance(x, str) == hasattr(saved[name], "dtype"):
            raise CheckpointError(f"{of} and of `like`: one is a string, the other is not")
        return
    else:
        shape, dtype = saved[name].shape, str(np.dtype(saved[name].dtype))
    if tuple(shape) != np.shape(x):
        raise CheckpointError(f"{of} has shape {tuple(shape)}, in `like` {np.shape(x)}")
    if type(x) in _PYTHON:
        if np.dtype(dtype).kind != np.asarray(x).dtype.kind:
            raise CheckpointError(f"{of} is {dtype}, in `like` {type(x).__name__}")
    elif dtype != str(np.dtype(x.dtype)):
        raise CheckpointError(
            f"{of} is {dtype}, in `like` {np.dtype(x.dtype)}: restore it as it was saved, and cast it then"
        )


def _on_mesh(x: Any) -> NamedSharding | None:
    own = getattr(x, "sharding", None)
    return own if isinstance(own, NamedSharding) and type(x) is not Padded and not _is_key(x) else None


def _restore_as(x: Any) -> Any:
    import orbax.checkpoint as ocp

    if isinstance(x, str):
        return ocp.RestoreArgs(restore_type=str)
    own = _on_mesh(x)
    if own is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=own, global_shape=x.shape, dtype=x.dtype)


def _as_numpy(saved: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    args = [_restore_as("" if not hasattr(m, "dtype") else 0) for m in saved.values()]
    return _nested(list(saved), args)


def _placed(value: Any, x: Any, notes: dict[str, Any], name: tuple[str, ...]) -> Any:
    """A leaf as its counterpart is."""
    if isinstance(x, str):
        return str(value)
    if type(x) in _PYTHON:
        return type(x)(np.asarray(value).item())
    if type(x) is Padded:
        padded = x.layout.padded(np.asarray(value))
        own = x.array.sharding
        return Padded(jax.make_array_from_callback(padded.shape, own, lambda i: padded[i]), x.layout)
    if _is_key(x):
        keys = jax.random.wrap_key_data(jnp.asarray(value), impl=notes["keys"][".".join(name)])
        own = x.sharding if isinstance(getattr(x, "sharding", None), NamedSharding) else None
        return keys if own is None else jax.device_put(keys, own)
    if isinstance(x, (np.ndarray, np.generic)):
        return np.asarray(value, x.dtype) if isinstance(x, np.ndarray) else x.dtype.type(value)
    own = _on_mesh(x)
    if own is not None and not isinstance(value, jax.Array):
        value = np.asarray(value, x.dtype)
        return jax.make_array_from_callback(x.shape, own, lambda i: value[i])
    return value if own is not None else jnp.asarray(value, x.dtype)


# --- orbax, which takes a second to import


def _handler(rank: int) -> Any:
    """Orbax's reader and writer of trees, told that this process is alone: no barriers. The root writes metadata."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={rank}, barrier_sync_key_prefix=f"rank{rank}"
    )
    return ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, multiprocessing_options=alone)


def _args() -> Any:
    import orbax.checkpoint as ocp

    return ocp.args


def _epath(path: Path) -> Any:
    from etils import epath

    return epath.Path(path)


# --- small things


def _directory(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser().absolute()


def _steps(path: Path) -> list[int]:
    """Of which there are whole checkpoints, in order."""
    if not path.is_dir():
        return []
    return sorted(int(p.name) for p in path.iterdir() if p.name.isdecimal() and (p / _ITEM).is_dir())


def _brief(error: BaseException) -> str:
    """The first lines of what a library said."""
    text = " ".join(str(error).split())
    return text if len(text) < 500 else f"{text[:500]}…"


def _raise_first(ctx: Context, problems: list[Exception | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise type(problem)(f"rank {rank}: {problem}" if ctx.size > 1 else str(problem))
