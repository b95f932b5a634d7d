"""`restore` and `latest_step`: find a checkpoint, and read it onto the devices that are there now."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxdist.checkpoint.agreement import await_pending, brief, raise_first
from jaxdist.checkpoint.files import ITEM, absolute, as_epath, checkpoint_of, orbax_handler, steps
from jaxdist.checkpoint.leaves import PYTHON, flat, is_key, named, nested
from jaxdist.context import Context, get_context
from jaxdist.errors import CheckpointError
from jaxdist.step.layouts import Padded


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
    await_pending(ctx)
    root = absolute(path)
    wanted = ctx.control.exchange("restore", latest_step(root) if step is None else step, ctx.timeout)[0]
    problem, state = None, None
    if wanted is None:
        problem = FileNotFoundError(f"there is no checkpoint in {root}")
    elif not (directory := checkpoint_of(root, wanted) / ITEM).is_dir():
        there = ", ".join(map(str, steps(root))) or "none"
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
                f"{type(error).__name__}: {brief(error)}. Other steps there: "
                f"{[s for s in steps(root) if s != wanted]}; restore one with restore(path, like, step=…)"
            )
    raise_first(ctx, ctx.control.exchange("restored", problem, ctx.timeout))
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
    return max(steps(absolute(path)), default=None)


def read_all(directory: str | os.PathLike[str]) -> dict[str, np.ndarray | str]:
    """Every leaf of one checkpoint by its name, as arrays of the host; for export. Of one process, without `init`."""
    import orbax.checkpoint as ocp

    directory = absolute(directory) / ITEM
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory.parent} is not a checkpoint: expected a step, such as run/checkpoints/100")
    leaves, notes = _contents(orbax_handler(0), directory)
    tree = orbax_handler(0).restore(as_epath(directory), args=ocp.args.PyTreeRestore(restore_args=_as_numpy(leaves)))
    found = {".".join(path): value for path, value in flat(tree)}
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in notes["empty"].items()}
    return found | empty


def _read(ctx: Context, directory: Path, like: Any) -> Any:
    import orbax.checkpoint as ocp

    names, leaves = named(like)
    handler = orbax_handler(ctx.rank)
    saved, notes = _contents(handler, directory)
    for name, x in zip(names, leaves, strict=True):
        _check_leaf(directory.parent, name, x, saved, notes)
    if extra := [name for name in saved if name not in set(names)]:
        raise CheckpointError(f"checkpoint {directory.parent} has a leaf {'.'.join(extra[0])} that `like` has not")
    stored = [name for name in names if name in saved]
    args = [_restore_as(x) for name, x in zip(names, leaves, strict=True) if name in saved]
    tree = nested(stored, args)
    arguments = ocp.args.PyTreeRestore(item=tree, restore_args=tree)
    got = handler.restore(as_epath(directory), args=arguments) if stored else {}
    values = dict(flat(got))
    out = [_placed(values[name] if name in values else np.zeros(x.shape, x.dtype), x, notes, name)
           for name, x in zip(names, leaves, strict=True)]  # fmt: skip
    return jax.tree.unflatten(jax.tree.structure(like), out)


def _contents(handler: Any, directory: Path) -> tuple[dict[tuple[str, ...], Any], dict[str, Any]]:
    """Orbax's metadata of each leaf, and what `_parts` noted."""
    metadata = handler.metadata(as_epath(directory))
    notes = (metadata.custom_metadata or {}).get("jaxdist", {})
    return dict(flat(metadata.tree)), {"empty": {}, "keys": {}} | notes


def _check_leaf(
    where: Path, name: tuple[str, ...], x: Any, saved: dict[tuple[str, ...], Any], notes: dict[str, Any]
) -> None:
    label = ".".join(name)
    of = f"leaf {label} of checkpoint {where}"
    impl = notes["keys"].get(label)
    if is_key(x):
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
    if type(x) in PYTHON:
        if np.dtype(dtype).kind != np.asarray(x).dtype.kind:
            raise CheckpointError(f"{of} is {dtype}, in `like` {type(x).__name__}")
    elif dtype != str(np.dtype(x.dtype)):
        raise CheckpointError(
            f"{of} is {dtype}, in `like` {np.dtype(x.dtype)}: restore it as it was saved, and cast it then"
        )


def _on_mesh(x: Any) -> NamedSharding | None:
    own = getattr(x, "sharding", None)
    return own if isinstance(own, NamedSharding) and type(x) is not Padded and not is_key(x) else None


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
    return nested(list(saved), args)


def _placed(value: Any, x: Any, notes: dict[str, Any], name: tuple[str, ...]) -> Any:
    """A leaf as its counterpart is."""
    if isinstance(x, str):
        return str(value)
    if type(x) in PYTHON:
        return type(x)(np.asarray(value).item())
    if type(x) is Padded:
        padded = x.layout.padded(np.asarray(value))
        own = x.array.sharding
        return Padded(jax.make_array_from_callback(padded.shape, own, lambda i: padded[i]), x.layout)
    if is_key(x):
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
