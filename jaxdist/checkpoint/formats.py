"""`export`: arrays in one file that loads without jaxdist, with names of your choice."""

import functools
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.agreement.every_rank import Part, on_every_rank
from jaxdist.checkpoint.manifest import IN_SAFETENSORS, named, on_host, stored_form
from jaxdist.extras import need
from jaxdist.runtime.context import get_context
from jaxdist.sharding import unshard


def export(path: str | os.PathLike[str], tree: Any, rename: Mapping[str, str] | None = None) -> None:
    """Write the arrays of a tree into one ``.safetensors`` or ``.npz`` file. Every process calls it; the root writes.

    Args:
      path: the file.
      tree: JAX or NumPy arrays, sharded or not. The name of one is its path: ``params.dense.kernel``.
      rename: regular expressions and their replacements, as for `re.sub`, applied in order:
        ``{r"^params\\.": "", r"blocks\\.(\\d+)": r"layers.\\1"}``.

    Raises:
      ValueError: (on every rank) the file has a different ending, two arrays get one name, or the format does
        not have an array's dtype (``.npz``: bfloat16, float8, int4).
      ImportError: (on every rank) safetensors is not installed.
      OSError: (on every rank) the root cannot write there.

    Example:
      >>> import jax.numpy as jnp, jaxdist, numpy as np, tempfile
      >>> file = tempfile.mkdtemp() + "/model.npz"
      >>> jaxdist.export(file, {"params": {"kernel": jnp.ones((2, 3))}}, rename={"kernel$": "weight"})
      >>> np.load(file)["params.weight"].shape
      (2, 3)
    """
    ctx = get_context()
    whole = unshard(tree)

    def part() -> Part[None]:
        if ctx.is_root:
            host = lambda x: x if isinstance(x, str) else on_host(stored_form(x))
            write(Path(path), {".".join(name): host(x) for name, x in named(whole).items()}, rename)
        return Part(None)

    on_every_rank(ctx, "export", part, raises=(OSError, ValueError, ImportError), patient=True)


def write(file: Path, leaves: Mapping[str, np.ndarray | str], rename: Mapping[str, str] | None = None) -> int:
    """Write named arrays and texts into a file, and return the number of arrays."""
    if file.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"{file}: the name must end in .safetensors or .npz")
    renamed: dict[str, tuple[str, np.ndarray | str]] = {}
    for name, x in leaves.items():
        try:
            new = functools.reduce(lambda text, rule: re.sub(*rule, text), (rename or {}).items(), name)
        except (re.error, IndexError) as error:
            raise ValueError(f"rename {rename}: {error}") from None
        if new in renamed:
            raise ValueError(f"rename: {renamed[new][0]} and {name} would both be {new!r}")
        renamed[new] = name, x
    texts = {name: x for name, (_, x) in renamed.items() if isinstance(x, str)}
    arrays = {name: x for name, (_, x) in renamed.items() if not isinstance(x, str)}
    if not arrays:
        raise ValueError("the tree has no arrays to write")
    if reserved := {"__metadata__", "file", "allow_pickle"} & renamed.keys():
        raise ValueError(f"an array can't have the name {min(reserved)!r} in such a file: rename it")
    for name, x in arrays.items():
        # `np.load` would return types that are not NumPy's own as meaningless bytes.
        if not (np.dtype(x.dtype.type).isbuiltin == 1 if file.suffix == ".npz" else x.dtype.name in IN_SAFETENSORS):
            raise ValueError(f"{name} is {x.dtype}, which {file.suffix} does not have: convert it (x.astype) before")
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        draft = Path(folder) / file.name
        if file.suffix == ".npz":
            with draft.open("wb") as out:
                np.savez(out, allow_pickle=False, **arrays, **{name: np.array(x) for name, x in texts.items()})
        else:
            need("safetensors", "a .safetensors file")
            from safetensors.numpy import save_file

            save_file({name: np.array(x, order="C") for name, x in arrays.items()}, draft, metadata=texts)
        draft.replace(file)
    return len(arrays)
