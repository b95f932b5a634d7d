"""`restore` and `latest_step`: find a checkpoint, and read it onto the devices of this job."""

import functools
import os
import socket
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.checkpoint import arrays, manifest
from jaxdist.checkpoint.directory import absolute, passed_over, steps
from jaxdist.checkpoint.manifest import PYTHON, DamagedError, Leaf, Leaves, Name, kind_of, named
from jaxdist.checkpoint.writing import await_pending
from jaxdist.compat import under_no_mesh
from jaxdist.compilation.signature import is_keys
from jaxdist.errors import CheckpointError
from jaxdist.extras import need
from jaxdist.runtime.context import get_context
from jaxdist.tracebacks import api_boundary

T = TypeVar("T")
# DamagedError is last: it means that every rank could read, and nothing else is wrong.
_ERRORS = CheckpointError, TypeError, ValueError, FileNotFoundError, DamagedError, ImportError
_TRIES = 100  # attempts to find one that nobody removes during reading


@api_boundary
@under_no_mesh
def restore(path: str | os.PathLike[str], like: T, step: int | None = None) -> T:
    """Read a checkpoint, and compare all that is read with the saved digests; every process calls it.

    Args:
      path: the directory given to `save`.
      like: a state with the structure, shapes, and dtypes of the saved one; `jax.ShapeDtypeStruct` works.
      step: the step to read; by default the highest one that is whole. A damaged one is skipped with a warning.

    Returns:
      The state. Leaves that are on the mesh in `like` are read into the same place, each process its own shards. All
      others are on this process: JAX arrays on the default device.

    Raises:
      FileNotFoundError: the checkpoint does not exist.
      CheckpointError: (on every rank) the checkpoint has a different model (the error names the first leaf that
        differs), is damaged, or cannot be read (such as too many open files), which is never skipped.
      TypeError: a leaf of `like` cannot be in a checkpoint.
      ValueError: the path is empty or a URL.
      ImportError: (on every rank) tensorstore, a dependency of orbax, is not installed.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.arange(3.0)}, step=10)
      >>> jaxdist.restore(path, {"w": jnp.zeros(3)})["w"].tolist()
      [0.0, 1.0, 2.0]
    """
    ctx = get_context()
    await_pending()
    root, failed = absolute(path), dict[int, Exception]()

    def choose() -> Part[None]:
        return Part(None, (("the step", str(step)),), _find(root, step, failed) if ctx.is_root else None)

    for _ in range(_TRIES):
        found: int = on_every_rank(ctx, "restore", choose, raises=_ERRORS, advice="Restore the same step")[1][0]
        if found in failed:  # only some ranks may see it
            raise failed[found]
        read = functools.partial(_read_own, root / str(found), found, like)
        try:
            # Reading may take much longer on one rank than on the others.
            (state, leaves), everyone = on_every_rank(ctx, "restore", read, raises=_ERRORS, patient=True)
            arrays.compare(root / str(found), leaves, everyone)
        except (DamagedError, FileNotFoundError) as failure:
            failed[found] = failure
            continue
        for number, failure in failed.items():
            if ctx.is_root and number > found and number in steps(root):
                ctx.control.say(f"skipped step {number}, and restored step {found}: {failure}")
                passed_over.add((root / str(number)).resolve())
        return state
    raise CheckpointError(f"{_TRIES} checkpoints in {root} were removed while they were being read")


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Return the highest step that is whole according to its manifest, or None; no arrays are read.

    Args:
      path: the directory given to `save`.

    Raises:
      CheckpointError: all checkpoints are damaged, or the last save in the background failed.

    Example:
      >>> import jaxdist
      >>> jaxdist.latest_step("no/such/directory") is None
      True
    """
    await_pending()
    root = absolute(path)
    return _find(root, None, {}) if steps(root) else None


def read_all(path: str | os.PathLike[str]) -> tuple[Path, dict[str, np.ndarray | str]]:
    """Return one checkpoint's directory and all leaves as host arrays, for export in one process."""
    need("tensorstore", "jaxdist export")
    directory = absolute(path)
    if not (directory / manifest.FILE).exists():
        directory /= str(_find(directory, None, {}))
    leaves = manifest.read(directory, int(directory.name) if directory.name.isdecimal() else None)
    kinds = {kind.__name__: kind for kind in PYTHON}
    like = {name: np.zeros((), leaf.dtype) if leaf.dtype else kinds[leaf.kind]() for name, leaf in leaves.items()}
    values, sums = arrays.read(directory, leaves, like)
    arrays.compare(directory, leaves, [sums])
    return directory, {".".join(name): x if isinstance(x, str) else np.asarray(x) for name, x in values.items()}


def _find(root: Path, step: int | None, failed: dict[int, Exception]) -> int:
    """Return the step asked for, or the highest one; add those with a damaged manifest to `failed`."""
    there = steps(root)
    known = [number for number in there if step in (None, number)]
    for number in reversed(known):
        try:
            if not isinstance(failed.get(number), DamagedError):
                manifest.read(root / str(number), number)
                return number
        except FileNotFoundError:
            return _find(root, step, failed)  # removed just now
        except DamagedError as error:
            failed[number] = error
    asked = "" if step is None else f" of step {step}"
    if known:
        problems = "; ".join(f"step {number}: {failed[number]}" for number in known)
        raise CheckpointError(f"{root} has no whole checkpoint{asked}. {problems}")
    raise FileNotFoundError(f"found no checkpoint{asked} in {root}; steps: {', '.join(map(str, there)) or 'none'}")


def _read_own(directory: Path, step: int, like: Any) -> Part[tuple[Any, Leaves]]:
    """Read this rank's part of a checkpoint."""
    need("tensorstore", "jaxdist.restore")
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{socket.gethostname()} does not see {directory}, but rank 0 does. Do all hosts share it?"
        )
    leaves, wanted = manifest.read(directory, step), named(like)
    _check_leaves(directory, wanted, leaves)
    values, sums = arrays.read(directory, leaves, wanted)
    state = jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in wanted])
    return Part((state, leaves), told=sums)


def _check_leaves(where: Path, like: dict[Name, Any], leaves: Leaves) -> None:
    """Raise an error about the first leaf of `like` that can't be restored, or differs from the checkpoint."""
    for name in dict.fromkeys([*like, *leaves]):
        label = ".".join(name)
        x: Any = like.get(name)
        if name in like and not isinstance(x, jax.ShapeDtypeStruct) and (why := manifest.refusal(x)):
            raise TypeError(f"leaf {label} of `like` can't be restored: {why}")
        saved = leaves[name].kind if name in leaves else "missing"
        wanted = kind_of(x) if name in like else "missing"
        if saved != wanted and not (name in leaves and name in like and _is_number(leaves[name], x)):
            raise CheckpointError(
                f"leaf {label} of checkpoint {where} is {saved}, in `like` {wanted}: restore the state as it was "
                "saved, and convert it afterwards"
            )
        ours = isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and not is_keys(x)
        if ours and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype:
            raise CheckpointError(f"leaf {label} is {x.dtype}: set jax_enable_x64, or use NumPy in `like`")


def _is_number(leaf: Leaf, x: Any) -> bool:
    """Check whether one is a number, and the other a 0-d array that a step made of it."""
    if type(x) in PYTHON and leaf.kind == f"{leaf.dtype}[]":
        return np.dtype(leaf.dtype).kind == np.asarray(x).dtype.kind
    if leaf.dtype or type(x) in PYTHON:
        return False
    value = np.asarray(leaf.value)
    return kind_of(x) in (kind_of(value), kind_of(value.astype(jax.dtypes.canonicalize_dtype(value.dtype))))
